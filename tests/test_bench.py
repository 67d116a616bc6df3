"""`make bench`: each of its programs ends with its ratio."""
import importlib
import re
import sys

import pytest

from tests.runs import TINY

# what stands for the sizes at which they are run
SMALL = {
    'loader': {'NUM_SAMPLES': 64},
    'conversion': {'NUM_TARS': 2, 'SAMPLES_A_TAR': 50},
    'ema_update': {'SD2_BASE': 'tiny'},
    'step': {'FLAGS': ['--use_synth_data', '--use_ema', *TINY, '--results', '-']},
}


@pytest.mark.long
@pytest.mark.parametrize('name', SMALL)
def test_every_program_of_make_bench_prints_its_ratio_last(name, monkeypatch, capsys):
    module = importlib.import_module(f'benchmarks.{name}')
    for constant, value in SMALL[name].items():
        monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(sys, 'argv', [name, '1'] if name == 'conversion' else [name])
    module.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r'\w+ ratio \d+\.\d+', last)
