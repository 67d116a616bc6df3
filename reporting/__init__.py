"""What report.py is made of: records read and checked, throughput, plans, tables and figures. No torch."""
