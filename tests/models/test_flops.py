"""Arithmetic of an image, against the published figures, and the peaks of devices."""
import pytest
import torch

from benchmark import StableDiffusion
from models.flops import peak_tflops
from models.loading import SD2_BASE


@pytest.mark.parametrize('image_size, unet, vae, total', [(512, 2408.7, 1116.7, 3570.5), (256, 539.3, 272.7, 857.2)])
def test_flops_of_an_image_are_the_published_ones(image_size, unet, vae, total):
    with torch.device('meta'):
        model = StableDiffusion(SD2_BASE, image_size)
    flops = model.flops_per_image
    assert flops['unet'] / 1e9 == pytest.approx(unet, abs=0.1)
    assert flops['vae'] / 1e9 == pytest.approx(vae, abs=0.1)
    assert flops['text_encoder'] / 1e9 == pytest.approx(45.1, abs=0.1)
    stored = {'image': torch.empty(3, 3, 256, 256, device='meta'), 'caption': torch.empty(3, 77, device='meta')}
    assert model.flops_per_batch(stored) / 1e9 == pytest.approx(3 * total, abs=0.3)


@pytest.mark.parametrize('name, peak', [
    ('NVIDIA A100-SXM4-40GB', 312), ('NVIDIA H100 80GB HBM3', 989), ('NVIDIA H200', 989), ('NVIDIA B200', 2250),
    ('NVIDIA H100 PCIe', 756), ('NVIDIA H200 NVL', 835), ('Tesla T4', None), ('NVIDIA A10G', None),
])
def test_only_known_devices_have_a_peak(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: name)
    assert peak_tflops('amp_bf16') == peak
    assert peak_tflops('fp32') is None
