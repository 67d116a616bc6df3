"""A package, since torch-fidelity 0.4.0 installs one of this name, which processes of tests would import instead."""
