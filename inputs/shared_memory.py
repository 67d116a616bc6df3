"""The shared memory of a dataset: numbers that no two have, and the removal of what no living process holds.

Streaming knows its shared memory by the first number that is free. Datasets of this program draw theirs at random, and
hold a file for each, the owner's, locked for as long as any process of the run lives. Memory without such a file is
somebody else's, and is left alone.
"""
import contextlib
import fcntl
import os
import re
import secrets
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import streaming.base.dataset
from composer.utils import dist
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, LOCALS, SHM_TO_CLEAN
from streaming.base.shared import SharedArray, SharedMemory
from streaming.base.world import World

SHARED_MEMORY = '/dev/shm'  # where Linux shows it
LEAST_NUMBER = 10 ** 6  # others count from 0
MOST_NUMBERS = 2 ** 31  # longer names are more than macOS takes
CHECKED = 'checked'  # memory of our own, beside Streaming's


@contextlib.contextmanager
def own_shared_memory():
    """What Streaming opens within this takes shared memory of its own. Gives a list, of the descriptors that hold it.

    Without this: the second dataset of a process takes over the memory of the first, and either reads what the other
    was to read; runs that start at once give their memory the same names (`File exists`); ranks find different ones
    where another run starts meanwhile (`shared memory registered does not match local leader`); and what a killed run
    has left is taken for a live one (`Reused local directory`).
    Tests: test_two_datasets_of_a_process_are_read_as_if_alone,
    test_two_runs_stream_on_one_host_at_once_beside_what_a_killed_run_left.
    """
    find = streaming.base.dataset.get_shm_prefix
    held = []
    streaming.base.dataset.get_shm_prefix = partial(take_number, held)
    try:
        yield held
    finally:
        streaming.base.dataset.get_shm_prefix = find


def take_number(held: list[int], streams_local: list[str], streams_remote: list[str | None],
                world: World) -> tuple[int, SharedMemory]:
    """In the place of Streaming's own `get_shm_prefix`: a number for this node's ranks, and the memory of that name.

    The owner's file, which is locked for as long as its descriptor is open here or in a forked process, joins `held`.
    """
    mine = None
    if world.is_local_leader:
        remove_what_nobody_holds()
        mine, file = claim_number()
    number = dist.all_gather_object(mine)[dist.get_global_rank() - dist.get_local_rank()]
    if not world.is_local_leader:
        file = os.open(owner(number), os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_SH)
    held.append(file)
    return number, SharedMemory(name(number, LOCALS), size=4)


def claim_number() -> tuple[int, int]:
    """A number that no other dataset has, and the descriptor of its owner's file, which is locked."""
    while True:
        number = LEAST_NUMBER + secrets.randbelow(MOST_NUMBERS - LEAST_NUMBER)
        try:
            file = os.open(owner(number), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file).st_nlink:  # else another run took it, before it was locked, for one that nobody holds
            os.write(file, tempfile.gettempdir().encode())  # where Streaming keeps its lock files
            return number, file
        os.close(file)


def remove_what_nobody_holds() -> None:
    """Remove the shared memory and the lock files of datasets of this program, of which no process lives any more."""
    for path in Path(memory_folder()).glob(owner_name('*')):
        number = re.fullmatch(owner_name(r'(\d{7,})'), path.name)
        if number is None:
            continue
        with contextlib.suppress(FileNotFoundError):  # another run removes it now
            if path.lstat().st_uid != os.getuid():
                continue  # somebody else's, who would have us remove memory that is in use
            file = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_memory(int(number[1]), os.read(file, 4096).decode())
                path.unlink()
            except BlockingIOError:
                pass  # a process lives
            finally:
                os.close(file)


def remove_memory(number: int, lock_folder: str) -> None:
    """Remove what a dataset has left. `lock_folder` is that of its lock files; '' where it came to none."""
    for kind in (*SHM_TO_CLEAN, CHECKED):
        Path(memory_folder(), name(number, kind)).unlink(missing_ok=True)
    if lock_folder:
        for kind in (BARRIER_FILELOCK, CACHE_FILELOCK):
            Path(lock_folder, name(number, kind)).unlink(missing_ok=True)


def checked_shards(number: int, shards: int) -> SharedArray:
    """One uint8 a shard, 0 at first, shared by the processes of a node."""
    return SharedArray(shards, np.uint8, name(number, CHECKED))


def name(number: int, kind: str) -> str:
    """As Streaming makes it."""
    return f'{number:06}_{kind}'


def memory_folder() -> str:
    """Where owners' files lie: beside the memory, since jobs of one host can have temporary folders of their own."""
    return SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else tempfile.gettempdir()


def owner(number: int) -> str:
    return os.path.join(memory_folder(), owner_name(str(number)))


def owner_name(number: str) -> str:
    return f'diffusion-benchmark-{os.getuid()}-{number}-owner'


def free_bytes() -> int | None:
    """Bytes of shared memory that are free; None where nobody says."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    disk = os.statvfs(SHARED_MEMORY)
    return disk.f_bavail * disk.f_frsize


def refuse_too_many_samples(samples: int) -> None:
    """Raises ValueError if the numbers of an epoch's samples do not fit into the shared memory, where they would be a
    bus error.
    """
    needed = 8 * samples
    free = free_bytes()
    if free is not None and needed > free:
        raise ValueError(f'the order of the {samples:,} samples of an epoch takes {needed:,} bytes of shared memory, '
                         f'and {SHARED_MEMORY} has {free:,} free; make it larger (docker run --shm-size)')
