"""What training reads: images, captions, shards and their cache, and each patch that Streaming needs."""
