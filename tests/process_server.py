"""A server that forks processes which have imported the program already: one for a pytest and all its workers."""
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path


def start() -> str:
    """Its address. At the first call it is started, in the process that starts all others, beside which it imports."""
    os.environ['PYTHONPATH'] = str(Path(__file__).parent.parent)
    multiprocessing.get_context('forkserver').set_forkserver_preload(['tests.preloaded'])
    forkserver.ensure_running()  # before the program sets what is imported
    return address()


def address() -> str:
    """Of the server that this process has started or joined."""
    return forkserver._forkserver._forkserver_address


def join(address: str) -> None:
    """In another process: take what multiprocessing forks from the server at `address`, which ends with its starter."""
    server = forkserver._forkserver  # of Python 3.11 and 3.12
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    server.ensure_running = lambda: None
