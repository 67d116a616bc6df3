"""What a run was told: every flag, and the table of the switches of speed. Nothing here needs torch."""
