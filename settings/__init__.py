"""What a run was told: every flag by subject, and the table of the switches of speed. Nothing here needs torch."""
