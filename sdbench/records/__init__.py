"""Records of runs as lines of JSON: making them, describing their setups, reading and summarizing them."""
