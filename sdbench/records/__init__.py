"""Records of runs, lines of JSON: what each key means, how one is written, and how a report reads it."""
