"""The memory forecast agrees with published model sizes, and with a step on real tensors."""
import copy

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel

import benchmark
from sdbench.flags.train import Train
from sdbench.forecast.forecast import bytes_needed
from sdbench.forecast.step import ITEMS
from sdbench.forecast.trace import build_on_meta, norms_in_float32, trace_step
from sdbench.models.loading import AUTOCAST_DTYPES
from sdbench.setup import Setup
from sdbench.training.microbatch import blank_batch
from tests.runs import settings_of

IMAGES = 3  # another number of images than in the trace


def peak_of_real_tensors(settings: Train) -> int:
    """Return the peak bytes on real tensors as torch's own tracker counts them.

    They exclude the weights, and workspaces of kernels, which differ between CPUs.
    """
    model = benchmark.build_model(settings, False).train()
    model.requires_grad_()  # the tracker takes no frozen weights; the encoders still run without gradients
    dtype = AUTOCAST_DTYPES.get(settings.precision)
    tracker = MemTracker()
    tracker.track_external(model)
    backend = SDPBackend.MATH if settings.attention == 'math' else SDPBackend.FLASH_ATTENTION
    with norms_in_float32(), sdpa_kernel(backend), tracker:
        batch = blank_batch(model, IMAGES, 'cpu')
        composers_copy = copy.deepcopy(batch)
        with torch.autocast('cpu', dtype, enabled=dtype is not None):
            loss = model.loss(model(batch), batch)
        loss.backward()
    del composers_copy
    peak = {str(item): size for item, size in tracker.get_tracker_snapshot('peak')[torch.device('cpu')].items()}
    return peak['Total'] - peak['_MemRefType.PARAM'] - peak['_MemRefType.BUFFER']


@pytest.mark.parametrize('flags, tolerance', [
    ([], 0.001), (['--half_precision_norms', '--attention', 'math', '--gradient_checkpointing'], 0.002),
    pytest.param(['--precision', 'fp32'], 0.005, marks=pytest.mark.long),
    pytest.param(['--model_name', 'tiny', '--image_size', '64'], 0.001, marks=pytest.mark.long)], ids=str)
def test_the_peak_is_that_of_real_tensors(smallest_with_attention, flags, tolerance):
    settings = settings_of('--dry_run', '--model_name', smallest_with_attention, '--image_size', '16', '--batch_size',
                           IMAGES, *flags)
    memory, _ = trace_step(build_on_meta(settings, benchmark.build_model), settings.precision, settings.attention)
    calculation = sum(memory.peak(IMAGES, accumulated=False).values())
    assert calculation == pytest.approx(peak_of_real_tensors(settings), rel=tolerance)


UNET = 865_910_724 * 4  # published parameter counts, in float32
TEXT_ENCODER = 340_387_840 * 4
VAE = 83_653_863 * 4


def test_lasting_memory_follows_from_the_published_parameter_counts():
    def lasting_bytes(setup: Setup) -> dict[str, int]:
        needed = bytes_needed(setup.with_defaults(), 1)
        return {item: nbytes for item, nbytes in needed.items() if item not in ITEMS[1:]}

    lasting = lasting_bytes(Setup(use_ema=True, num_devices=8, encoder_precision='fp32'))
    state = lasting.pop('optimizer state')
    assert state == pytest.approx(2 * UNET, rel=1e-5)
    assert lasting == {'weights': UNET, 'gradients': UNET, 'EMA weights': UNET, 'gradient buckets': UNET,
                       'text encoder': TEXT_ENCODER, 'VAE': VAE}
    lasting = lasting_bytes(Setup(latents=True))
    assert lasting == {'weights': UNET, 'gradients': UNET, 'optimizer state': state, 'text encoder': TEXT_ENCODER // 2}
