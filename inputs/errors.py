"""What is wrong with data, and what errors of the libraries mean, in one line. Nothing here needs torch."""
import re

# of torch, where a process of a loader is gone
ENDED_WORKER = r'DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([\w ]+)|exited unexpectedly)'

# of torch and CUDA, of torch on a CPU, of cuBLAS and cuDNN, and of cuDNN where no algorithm's workspace fits
OUT_OF_MEMORY = "out of memory|can't allocate memory|STATUS_ALLOC_FAILED|unable to find an engine"


class DataError(Exception):
    """A run cannot go on with this data."""


def one_line(error: BaseException) -> str:
    """What an error says, in one line; of a worker's traceback, what the DataError says that it ends with."""
    text = ' '.join(str(error).split())
    _, _, last = text.rpartition('DataError: ')
    return last


def unreadable_shard(error: BaseException, place: str | None = None) -> DataError:
    """An error of a storage client or a disk as ours, with the remedy where it is known; `place` is the shard's."""
    which = f'a shard, {place},' if place else 'a shard'
    text = f'{which} could not be read ({type(error).__name__}: {one_line(error)})'
    if 'No space left' in str(error):
        text += '; free some of the disk, or bound the cache with --cache_limit'
    return DataError(text)


def ended_worker(error: BaseException) -> str | None:
    """Of an error because a process of a loader is gone: which, why, and the remedy. None: it is another error."""
    match = re.search(ENDED_WORKER, str(error.__cause__))  # which names the signal, where torch has been told
    match = match or re.search(ENDED_WORKER, str(error))
    if match is None:
        return None
    pids, signal = match.groups()
    text = f'a loader process, pid {pids}, was killed'
    if signal:
        text += f' ({signal})'
    if signal == 'Bus error':
        return (f'{text}: the shared memory, /dev/shm, is full; make it larger (docker run --shm-size), or use fewer '
                '--num_workers')
    return f'{text}, as is done where memory runs out; use fewer --num_workers'


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch's allocator has an error of its own for it, CUDA and its libraries have not."""
    return type(error).__name__ == 'OutOfMemoryError' or re.search(OUT_OF_MEMORY, str(error)) is not None
