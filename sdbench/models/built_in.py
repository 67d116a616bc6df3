"""The built-in models: configurations without weights, because random ones are as fast. Only tiny has a trained VAE."""
from pathlib import Path

from sdbench.flags.train import SD2_BASE, TINY_MODEL

BUILT_IN = {SD2_BASE: Path(__file__).parent / 'stable-diffusion-2-base', TINY_MODEL: Path(__file__).parent / 'tiny'}
CONFIG_FILES = {'unet': 'config.json', 'vae': 'config.json', 'text_encoder': 'config.json',
                'scheduler': 'scheduler_config.json'}
