"""What the progress bars of a resumed run and of an encoding say."""
import io
import re
import sys

import pytest

import encode
from benchmark import main
from tests.runs import TINY


@pytest.mark.parametrize('first, second, last', [('4ba', '9ba', '9/9'), ('4ba', '60sp', '60/60'),
                                                 ('32sp', '10ba', '10/10')])
def test_a_resumed_run_counts_to_its_own_end(tmp_path, results, capfd, first, second, last):
    argv = ['--use_synth_data', *TINY, '--save_folder', str(tmp_path / 'checkpoints'), '--autoresume', '--results',
            str(results), '--max_duration']
    main([*argv, first])
    capfd.readouterr()
    main([*argv, second])
    counts = re.findall(r'(\d+/[\d?]+) \[', capfd.readouterr().err)
    assert counts[-1] == last and not any('?' in count for count in counts), counts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_encoding_shows_images_their_rate_and_the_time_left_and_only_on_a_terminal(tmp_path, shards, results, capfd,
                                                                                      monkeypatch):
    argv = ['--remote', shards, '--model_name', 'tiny', '--image_size', '64', '--batch_size', '5', '--num_workers', '0',
            '--results', str(results), '--out']
    encode.main([*argv, str(tmp_path / 'one')])
    assert 'images/s]' not in capfd.readouterr().err
    monkeypatch.setattr(sys, 'stderr', Terminal())
    encode.main([*argv, str(tmp_path / 'two')])  # in the same process, so that its count begins anew
    shown = re.findall(r'(\d+)/24 \[\d\d:\d\d<([^,]+), +([^\]]+)', sys.stderr.getvalue())
    assert shown[0][0] == '0' and shown[-1][0] == '24' and shown[-1][1] == '00:00'
    assert 'images/s' in shown[-1][2]
