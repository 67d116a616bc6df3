"""The Python of a process of pytest, forked from one that has imported what tests import, which takes ten seconds.

    python tests/forked_python.py -u -c CODE

xdist starts it instead of `python`, and talks to it over its standard streams.
"""
import multiprocessing
import os
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection


def become_python(streams: list[Connection], environment: dict[str, str], code: str) -> None:
    """Take these standard streams and this environment, and run the code as Python does."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, 'w'), open(2, 'w')
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # that of Python, not of the process that forks
    resource_tracker._resource_tracker._fd = None  # it starts one of its own, which prints where pytest captures it
    for name in ('tests.runs', 'tests.forked_runs'):
        del sys.modules[name]  # pytest imports them once more, for asserts that say what differs
    exec(code, {})


if __name__ == '__main__':
    forkserver._forkserver.ensure_running = lambda: None
    forkserver._forkserver._forkserver_address = os.environ['FORK_SERVER']
    forkserver._forkserver._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # it ends with the first process
    streams = [Connection(0, writable=False), Connection(1, readable=False), Connection(2, readable=False)]
    server = multiprocessing.get_context('forkserver')
    process = server.Process(target=become_python, args=(streams, dict(os.environ), sys.argv[-1]))
    process.start()
    process.join()
    sys.exit(process.exitcode)
