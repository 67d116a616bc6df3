"""Arithmetic of a batch."""
import torch

from benchmark import StableDiffusion
from sdbench.models import flops


def test_a_batch_takes_what_its_images_take_at_the_size_that_the_model_trains_at(smallest_with_attention):
    with torch.device('meta'):
        model = StableDiffusion(smallest_with_attention, 16)
        on_latents = StableDiffusion(smallest_with_attention, 16, latents=True)
    stored = {'image': torch.empty(3, 3, 8, 8, device='meta'), 'caption': torch.empty(3, 77, device='meta')}
    of_parts = model.flops_per_image
    assert model.flops_per_batch(stored) == 3 * sum(of_parts.values())
    assert min(of_parts.values()) > 0
    assert on_latents.flops_per_image == of_parts | {'vae': 0}
    assert of_parts['vae'] == flops.flops_of_latents(model.vae.config, 16)
