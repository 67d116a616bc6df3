"""What report.py shows: tables and pictures."""
