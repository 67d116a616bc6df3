"""Find, build and load the networks of Stable Diffusion, apply switches, count FLOPs and generate images."""
