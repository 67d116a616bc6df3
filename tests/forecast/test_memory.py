"""What a training needs in memory, against published sizes."""
import benchmark
from sdbench.forecast.memory import build_on_meta, lasting_bytes
from sdbench.models.loading import find_model
from tests.runs import settings_of

README = ['--use_ema', '--use_synth_data', '--device_train_microbatch_size', '4']
UNET = 865_910_724 * 4  # published numbers of parameters, in float32
TEXT_ENCODER = 340_387_840 * 4
VAE = 83_653_863 * 4


def outline(settings, latents: bool = False):
    return build_on_meta(settings, find_model(settings.model_name), latents, benchmark.build_model)


def test_items_are_the_published_sizes():
    settings = settings_of(*README)
    assert lasting_bytes(settings, outline(settings), 8) == {
        'weights': UNET, 'gradients': UNET, 'Adam moments': 2 * UNET, 'average of the weights': UNET,
        'gradient buckets': UNET, 'text encoder': TEXT_ENCODER, 'VAE': VAE}
    settings = settings_of('--use_synth_latents', '--encoder_precision', 'bf16')
    assert lasting_bytes(settings, outline(settings, latents=True), 1) == {
        'weights': UNET, 'gradients': UNET, 'Adam moments': 2 * UNET, 'text encoder': TEXT_ENCODER // 2}
