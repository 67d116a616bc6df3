"""A package, and no mere folder: an installed library may bring one that is called tests as well, found before it."""
