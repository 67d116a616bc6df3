"""How fast a run is: its clock, its GPUs and its trace."""
