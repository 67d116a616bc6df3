"""Reports from records: tables of speeds and scores, figures, and an HTML page."""
