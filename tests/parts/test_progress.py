"""How far a command is: a bar on a terminal, a plain line now and then elsewhere, nothing for what is soon over."""
import io
import sys
import time

from parts import progress
from parts.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_that_ends_with_all(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', Terminal())
    with progress_bar(24, ' images', done=4) as bar:
        for _ in range(4):
            bar.update(5)
    states = sys.stderr.getvalue().split('\r')
    assert ' 17%' in states[1] and '100%' in states[-1] and 'images/s' in states[-1]


def test_a_log_gets_whole_lines_and_a_short_run_none(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    with progress_bar(24, ' images') as bar:
        bar.update(24)
    assert sys.stderr.getvalue() == ''
    monkeypatch.setattr(progress, 'SECONDS_TO_FIRST_LINE', 0.01)
    with progress_bar(100, ' images') as bar:
        bar.start_t -= 2  # as if it had begun before
        for _ in range(3):
            time.sleep(0.02)
            bar.update(20)
    lines = sys.stderr.getvalue().splitlines()
    assert len(lines) == 1 and '\r' not in lines[0] and '20%' in lines[0] and '20.0/100' in lines[0]
