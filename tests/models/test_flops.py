"""Arithmetic of an image, against the published figures, and the peaks of devices."""
import pytest
import torch
from transformers import CLIPTextConfig

from benchmark import StableDiffusion
from models import flops
from models.flops import peak_tflops
from models.loading import SD2_BASE, find_model


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path):
    """A folder for caches that is new."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return tmp_path


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """The sizes of which the arithmetic was counted."""
    sizes = []

    def count(unet_config, text_config, latent_side):
        sizes.append(latent_side)
        return {'unet': 1000 * latent_side, 'text_encoder': 7}

    monkeypatch.setattr(flops, 'training_flops', count)
    monkeypatch.setattr(flops, 'encoding_flops', lambda vae_config, image_size: image_size)
    return sizes


def flops_of(image_size: int, latents: bool = False) -> dict[str, int]:
    with torch.device('meta'):
        return StableDiffusion('tiny', image_size, latents=latents).flops_per_image


def test_a_configuration_is_counted_once_and_kept(counted):
    first = flops_of(64)
    assert flops_of(64) == first and counted == [8]
    assert flops_of(128) != first and counted == [8, 16]
    assert flops_of(64, latents=True) == first | {'vae': 0} and counted == [8, 16, 8]


def test_a_count_of_another_torch_is_not_taken(counted, monkeypatch):
    flops_of(64)
    monkeypatch.setattr(torch, '__version__', '3.0.0')
    flops_of(64)
    assert counted == [8, 8]


def test_a_kept_count_that_is_not_whole_is_counted_again(counted, caches):
    first = flops_of(64)
    [file] = [path for path in caches.rglob('*') if path.is_file()]
    file.write_text(file.read_text()[:9])
    assert flops_of(64) == first and counted == [8, 8]
    assert flops_of(64) == first and counted == [8, 8]


@pytest.mark.parametrize('content', ['[1]', 'null', '{}', '{"unet": 1, "text_encoder": 1, "vae": -5}',
                                     '{"unet": 1.5, "text_encoder": 1, "vae": 1}', '{"unet": 1, "vae": 1}',
                                     pytest.param('[' * 100_000, id='deep')])
def test_what_is_no_count_is_counted_again(counted, caches, content):
    first = flops_of(64)
    [file] = [path for path in caches.rglob('*') if path.is_file()]
    file.write_text(content)
    assert flops_of(64) == first and counted == [8, 8]


def test_a_count_that_cannot_be_moved_to_its_name_leaves_no_file(counted, caches):
    first = flops_of(64)
    [file] = [path for path in caches.rglob('*') if path.is_file()]
    file.unlink()
    file.mkdir()
    assert flops_of(64) == first and list(file.parent.iterdir()) == [file]


def test_what_a_library_notes_in_another_order_in_each_process_makes_no_other_count(counted):
    for noted in (['a', 'b'], ['b', 'a']):
        config = {'sample_size': 8, '_use_default_values': noted}
        flops.flops_of_an_image(config, CLIPTextConfig(), config, 64)
    assert counted == [8]


def test_where_nothing_can_be_kept_it_is_counted_each_time(counted, caches):
    (caches / 'diffusion-benchmark').write_text('no folder')
    assert flops_of(64) == flops_of(64) and counted == [8, 8]


def test_what_draws_and_what_encodes_is_counted_once_as_well(monkeypatch):
    counted = []
    of_parts = {'unet': 3, 'text_encoder': 1, 'vae': 2}
    monkeypatch.setattr(flops, 'drawing_flops', lambda *settings: counted.append(settings) or of_parts)
    monkeypatch.setattr(flops, 'encoding_flops', lambda *settings: counted.append(settings) or 5)
    for image_size in (64, 64, 128):
        assert flops.flops_of_a_picture({}, CLIPTextConfig(), {}, image_size) == of_parts
        assert flops.flops_of_latents({}, image_size) == 5
    assert [settings[-1] for settings in counted] == [64, 64, 128, 128]


def test_a_batch_takes_what_its_images_take_at_the_size_that_the_model_trains_at(counted):
    with torch.device('meta'):
        model = StableDiffusion('tiny', 64)
    stored = {'image': torch.empty(3, 3, 32, 32, device='meta'), 'caption': torch.empty(3, 77, device='meta')}
    assert model.flops_per_batch(stored) == 3 * (8000 + 64 + 7) and counted == [8]


@pytest.mark.parametrize('image_size, unet, vae', [
    (512, 2408.7, 1116.7), pytest.param(256, 539.3, 272.7, marks=pytest.mark.long)])
def test_flops_of_an_image_are_the_published_ones(image_size, unet, vae):
    configs = find_model(SD2_BASE).configs
    of_parts = flops.flops_of_an_image(configs['unet'], CLIPTextConfig(**configs['text_encoder']), configs['vae'],
                                       image_size)
    assert of_parts['unet'] / 1e9 == pytest.approx(unet, abs=0.1)
    assert of_parts['vae'] / 1e9 == pytest.approx(vae, abs=0.1)
    assert of_parts['text_encoder'] / 1e9 == pytest.approx(45.1, abs=0.1)


@pytest.mark.parametrize('name, peak', [
    ('NVIDIA A100-SXM4-40GB', 312), ('NVIDIA H100 80GB HBM3', 989), ('NVIDIA H200', 989), ('NVIDIA B200', 2250),
    ('NVIDIA H100 PCIe', 756), ('NVIDIA H200 NVL', 835), ('Tesla T4', None), ('NVIDIA A10G', None),
])
def test_only_known_devices_have_a_peak(as_on_a_gpu, name, peak):
    as_on_a_gpu(name=name)
    assert peak_tflops('amp_bf16') == peak
    assert peak_tflops('fp32') is None


def test_drawing_takes_passes_of_the_unet_the_text_encoder_and_the_decoder():
    configs = find_model('tiny').configs
    text_config = CLIPTextConfig(**configs['text_encoder'])
    with torch.device('meta'), torch.no_grad():
        model = StableDiffusion('tiny', 64)
        latents, caption = torch.empty(1, 4, 8, 8), torch.empty(1, 77, dtype=torch.long)
        text_encoder, text = flops.count_flops(lambda: model.text_encoder(caption)[0])
        unet, _ = flops.count_flops(lambda: model.unet(latents, torch.empty(1), text))
        decoder, _ = flops.count_flops(lambda: model.vae.decode(latents))
    assert flops.drawing_flops(configs['unet'], text_config, configs['vae'], 64) == {
        'unet': unet, 'text_encoder': text_encoder, 'vae': decoder}
