"""What a run needs in memory and how fast it should be, without a GPU: --dry_run."""
