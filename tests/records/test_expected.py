"""Claims about the speed that the forecast expects of a measured run, which reports, plans and proofs use alike."""
import math

import pytest

from sdbench.forecast.forecast import forecast
from sdbench.gpus import CARDS
from sdbench.records.expected import expected_of
from sdbench.setup import setup_of_record

RUN = {'stage': 'train', 'command': 'benchmark.py', 'device': 'NVIDIA H200', 'num_devices': 8, 'image_size': 512,
       'batch_size': 2048, 'device_train_microbatch_size': 32, 'precision': 'amp_bf16', 'encoders': 'in_loop'}


def test_a_training_and_an_encoding_each_have_their_own_speed_with_the_largest_microbatch_if_none_was_found():
    found = forecast(setup_of_record(RUN), CARDS['NVIDIA H200'])
    assert expected_of(RUN) == (found.setup, found.images_per_sec, '')
    encoding = RUN | {'stage': 'encode', 'compile': False, 'encoder_precision': 'bf16'}
    assert expected_of(encoding).images_per_sec == found.encode_images_per_sec
    largest = expected_of(RUN | {'device_train_microbatch_size': 'auto'})
    assert largest.images_per_sec >= found.images_per_sec and largest.setup.microbatch >= 32


@pytest.mark.parametrize('changes, reason', [
    ({'encoders': None}, 'does not state latents'), ({'stage': 'loader'}, 'no forecast for its stage'),
    ({'device': 'Xeon'}, 'or its GPU'), ({'command': None, 'compile': False}, 'does not state use_ema, grad'),
    ({'precision': 'fp99'}, 'nothing is forecast for its settings'),
    ({'device_train_microbatch_size': 256}, 'by the forecast it does not fit')])
def test_a_record_without_a_forecast_says_why(changes, reason):
    record = {key: value for key, value in (RUN | changes).items() if value is not None}
    expected = expected_of(record)
    assert math.isnan(expected.images_per_sec) and reason in expected.why_none
