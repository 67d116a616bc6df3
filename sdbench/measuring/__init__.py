"""Measure the speed of a run, the power of its GPUs, and a trace."""
