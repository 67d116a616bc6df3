"""Arithmetic of an image, against the published figures."""
import pytest
import torch

from benchmark import StableDiffusion
from sdbench.models import flops
from sdbench.models.loading import SD2_BASE


@pytest.mark.parametrize('image_size, unet, vae', [
    (512, 2408.7, 1116.7), pytest.param(256, 539.3, 272.7, marks=pytest.mark.long)])
def test_flops_of_an_image_are_the_published_ones(image_size, unet, vae):
    with torch.device('meta'):
        of_parts = StableDiffusion(SD2_BASE, image_size).flops_per_image
    assert of_parts['unet'] / 1e9 == pytest.approx(unet, abs=0.1)
    assert of_parts['vae'] / 1e9 == pytest.approx(vae, abs=0.1)
    assert of_parts['text_encoder'] / 1e9 == pytest.approx(45.1, abs=0.1)


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
