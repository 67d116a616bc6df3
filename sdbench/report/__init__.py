"""Reports from records: tables of speeds, plans and scores, figures, and an HTML page."""
