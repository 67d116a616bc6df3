"""Claims about setups: a measurement, its plan and the forecast for it have the same setup."""

from dataclasses import replace

import pytest

from sdbench.forecast.forecast import DoesNotFit, forecast
from sdbench.gpus import CARDS
from sdbench.records.settings import settings_of
from sdbench.setup import Setup


def test_a_microbatch_that_the_search_found_is_forecast_without_a_memory_margin():
    """On an H200, a microbatch of 128 took 132.2 of 139.8 GiB, which leaves less than the margin of 12 %."""
    setup = Setup(batch_size=128, use_ema=True, half_precision_norms=True)
    h200 = CARDS['NVIDIA H200']
    assert forecast(setup, h200).setup.microbatch == 64
    assert forecast(replace(setup, microbatch=128), h200).setup.microbatch == 128
    with pytest.raises(DoesNotFit):
        forecast(replace(setup, batch_size=256, microbatch=256), h200)


@pytest.mark.parametrize('changes, machines, network', [
    ({'num_devices': 12, 'gpus_per_node': 8}, 2, 'network not stated'),
    ({'num_devices': 8, 'num_nodes': 1, 'network_gbits': 100}, 1, None),
    ({'num_devices': 16, 'num_nodes': 2, 'network_gbits': 100}, 2, '100 Gbit/s network'),
    ({'num_devices': 8, 'num_nodes': 2, 'device': 'NVIDIA GB200'}, 2, None), ({'num_devices': 8}, None, None)])
def test_a_network_is_a_setting_only_between_machines_that_nvlink_does_not_connect(changes, machines, network):
    found = settings_of({'stage': 'train', 'status': 'complete', 'device': 'NVIDIA L40S'} | changes)
    assert (found['num_nodes'], found['network']) == (machines, network)
