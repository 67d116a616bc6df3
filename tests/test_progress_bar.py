"""The bar of a command."""
import fcntl
import os
import pty
import struct
import sys
import termios

BAR = """
import time
from sdbench.progress_bar import progress_bar
with progress_bar(3, ' images') as bar:
    for _ in range(3):
        time.sleep(0.11)
        bar.update()
"""


def printed_on_a_terminal_of_no_size(script: str) -> str:
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, '-c', script])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack('4H', 0, 0, 0, 0))
    printed = b''
    while chunk := read(terminal):
        printed += chunk
    os.waitpid(process, 0)
    return printed.decode()


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux' end of a terminal
        return b''


def test_a_terminal_that_says_a_size_of_nothing_has_a_bar():
    assert '3/3' in printed_on_a_terminal_of_no_size(BAR)
