"""Datasets made in parts: what is read for them, the work that makes them, and where they are written."""
