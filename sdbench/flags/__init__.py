"""What a run was told: every flag of every command, and times as batches. Nothing here needs torch."""
