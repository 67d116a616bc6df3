"""Shared memory is removed when no process holds it, never before, and no two datasets have the same."""
import fcntl
import os
import signal
import tempfile
from pathlib import Path

import pytest
from composer.utils import dist, get_device
from streaming import StreamingDataset

from data import StreamingLAIONDataset
from inputs import shared_memory
from inputs.shared_memory import MOST_NUMBERS, owner, remove_what_nobody_holds
from tests.forked_runs import run_ranks
from tests.forks import living_child
from tests.samples import good, write_shards
from training import join_ranks


def captions(dataset) -> list[str]:
    return [sample['caption'] for sample in dataset]


def test_two_datasets_of_a_process_are_read_as_if_alone(shards, tmp_path):
    """A training set that was resumed in its middle, beside a validation set of other shards."""
    training = StreamingLAIONDataset(shards, batch_size=1)
    training.give_captions_as_text()
    training.load_state_dict({'epoch': 0, 'sample_in_epoch': 14, 'num_canonical_nodes': 1, 'shuffle_seed': 9176})
    validation = StreamingLAIONDataset(write_shards(tmp_path / 'other', [good(i) for i in range(40)]), batch_size=1)
    validation.give_captions_as_text()
    assert captions(training) == [f'picture number {index}' for index in range(14, 24)]
    assert captions(validation) == [f'picture {index}' for index in range(40)]


def test_the_memory_of_another_program_stays_while_it_lives_and_after(shards):
    theirs = StreamingDataset(local=shards, batch_size=1)
    theirs.load_state_dict({'epoch': 0, 'sample_in_epoch': 20, 'num_canonical_nodes': 1, 'shuffle_seed': 9176})
    before = set(Path('/dev/shm').glob(f'{theirs._shm_prefix_int:06}_*'))
    assert len(before) == 7
    StreamingLAIONDataset(shards, batch_size=1)
    assert set(Path('/dev/shm').glob(f'{theirs._shm_prefix_int:06}_*')) == before
    assert len(list(theirs)) == 4


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Path:
    """A folder in the place of /dev/shm, in which no other process looks for what a killed run has left."""
    monkeypatch.setattr(shared_memory, 'SHARED_MEMORY', str(tmp_path))
    return tmp_path


def leave_memory(memory: Path, number: int) -> list[Path]:
    """What a dataset of that number leaves when it is killed."""
    paths = []
    for kind in ('locals', 'epoch_data', 'checked'):
        paths.append(memory / f'{number:06}_{kind}')
        paths[-1].write_bytes(bytes(4))
    Path(tempfile.gettempdir(), f'{number:06}_barrier_filelock').touch()
    Path(owner(number)).write_text(tempfile.gettempdir())
    return [*paths, Path(tempfile.gettempdir(), f'{number:06}_barrier_filelock'), Path(owner(number))]


def test_what_a_killed_run_left_is_removed_and_what_a_live_one_holds_is_not(memory):
    dead, live = MOST_NUMBERS + 1, MOST_NUMBERS + 2  # numbers that no dataset has
    of_dead, of_live = leave_memory(memory, dead), leave_memory(memory, live)
    others = memory / f'{dead}_of_another_program'
    others.touch()
    with open(owner(live)) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        remove_what_nobody_holds()
        assert [path for path in of_dead if path.exists()] == []
        assert all(path.exists() for path in of_live) and others.exists()
    remove_what_nobody_holds()
    assert not any(path.exists() for path in of_live)


def test_an_owners_file_that_somebody_else_made_removes_nothing(memory, monkeypatch):
    """Of a number of ours, or of the first ones, which are of other programs."""
    left = [*leave_memory(memory, MOST_NUMBERS + 3), *leave_memory(memory, 999_999)]
    uid = os.getuid()
    monkeypatch.setattr(shared_memory, 'owner_name', lambda number: f'diffusion-benchmark-{uid}-{number}-owner')
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory.os, 'getuid', lambda: uid + 1)
        remove_what_nobody_holds()
        assert all(path.exists() for path in left)
    remove_what_nobody_holds()
    assert [path.exists() for path in left] == [False] * 5 + [True] * 5


def test_memory_stays_as_long_as_a_process_lives_that_was_forked_from_the_one_that_made_it(memory):
    def live(ready):
        ready()
        signal.pause()

    number, file = shared_memory.claim_number()
    with living_child(live):
        os.close(file)  # as if this process were gone
        remove_what_nobody_holds()
        assert os.path.exists(owner(number))
    remove_what_nobody_holds()
    assert not os.path.exists(owner(number))


def open_as_rank(shards: str, folder: str) -> None:
    join_ranks(get_device(), 60)
    dataset = StreamingLAIONDataset(shards, batch_size=1)
    Path(folder, str(dist.get_global_rank())).write_text(str(dataset._shm_prefix_int))
    dist.barrier()


def test_the_ranks_of_a_node_share_a_number_and_each_node_has_its_own(server, shards, tmp_path):
    log = tmp_path / 'log'
    codes = run_ranks(server, [log] * 4, open_as_rank, [(shards, str(tmp_path))] * 4, nodes=2)
    assert codes == [0] * 4, log.read_text()
    numbers = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


def test_a_number_that_was_taken_for_a_dead_ones_is_not_used(memory, monkeypatch):
    """Between the making of an owner's file and its lock, another run may come by."""
    flock, removed = fcntl.flock, []

    def remove_first(file, operation):
        if not removed:
            removed.append(os.readlink(f'/proc/self/fd/{file}'))
            os.unlink(removed[0])
        flock(file, operation)
    monkeypatch.setattr(shared_memory.fcntl, 'flock', remove_first)
    number, file = shared_memory.claim_number()
    assert os.path.samestat(os.fstat(file), os.stat(owner(number))) and owner(number) != removed[0]
    os.close(file)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    remove_what_nobody_holds()
