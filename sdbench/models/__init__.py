"""Architectures as diffusers' own configuration files, how they are found and made, and what arithmetic they take."""
