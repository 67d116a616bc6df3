"""What a run says of how far it is, on a terminal and in a log."""
import re
import sys

from benchmark import main
from sdbench import process
from tests.runs import TINY


def test_a_resumed_run_says_from_where_and_counts_to_its_own_end_with_loss_speed_and_time_left(monkeypatch, tmp_path,
                                                                                               capfd):
    monkeypatch.setattr(process, 'SECONDS_BETWEEN_LINES', 0)
    folder = tmp_path / 'checkpoints'
    argv = ['--use_synth_data', *TINY, '--save_folder', str(folder), '--autoresume', '--max_duration']
    main([*argv, '2ba'])
    assert f'--save_folder {folder} holds no checkpoint yet: starting from the first batch' in capfd.readouterr().out
    record = main([*argv, '4ba'])
    out, err = capfd.readouterr()
    assert f'resuming from {folder}/ep0-ba2-rank0.pt, batch 2 of 4\n' in out
    _, second, third, *_ = [line for line in err.splitlines() if ' left' in line]
    assert re.fullmatch(r'12 of 16 images, \S+ images/s, \d\d:\d\d left, batch 3, loss \d\.\d{3}', second)
    assert third.startswith('16 of 16 images') and f'batch 4, loss {record["loss"]:.3f}' in third
    assert (record['first_batch'], record['trained_batches']) == (2, 4)


def test_a_terminal_has_one_bar_for_all_epochs_which_ends_at_100_percent(monkeypatch, shards, capfd):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    record = main(['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--max_duration', '2ep'])
    bar = capfd.readouterr().err.split('\r')[-1].splitlines()[0]
    assert re.match(r'100%\|█+\| 48/48 \[.* images/s, batch 6, loss \d\.\d{3}\]', bar), bar
    assert record['trained_epochs'] == 2
