"""What a command prints to a reader that has gone, as head goes, does not end it."""
import io
import json
import os
import signal
import sys

from cli.streams import outlive_readers
from tests.forked_runs import script
from tests.forks import status_of_child
from tests.runs import ROOT

TRAINING = ['--use_synth_data', '--model_name', 'tiny', '--image_size', '64', '--batch_size', '4', '--warmup_batches',
            '1', '--max_duration', '2ba', '--autoresume']


def lead_to(file: int, name: str, unbuffered: bool = False) -> None:
    """From here on `stdout` or `stderr` prints to this open file, by a stream as Python opens it at its start."""
    number = {'stdout': 1, 'stderr': 2}[name]
    os.dup2(file, number)
    os.close(file)
    raw = io.FileIO(number, 'wb', closefd=False)
    stream = io.TextIOWrapper(raw if unbuffered else io.BufferedWriter(raw), write_through=unbuffered)
    setattr(sys, name, stream)


def leave_without_readers(unbuffered: bool = False) -> None:
    """This process prints to pipes that nobody reads."""
    for name in ('stdout', 'stderr'):
        read, write = os.pipe()
        lead_to(write, name, unbuffered)
        os.close(read)


def printing_status(unbuffered: bool) -> int:
    """0, where all that is printed, as much as a buffer holds and more, raises nothing until the very end."""
    leave_without_readers(unbuffered)
    outlive_readers()
    for stream in (sys.stdout, sys.stderr):
        print('a' * 100_000, file=stream)
        print('b', file=stream, flush=True)
        os.write(stream.fileno(), b'as libraries in C write')
        stream.flush()
    return 0


def test_printing_to_a_closed_pipe_raises_nothing_buffered_or_not():
    assert status_of_child(lambda: printing_status(unbuffered=False)) == 0
    assert status_of_child(lambda: printing_status(unbuffered=True)) == 0


def test_a_stream_that_was_closed_from_the_start_takes_what_is_printed():
    def print_to_nothing() -> None:
        sys.stdout = None  # as Python has it behind >&-
        outlive_readers()
        print('a', flush=True)
        sys.stdout.flush()
    assert status_of_child(print_to_nothing) == 0


def test_other_errors_of_a_stream_are_raised():
    def print_to_full_disk() -> int:
        lead_to(os.open('/dev/full', os.O_WRONLY), 'stdout')
        outlive_readers()
        try:
            print('a', flush=True)
        except OSError:
            return 0
        return 3
    assert status_of_child(print_to_full_disk) == 0


def test_what_a_full_disk_does_not_take_of_a_log_is_left_out():
    def log_to_full_disk() -> None:
        lead_to(os.open('/dev/full', os.O_WRONLY), 'stderr')
        outlive_readers()
        print('a' * 100_000, file=sys.stderr, flush=True)
    assert status_of_child(log_to_full_disk) == 0


def test_a_terminal_that_goes_away_takes_what_is_printed():
    def print_to_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        master, terminal = os.openpty()
        lead_to(terminal, 'stderr')
        outlive_readers()
        os.close(master)
        for _ in range(2):
            print('a', file=sys.stderr, flush=True)
    assert status_of_child(print_to_terminal) == 0


def run_without_readers(argv: list[str]) -> None:
    """A command of ours, as Python runs it, whose output nobody reads; the last words of its Python raise nothing."""
    leave_without_readers()
    try:
        script([str(ROOT / argv[0]), *argv[1:]])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def status_without_readers(server, *argv: str) -> int:
    process = server.Process(target=run_without_readers, args=(list(map(str, argv)),))
    process.start()
    process.join(600)
    return process.exitcode


def test_a_training_whose_output_nobody_reads_ends_and_is_recorded_and_saved(server, tmp_path):
    results, folder = tmp_path / 'results.jsonl', tmp_path / 'checkpoints'
    assert status_without_readers(server, 'benchmark.py', *TRAINING, '--results', results, '--save_folder', folder) == 0
    [record] = map(json.loads, results.read_text().splitlines())
    assert record['status'] == 'complete' and record['trained_batches'] == 2
    assert list(folder.glob('*ba2*'))


def test_commands_that_print_to_no_reader_end_with_the_status_that_they_would_have(server):
    assert status_without_readers(server, 'report.py', ROOT / 'published.csv') == 0
    assert status_without_readers(server, 'convert.py', '--help') == 0
    assert status_without_readers(server, 'convert.py', 'nowhere', 'out') == 2
