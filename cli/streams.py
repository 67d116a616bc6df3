"""What a command prints when its reader may go before it ends, as in `python benchmark.py ... | head -1`.

Python raises BrokenPipeError then, at whichever line is printed next, and once more when it ends. As the note on
SIGPIPE in Python's documentation of `signal` advises, the stream then leads to os.devnull. The signal's own default
would end the process, and with it a training of days.
"""
import io
import os
import sys
from typing import TextIO


class ReaderMayLeave(io.FileIO):
    """What is written to a pipe, until its reader has gone: from then on to nowhere."""

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def outlive_readers() -> None:
    """From here on nothing that is printed raises an error because nobody reads it."""
    sys.stdout = outliving(sys.stdout)
    sys.stderr = outliving(sys.stderr)


def outliving(stream: TextIO | None) -> TextIO:
    """A stream of the same file, and with the same buffers. None is what Python has where the file is closed (>&-)."""
    if stream is None:
        return open(os.devnull, 'w')
    stream.flush()
    file = ReaderMayLeave(stream.fileno(), 'wb', closefd=False)
    buffer = file if stream.write_through else io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors='backslashreplace',  # a file's name may be no text
                            line_buffering=stream.line_buffering, write_through=stream.write_through)
