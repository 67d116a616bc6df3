"""What a command prints where its reader goes before it ends, as `head` does in `python benchmark.py ... | head -1`.

Python raises BrokenPipeError then, at whichever line is printed next, and once more when it ends. As the note on
SIGPIPE in Python's documentation of `signal` advises, the stream then leads to os.devnull. The signal's own default
would end the process, and with it a training of days.
"""
import errno
import io
import os
import sys
from typing import TextIO


class ReaderMayLeave(io.FileIO):
    """What is written to a pipe or a terminal, until that has gone: from then on to nowhere.

    Args:
        number: of the file.
        may_be_dropped: whether what a full disk does not take is left out, as in a log; else it is an error.
    """

    def __init__(self, number: int, may_be_dropped: bool):
        super().__init__(number, 'wb', closefd=False)
        self._gone = {errno.EPIPE}
        if self.isatty():  # now: a terminal that has gone is none any more
            self._gone.add(errno.EIO)
        self._dropped = {errno.ENOSPC, errno.EDQUOT} if may_be_dropped else set()

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in self._dropped:
                return len(data)
            if error.errno not in self._gone:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return super().write(data)


def outlive_readers() -> None:
    """From here on nothing that is printed raises an error because nobody reads it, nor what is said on stderr because
    the disk of a log is full.
    """
    sys.stdout = outliving(sys.stdout)
    sys.stderr = outliving(sys.stderr, may_be_dropped=True)


def outliving(stream: TextIO | None, may_be_dropped: bool = False) -> TextIO:
    """A stream of the same file, and with the same buffers. None is what Python has where the file is closed (>&-)."""
    if stream is None:
        return open(os.devnull, 'w')
    stream.flush()
    file = ReaderMayLeave(stream.fileno(), may_be_dropped)
    buffer = file if stream.write_through else io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors='backslashreplace',  # a file's name may be no text
                            line_buffering=stream.line_buffering, write_through=stream.write_through)
