"""Run Python code in a process forked from the fork server, which has imported the libraries: that saves ten seconds.

    python tests/forked_python.py -u -c CODE

xdist starts its workers with this program instead of `python`, and communicates over the standard streams.
"""
import multiprocessing
import os
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection


def become_python(streams: list[Connection], environment: dict[str, str], code: str) -> None:
    """Use these standard streams and environment variables, and run the code as `python -c` does."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, 'w'), open(2, 'w')
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # Python's default, not the fork server's
    resource_tracker._resource_tracker._fd = None  # start a new resource tracker, whose output pytest captures
    for name in ('tests.runs', 'tests.forked_runs'):
        del sys.modules[name]  # pytest imports them again, with asserts that explain a difference
    exec(code, {})


if __name__ == '__main__':
    forkserver._forkserver.ensure_running = lambda: None
    forkserver._forkserver._forkserver_address = os.environ['FORK_SERVER']
    forkserver._forkserver._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the first process ends the server
    streams = [Connection(0, writable=False), Connection(1, readable=False), Connection(2, readable=False)]
    server = multiprocessing.get_context('forkserver')
    process = server.Process(target=become_python, args=(streams, dict(os.environ), sys.argv[-1]))
    process.start()
    process.join()
    sys.exit(process.exitcode)
