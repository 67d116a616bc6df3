"""How fast a run is, and its record: clock, GPU, trace, costs, and the versions of the libraries."""
