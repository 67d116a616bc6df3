"""The code that the commands of the Stable Diffusion benchmark share. Nothing here imports a command."""
