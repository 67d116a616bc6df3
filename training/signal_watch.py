"""Answers a signal for a process that waits within torch for a rank that does not come."""
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable

SECONDS_TO_CONCLUDE = 60  # after which the process ends all the same

_written_by_signals: set[int] = set()  # the pipes' ends of living watches


def forget_in_child() -> None:
    """A forked process, such as a loader's worker, has its own signals, and must not write to its parent's pipe."""
    if _written_by_signals:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=forget_in_child)


class SignalWatch:
    """A thread that ends the process where its main thread has not answered a signal in time.

    Python runs a signal's handler between two instructions of its own, so never while the main thread waits in a
    collective of torch, 10 minutes or more where another rank is stopped. The number of the signal is written to a pipe
    at once all the same, and a thread reads that.

    Args:
        signals: to answer.
        seconds: that the main thread has to answer, asked when a signal comes.
        conclude: what is then done in its place, before the process ends with status 130.
    """

    def __init__(self, signals: Iterable[int], seconds: Callable[[], float], conclude: Callable[[], None]):
        self.signals = set(signals)
        self.seconds = seconds
        self.conclude = conclude
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        _written_by_signals.add(self._writer)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._answered = threading.Event()
        self._taken = threading.Lock()  # by the main thread when it answers, or by the watch when it does
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def answer(self) -> None:
        """The main thread answers, or has ended without a signal. It waits here for ever where the watch was faster."""
        if self._answered.is_set():
            return
        self._taken.acquire()
        self._answered.set()
        signal.set_wakeup_fd(self._before)
        _written_by_signals.discard(self._writer)
        os.write(self._writer, b'\0')  # ends the thread
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _watch(self) -> None:
        while True:
            select.select([self._reader], [], [])
            numbers = os.read(self._reader, 1)
            if self._answered.is_set():
                return
            if numbers[0] in self.signals:
                break
        if self._answered.wait(self.seconds()) or not self._taken.acquire(blocking=False):
            return
        end = threading.Timer(SECONDS_TO_CONCLUDE, os._exit, [130])
        end.daemon = True
        end.start()
        try:
            self.conclude()
        finally:
            os._exit(130)
