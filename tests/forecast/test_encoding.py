"""encode.py --dry_run: what it counts against what torch counts on real tensors, and what was published."""
import json
import re

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import encode
from sdbench.datasets.encoder import build_encoding_vae, encode_images
from sdbench.flags.commands import Encode
from sdbench.flags.parser import parse
from sdbench.forecast.encoding import EncodingEstimate, estimate_encoding
from sdbench.gpus import CARDS
from sdbench.models.loading import find_model
from sdbench.training.resolve import resolve_encoding_defaults

IMAGES = 3  # not the number that is traced
TINY = ['--model_name', 'tiny', '--image_size', '128']
A100 = CARDS['NVIDIA A100-SXM4-40GB']


def settings_of(*flags: str) -> Encode:
    return resolve_encoding_defaults(parse(Encode, '', ['--dry_run', '1', *flags]))


def estimate(*flags: str) -> EncodingEstimate:
    return estimate_encoding(settings_of(*flags))


def flops_of_an_image(one: EncodingEstimate) -> float:
    return sum(work.flops for work in one.work.per_image.values())


@pytest.mark.parametrize('flags', [[], ['--encoder_precision', 'fp32', '--no-channels_last']], ids=str)
def test_memory_and_arithmetic_are_those_of_real_tensors(flags):
    settings = settings_of(*TINY, *flags)
    vae = build_encoding_vae(settings, find_model('tiny'), torch.device('cpu'))
    weights = sum(weight.nbytes for weight in vae.parameters())
    vae.requires_grad_()  # the tracker takes no frozen weights; nothing is kept for them
    tracker = MemTracker()
    tracker.track_external(vae)
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), tracker:
        encode_images(vae, torch.zeros(IMAGES, 3, 128, 128, dtype=torch.uint8), 128)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        encode_images(vae, torch.zeros(IMAGES, 3, 128, 128, dtype=torch.uint8), 128)
    peak = tracker.get_tracker_snapshot('peak')[torch.device('cpu')]['Total']

    one = estimate(*TINY, *flags)
    assert one.vae_bytes == weights
    assert one.counted(IMAGES) == pytest.approx(peak, rel=0.001)
    assert flops_of_an_image(one) == pytest.approx(counter.get_total_flops() / IMAGES)


def test_the_largest_published_encoding_took_little_longer_than_is_forecast():
    """mosaicml/diffusion: 3,784 A100-hours for 790 million images at 256 and 512 pixels, and for the states of their
    captions, whose encoder takes 45.1 GFLOP each."""
    flags = ['--encoder_precision', 'fp16', '--no-channels_last', '--batch_size', '64', '--image_size']
    seconds = sum(1 / estimate(*flags, size).images_per_sec(A100) for size in ('256', '512'))
    seconds += 45.1e9 / (0.5 * A100.tflops * 1e12)
    assert 1 < 3784 / (790e6 * seconds / 3600) < 1.15


@pytest.fixture
def forecast(capfd):
    """Calls encode.py --dry_run, and returns what it prints and its records."""
    def forecast(*flags) -> tuple[str, list[dict]]:
        records = encode.main(['--dry_run', '8', *TINY, *map(str, flags)])
        return capfd.readouterr().out, records
    return forecast


def test_a_row_for_each_card_the_cheapest_first_and_a_record_of_each(forecast, shards, tmp_path):
    out, records = forecast('--remote', shards, '--gpu', 'A100', '--dollars_per_gpu_hour', '3', 'A100-40GB=1',
                            '--results', 'plan.jsonl')
    assert [json.loads(line) for line in (tmp_path / 'plan.jsonl').read_text().splitlines()] == records
    assert [path.name for path in tmp_path.iterdir()] == ['plan.jsonl']
    rows = [re.split('  +', line) for line in out.splitlines() if line.startswith('A100')]
    assert len(rows) == len(records) == 4
    costs = []
    for (name, taken, speed, hours, dollars), record in zip(rows, records, strict=True):
        assert record['device'] == f'NVIDIA {name}'
        assert (record['stage'], record['status'], record['num_devices']) == ('encode', 'forecast', 8)
        assert record['stored_samples'] == 24  # by the index of --remote
        assert float(taken) == pytest.approx(record['peak_memory_gib'], abs=0.05)
        assert float(speed.replace(',', '')) == pytest.approx(record['images_per_sec'], rel=0.01)
        assert float(hours) == pytest.approx(24 / record['images_per_sec'] / 3600, rel=0.01)
        assert float(dollars) == pytest.approx(float(hours) * 8 * (1 if '40GB' in name else 3), rel=0.01)
        costs.append(float(dollars))
    assert costs == sorted(costs)
    assert max(map(len, out.splitlines())) <= 120


def test_images_can_be_given_and_several_terabytes_are_said_to_be_such(forecast):
    out, [record] = forecast('--images', 10 ** 9, '--gpu', 'L40S', '--compile')
    assert 'encoding 1,000,000,000 images at 128 pixels in bf16' in out
    assert '4,104 bytes an image beside its caption, 4.1 TB in all' in out
    assert (record['stored_samples'], record['compile']) == (10 ** 9, False)  # compiling is not forecast


def test_a_batch_that_no_card_holds_is_refused_with_one_that_fits(capfd):
    with pytest.raises(SystemExit) as exit:
        encode.main(['--dry_run', '1', *TINY, '--batch_size', '65536', '--gpu', 'L4'])
    assert exit.value.code == 2
    *_, line = capfd.readouterr().err.splitlines()
    smaller = re.search('--batch_size 65536 takes .* take --batch_size ([0-9]+)$', line)
    assert estimate(*TINY).taken(int(smaller[1])) < 22 < estimate(*TINY).taken(2 * int(smaller[1]))
