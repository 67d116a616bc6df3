"""What is forecast of a compiled step is near what is counted as torch's compiler would run it on a GPU."""
import pandas as pd
import pytest

from benchmarks.forecast import shares
from benchmarks.variant import write_variant
from sdbench.flags.train import SD2_BASE, Train
from sdbench.forecast.compiling import compiled

pytestmark = pytest.mark.usefixtures('dynamo')

# Stable Diffusion 2 with a block of each kind; its VAE halves an image once, so that latents of 128 pixels have 64
FEWER_BLOCKS = {
    'unet': {'layers_per_block': 1, 'block_out_channels': [320, 640], 'attention_head_dim': [5, 10],
             'down_block_types': ['CrossAttnDownBlock2D', 'DownBlock2D'],
             'up_block_types': ['UpBlock2D', 'CrossAttnUpBlock2D']},
    'vae': {'layers_per_block': 1, 'block_out_channels': [128, 256], 'down_block_types': ['DownEncoderBlock2D'] * 2,
            'up_block_types': ['UpDecoderBlock2D'] * 2},
    'text_encoder': {'num_hidden_layers': 1}}


@pytest.fixture
def model_name(tmp_path) -> str:
    write_variant(SD2_BASE, tmp_path / 'model', FEWER_BLOCKS)
    return str(tmp_path / 'model')


def errors_of_forecast(counted: tuple, settings: Train) -> pd.Series:
    """Return by how much the forecast of a compiled step is off from what was counted of it, by figure."""
    *eager, lasting = shares.count_eager(settings.model_name, settings.image_size)
    return shares.figures_of(*compiled(*eager, settings), lasting) / shares.figures_of(*counted, lasting) - 1


@pytest.mark.long
@pytest.mark.parametrize('flags', [['--no-compile_blocks'], ['--compile_blocks', '--no-half_precision_norms']], ids=str)
def test_a_compiled_step_is_forecast_as_the_compiler_would_run_it(model_name, flags):
    settings = shares.settings_of(model_name, 128, '--compile', *flags)
    errors = errors_of_forecast(shares.count_compiled(settings), settings)
    assert errors.filter(like='images/s').abs().max() < 0.015
    assert errors.filter(like='memory').abs().max() < 0.03
    assert abs(errors['encoding']) < 0.04
