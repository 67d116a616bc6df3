"""Make datasets part by part: read the sources, let workers convert or encode them, and write the shards."""
