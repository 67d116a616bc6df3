"""What the progress bar of a resumed run says."""
import re

import pytest

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
