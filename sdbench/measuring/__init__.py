"""How fast a run is, and its record: clock, GPU and trace."""
