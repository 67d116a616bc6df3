"""What a run says of how far it is, on a terminal and in a log."""
import re
import sys

from benchmark import main
from sdbench.training import progress
from tests.runs import SMALLEST, TINY


def test_a_short_run_leaves_one_line_in_a_log(plain_run):
    built, line = plain_run.errors.splitlines()
    assert built == f'building {SMALLEST} for images of 16 px, 4 a batch, on 1 device'
    assert re.fullmatch(rf'batch 4 of 4: loss {plain_run.record["loss"]:.3f}, \S+ images/s', line)


def test_a_resumed_run_says_from_where_and_counts_to_its_own_end_with_loss_speed_and_time_left(monkeypatch, tmp_path,
                                                                                               capfd):
    monkeypatch.setattr(progress, 'SECONDS_BETWEEN_LINES', 0)
    folder = tmp_path / 'checkpoints'
    argv = ['--use_synth_data', *TINY, '--save_folder', str(folder), '--autoresume', '--max_duration']
    main([*argv, '2ba'])
    assert f'--save_folder {folder} holds no checkpoint yet: starting from the first batch' in capfd.readouterr().out
    record = main([*argv, '4ba'])
    out, err = capfd.readouterr()
    assert f'resuming from {folder}/ep0-ba2-rank0.pt, batch 2 of 4\n' in out
    third, fourth = [line for line in err.splitlines() if line.startswith('batch')]
    assert re.fullmatch(r'batch 3 of 4: loss \d\.\d{3}, \S+ images/s, \d\d:\d\d left', third)
    assert fourth.startswith('batch 4 of 4: ')
    assert (record['first_batch'], record['trained_batches']) == (2, 4)


def test_a_terminal_has_one_bar_for_all_epochs_which_ends_at_100_percent(monkeypatch, shards, capfd):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    record = main(['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--max_duration', '2ep'])
    bar = capfd.readouterr().err.split('\r')[-1].splitlines()[0]
    assert re.match(r'100%\|█+\| 6/6 \[.* batches.*loss \d\.\d{3}', bar), bar
    assert record['trained_epochs'] == 2
