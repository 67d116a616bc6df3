"""What fits into a device and what makes it faster: memory, microbatch, --dry_run, and the switches of speed."""
