"""Command lines: the flags of every command, their defaults, what is refused before a run, and the next command."""
