"""What is forecast of a compiled step is near what is counted as torch's compiler would run it on a GPU."""
import pandas as pd
import pytest

from benchmarks.forecast import shares
from sdbench.flags.train import Train
from sdbench.forecast.compiling import compiled
from sdbench.forecast.count import ATTENTION
from sdbench.models.loading import SD2_BASE

pytestmark = pytest.mark.usefixtures('dynamo')


def errors_of_forecast(counted: tuple, model_name: str, image_size: int, settings: Train) -> pd.Series:
    """Return by how much the forecast of a compiled step is off from what was counted of it, by figure."""
    *eager, lasting = shares.count_eager(model_name, image_size)
    return shares.figures_of(*compiled(*eager, settings), lasting) / shares.figures_of(*counted, lasting) - 1


@pytest.mark.long
def test_a_step_that_is_compiled_by_blocks_with_norms_in_float32_is_forecast_as_the_compiler_would_run_it():
    settings = shares.settings_of('tiny', 64, '--compile', '--compile_blocks', '--no-half_precision_norms')
    errors = errors_of_forecast(shares.count_compiled(settings), 'tiny', 64, settings)
    assert errors.filter(like='images/s').abs().max() < 0.06
    assert errors.filter(like='memory').abs().max() < 0.08


@pytest.mark.long
def test_stable_diffusion_2_on_latents_is_3150_kernels_and_6_7_gigabytes_an_image_compiled():
    settings = shares.settings_of(SD2_BASE, 512, '--compile', '--no-compile_blocks')
    memory, work = shares.count_compiled(settings)
    assert work.model['kernels'].sum() == pytest.approx(3150, rel=0.02)
    assert work.model['image_bytes'].sum() == pytest.approx(6.7e9, rel=0.03)
    published = 2408.7e9 + 45.1e9  # of UNet and text encoder, without the scores that attention computes again
    flops = work.model['image_flops']
    assert flops.sum() == pytest.approx(published + flops[ATTENTION] / 6, rel=0.01)
    assert memory.peak(64, accumulated=False)['activations'] == pytest.approx(64 * 0.71 * 2 ** 30, rel=0.02)
    assert errors_of_forecast((memory, work), SD2_BASE, 512, settings).abs().max() < 0.02
