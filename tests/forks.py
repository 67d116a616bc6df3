"""Children of the test process that never go on as a second pytest, whatever happens in them or in the test."""
import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator


def fork(function: Callable[[], int | None]) -> int:
    """Start a child that calls `function` and ends with the status that it returns, or 1 where it raises; its pid."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = function() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def status_of_child(function: Callable[[], int | None]) -> int:
    """The exit status of a child that calls `function`."""
    _, status = os.waitpid(fork(function), 0)
    return os.waitstatus_to_exitcode(status)


def end(child: int) -> None:
    """Kill a child that nobody has waited for yet."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@contextlib.contextmanager
def living_child(function: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """A child that calls `function(ready)` and has called `ready()`; it ends here at the latest."""
    reader, writer = os.pipe()
    child = fork(lambda: function(lambda: os.write(writer, b'1')))
    os.close(writer)
    try:
        assert os.read(reader, 1) == b'1', 'the child ended before it was ready'
        yield child
    finally:
        os.close(reader)
        end(child)
