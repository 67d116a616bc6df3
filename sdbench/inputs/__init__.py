"""Read training data: images, captions, tokens, and MDS shards with their cache, with our fixes to Streaming."""
