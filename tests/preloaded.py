"""What a server of processes imports and finds out once, before it forks: the name of the CPU alone takes a second."""
import errno
import socket
from multiprocessing import reduction

from composer.utils.collect_env import get_composer_env_dict

import convert  # noqa: F401
import encode  # noqa: F401
import evaluate  # noqa: F401
from measuring.record import processor_name
from tests import forked_runs  # noqa: F401

processor_name()
get_composer_env_dict()  # Composer asks for it with every checkpoint

receive = reduction.recvfds


def receive_or_go_on(client: socket.socket, number: int) -> list[int]:
    """What a client sends to the server. One that was killed before it has sent anything would end Python's own server,
    which goes on after an aborted connection.
    """
    try:
        return receive(client, number)
    except EOFError:
        raise ConnectionAbortedError(errno.ECONNABORTED, 'the client has gone') from None


reduction.recvfds = receive_or_go_on
