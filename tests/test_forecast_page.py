"""docs/forecast.md, forecast-model.md and speed.md: the speeds and constants are those of records and program."""
import json
import math

from sdbench.forecast.forecast import UNCOUNTED_SHARE, Forecast, forecast
from sdbench.forecast.speed import CONSTANTS, LARGEST_ERROR, TESTED
from sdbench.gpus import CARDS, NETWORK_SHARE, NVLINK_SHARE, PCIE_SHARE, short_name
from sdbench.setup import setup_of_record
from tests.runs import ROOT
from tests.test_report import columns, tables


def records_of(name: str) -> list[dict]:
    """Return the records of trainings in a file of results/."""
    records = map(json.loads, (ROOT / 'results' / name).read_text().splitlines())
    return [record for record in records if record['stage'] == 'train']


def measured_with_forecasts() -> list[tuple[dict, Forecast]]:
    """Return each measured run with the forecast for its setup."""
    runs = [*records_of('1xH100-torch-2.11.jsonl'), *records_of('1xH200-torch-2.11.jsonl')]
    return [(run, forecast(setup_of_record(run), CARDS[run['device']])) for run in runs]


def test_the_table_of_own_measurements_has_each_run_and_its_forecast():
    expected = []
    for run, found in measured_with_forecasts():
        speed = f'{found.images_per_sec:.1f}'
        if found.is_tested:
            least, most = found.images_per_sec_range
            speed += f' ({least:.1f} to {most:.1f})'
        gpu = run['device'].removeprefix('NVIDIA ').split()[0]
        error = round(100 * (found.images_per_sec / run['images_per_sec'] - 1))
        expected.append((gpu, str(run['device_train_microbatch_size']), f'{run["images_per_sec"]:.1f}', speed,
                         f'{error:+} %' if error else '0 %'))
    table = tables((ROOT / 'docs/forecast.md').read_text().replace('**', '').replace('second H100', 'H100'))[0]
    shown = columns(table, 'GPU', 'microbatch', 'measured', 'forecast', 'error')
    assert sorted(shown) == sorted(expected)


def test_only_one_run_is_outside_its_printed_range_and_the_table_marks_it():
    outside = []
    for run, found in measured_with_forecasts():
        least, most = found.images_per_sec_range or (0, math.inf)
        if not least <= run['images_per_sec'] <= most:
            outside.append((run['images_per_sec'], least, most))
    [(speed, least, most)] = outside
    row = f'| **{speed:.1f}** | **25.2 ({least:.1f} to {most:.1f})** |'
    assert row in (ROOT / 'docs/forecast.md').read_text()


def test_what_flags_made_faster_is_the_ratio_of_two_records():
    speeds = [f'{run["images_per_sec"]:.1f}' for run, _ in measured_with_forecasts()]
    text = ' '.join((ROOT / 'docs/speed.md').read_text().split())
    for ratio, after, before in (('1.45', '98.0', '67.5'), ('1.87', '102.0', '54.5')):
        assert {after, before} <= {*speeds}
        assert f'{float(after) / float(before):.2f}' == ratio
        assert f'{ratio} times as fast' in text and f'({after} instead of {before} images/s' in text


def test_the_setups_that_have_a_range_are_those_of_the_program():
    expected = []
    for mode, setups in TESTED.items():
        for (device, size, latents), layouts in setups.items():
            kind = f'{size}, {"latents" if latents else "images"}'
            gpu = short_name(device).replace('H100 80GB', 'H100')
            compiled = f'`{mode}`' if mode else 'none'
            expected += [(gpu, kind, compiled, str(gpus), str(images)) for gpus, images in layouts]
    [table] = [table for table in tables((ROOT / 'docs/forecast.md').read_text()) if 'GPUs, at most' in table[0]]
    assert sorted(tuple(row.values())[:5] for row in table) == sorted(expected)


def test_the_errors_on_several_machines_are_within_the_largest_error_of_the_program():
    [table] = [table for table in tables((ROOT / 'docs/forecast-model.md').read_text()) if 'submitter' in table[0]]
    errors = [float(row['error'].removesuffix(' %')) / 100 for row in table]
    assert LARGEST_ERROR - 0.01 < max(map(abs, errors)) <= LARGEST_ERROR


def test_the_constants_are_those_of_the_program():
    text = (ROOT / 'docs/forecast-model.md').read_text()
    values = {'*p*': f'{CONSTANTS.peak_share}', '*b*': f'{CONSTANTS.bandwidth_share}',
              '*m*': f'{CONSTANTS.bytes_a_cycle}', '*k*': f'{CONSTANTS.seconds_a_kernel * 1e6:.1f} µs',
              '*k* in a CUDA graph': f'{CONSTANTS.seconds_in_a_graph * 1e6:.2f} µs', 'NVLink': f'{NVLINK_SHARE}',
              'PCIe': f'{PCIE_SHARE}', 'network': f'{NETWORK_SHARE}', 'memory': f'{100 * UNCOUNTED_SHARE:.0f} %'}
    for name, value in values.items():
        assert f'| {name} | {value} |' in text
    range_of = ' '.join((ROOT / 'docs/forecast.md').read_text().split())
    assert f'multiplied by {1 + LARGEST_ERROR:.2f}' in range_of
