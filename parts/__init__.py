"""Datasets made in parts: what is read for them, the engine that makes them, and where they are written."""
