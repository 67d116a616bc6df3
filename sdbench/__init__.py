"""What the commands of the Stable Diffusion training benchmark are made of. Nothing here imports a command."""
