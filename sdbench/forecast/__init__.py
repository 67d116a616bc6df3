"""Forecast the memory and the speed of a run without a GPU: --dry_run."""
