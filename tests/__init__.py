"""Tests of the rooms and of the commands; a package, as an installed library that brings one of this name has it else."""
