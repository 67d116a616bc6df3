"""Datasets made in parts: reading sources, converting or encoding them, and writing the shards."""
