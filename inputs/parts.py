"""A dataset made in parts, by any number of processes: claimed, written part by part, looked over, merged once.

OUT/claim.json says what it is made of. The shards of a part are in a folder of their own, OUT/000042, and
OUT/parts/000042.json is the part's own index, written when they are all there, so that a list of OUT/parts says what is
done. OUT/index.json, which makes a dataset of it, comes last.
"""
import contextlib
import json
import os
import re
import signal
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from urllib.parse import urlparse

from streaming import MDSWriter
from streaming.base.storage import CloudDownloader, CloudUploader

from inputs.shards import CLAIM
from inputs.store import CONNECTIONS, S3Store

SKIPPED = 'skipped.jsonl'  # what was left out, and why
SHARD_BYTES = 1 << 26  # the most that a shard takes: Streaming's own default
SHARDS_ON_THEIR_WAY = 2  # of a part, full and not yet in the store
PARTS_AT_ONCE = 500  # that a process reads for the merge before it hands on what it found

output_of_process = None  # of a process that reads parts, see start_reader


class Output:
    """A folder, or an object store through a temporary folder, that files are written to and read from.

    Args:
        out: of the dataset.
        flag: what errors call it.
    """

    def __init__(self, out: str, flag: str = '--out'):
        self.out = out.rstrip('/') or out
        self.flag = flag
        self.remote = None
        self.folder = os.path.realpath(self.out)  # which no part of Streaming takes for an address
        self._s3 = None
        if '://' in out or out.startswith('dbfs:'):
            self.remote = self.out
            self._staging = tempfile.TemporaryDirectory(prefix='parts-')  # as long as this lives
            self.folder = self._staging.name
            address = urlparse(self.remote)
            if address.scheme == 's3':
                self._s3 = S3Store(address.netloc)
                self._prefix = address.path.strip('/')
        self._uploader = None
        self._process = None  # that made the uploader
        self._of_thread = threading.local()

    def connect(self) -> None:
        """Reach the store, in each process anew; the storage client's own error where that fails."""
        if self.remote and self._process != os.getpid():
            self._uploader = CloudUploader.get((self.folder, self.remote), keep_local=True, exist_ok=True)
            self._process = os.getpid()
        if self._s3:
            self._s3.connect()

    def discard(self) -> None:
        """Remove what is on this machine only for its way to a store."""
        if self.remote:
            self._staging.cleanup()

    def keep(self, name: str) -> None:
        """Bring a file of `folder` to where it outlives this machine: to the disk itself, or to the store."""
        path = os.path.join(self.folder, name)
        if self.remote:
            self.connect()
            self._uploader.upload_file(name)
            os.remove(path)
        else:
            with open(path, 'rb') as file:
                os.fsync(file.fileno())

    def write(self, name: str, text: str) -> None:
        """A file, whole or not at all."""
        self.unfinished(name).write_text(text)
        self.publish(name)

    def unfinished(self, name: str) -> Path:
        """Where to write a file that `publish` then shows under its name."""
        path = Path(self.folder, f'{name}.tmp')
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def publish(self, name: str) -> None:
        """Show a file that was written to `unfinished`, whole, in the place of an earlier one."""
        unfinished = self.unfinished(name)
        path = unfinished.with_suffix('')
        if self.remote:
            unfinished.rename(path)
            self.keep(name)
        else:
            self.keep(f'{name}.tmp')
            unfinished.rename(path)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        if self._s3:
            return self._s3.read(self._key(name))
        if self.remote:
            return self._download(name)
        with contextlib.suppress(FileNotFoundError):
            return Path(self.folder, name).read_bytes()
        return None

    def names_in(self, folder: str) -> Iterator[str]:
        """The names of the files in a folder of OUT. NotImplementedError: this kind of store cannot tell."""
        if self._s3:
            prefix = f'{self._key(folder)}/'
            for key, _ in self._s3.list(prefix):
                yield key[len(prefix):]
        elif self.remote:
            self.connect()
            for key in self._uploader.list_objects(f'{folder}/'):
                yield key.rpartition('/')[2]
        else:
            with contextlib.suppress(FileNotFoundError), os.scandir(os.path.join(self.folder, folder)) as entries:
                for entry in entries:
                    yield entry.name

    def _key(self, name: str) -> str:
        return f'{self._prefix}/{name}' if self._prefix else name

    def _download(self, name: str) -> bytes | None:
        """A file of a store other than S3; each thread has a client of its own."""
        if not hasattr(self._of_thread, 'downloader'):
            self._of_thread.downloader = CloudDownloader.get(self.remote)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, 'file')
            try:
                self._of_thread.downloader.download(f'{self.remote}/{name}', str(path))
                return path.read_bytes()
            except Exception as error:  # every storage client has its own
                if re.search('not found|404|NoSuchKey|does not exist', f'{type(error).__name__} {error}', re.I):
                    return None
                raise


def part_name(number: int) -> str:
    """The folder of a part's shards."""
    return f'{number:06}'


def part_index(number: int) -> str:
    """A part's own index, in a folder with all others, so that one list of it says what is done."""
    return f'parts/{part_name(number)}.json'


def claim(output: Output, contents: dict) -> bool:
    """Say in OUT what it is made of; True if an earlier run has. ValueError: OUT is finished, or of something else."""
    place = f'{output.flag} {output.out}'
    if output.read('index.json') is not None:
        raise ValueError(f'{place} already holds a dataset, with its index.json; remove it or give a new folder')
    text = output.read(CLAIM)
    if text is None:
        output.write(CLAIM, json.dumps(contents))
        return False
    try:
        begun = dict(json.loads(text))
    except (ValueError, TypeError):
        raise ValueError(f'{place} holds a {CLAIM} that is damaged; remove all of it, or give a new folder') from None
    for key, ours in contents.items():
        if begun.get(key) != ours:
            raise ValueError(f'{place} was begun with {key} {begun.get(key)}, and this run has {ours}; give what it '
                             'was begun with, or a new folder')
    return True


def finished_parts(output: Output, num_parts: int) -> set[int]:
    """The numbers of the parts that are done: a store is listed once, 1000 parts a request."""
    try:
        found = [re.fullmatch(r'(\d{6,})\.json', name) for name in output.names_in('parts')]
        numbers = {int(match[1]) for match in found if match}
    except NotImplementedError:  # of a kind of store that Streaming cannot list: a request for each part
        with ThreadPoolExecutor(CONNECTIONS) as readers:
            contents = readers.map(output.read, map(part_index, range(num_parts)))
            numbers = {number for number, content in enumerate(contents) if content is not None}
    return {number for number in numbers if number < num_parts}


class PartWriter:
    """Writes one part: shards, each brought to OUT as soon as it is full, and last the part's own index.

    Args:
        output: where to.
        number: of the part; what a killed run left of it is written anew.
        columns: names and MDS types.
        shard_bytes: the most that a shard takes.
    """

    def __init__(self, output: Output, number: int, columns: dict[str, str], shard_bytes: int = SHARD_BYTES):
        self.output = output
        self.number = number
        self.writer = MDSWriter(columns=columns, out=os.path.join(output.folder, part_name(number)), hashes=['xxh64'],
                                size_limit=shard_bytes, exist_ok=True)
        self.carrier = ThreadPoolExecutor(1)
        self.on_their_way: deque[Future] = deque()
        self.carried = 0  # shards that were handed to the carrier

    def write(self, sample: dict) -> None:
        """A sample, as MDSWriter takes it."""
        self.writer.write(sample)
        self._carry_full_shards()

    def finish(self, **about) -> None:
        """Bring the last samples to OUT, and then say that the part is whole, and what else there is to say of it."""
        self.writer.finish()
        self._carry_full_shards()
        self.carrier.shutdown()
        for shard in self.on_their_way:
            shard.result()  # raises what went wrong with it
        folder = Path(self.output.folder, part_name(self.number))
        Path(folder, 'index.json').unlink()  # of this part alone, and there before its shards were kept
        if self.output.remote or not self.carried:
            folder.rmdir()
        for shard in self.writer.shards:
            shard['raw_data']['basename'] = self._name(shard)
        self.output.write(part_index(self.number), json.dumps({'shards': self.writer.shards, **about}))

    def _carry_full_shards(self) -> None:
        for shard in self.writer.shards[self.carried:]:
            self.on_their_way.append(self.carrier.submit(self.output.keep, self._name(shard)))
            self.carried += 1
        while len(self.on_their_way) > SHARDS_ON_THEIR_WAY:
            self.on_their_way.popleft().result()

    def _name(self, shard: dict) -> str:
        return f'{part_name(self.number)}/{shard["raw_data"]["basename"]}'


@dataclass
class Merged:
    """What all parts together hold, or some of them."""
    parts: int = 0
    shards: int = 0
    samples: int = 0
    bytes: int = 0  # of the shards
    skipped: Counter = field(default_factory=Counter)  # samples that were left out, by reason
    damaged: list[str] = field(default_factory=list)  # a line for each file that could not be read to its end

    def add(self, other: 'Merged') -> None:
        for name in ('parts', 'shards', 'samples', 'bytes', 'skipped', 'damaged'):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def merge_parts(output: Output, num_parts: int, about: dict, processes: int = 1) -> Merged:
    """Write OUT/index.json, the index of all parts with `about` beside them, unless they hold no sample.

    The entries pass through as text, so that memory stays flat: PARTS_AT_ONCE parts a process. What was left out is
    listed in OUT/skipped.jsonl, if anything was.

    Args:
        processes: that read parts, each over CONNECTIONS connections; forked where there are many parts.

    RuntimeError: a part is not there.
    """
    index_path, skipped_path = output.unfinished('index.json'), output.unfinished(SKIPPED)
    merged = Merged()
    with open(index_path, 'w') as index, open(skipped_path, 'w') as skipped:
        index.write('{"version": 2, ')
        for key, value in about.items():
            index.write(f'{json.dumps(key)}: {json.dumps(value)}, ')
        index.write('"shards": [')
        for shards, lines, found in read_parts(output, num_parts, processes):
            if merged.shards and found.shards:
                index.write(', ')
            index.write(shards)
            skipped.write(lines)
            merged.add(found)
        index.write(']}')
    if merged.skipped:
        output.publish(SKIPPED)
    if merged.shards:
        output.publish('index.json')
    for path in (index_path, skipped_path):
        path.unlink(missing_ok=True)
    return merged


def read_parts(output: Output, num_parts: int, processes: int) -> Iterator[tuple[str, str, Merged]]:
    """`read_some_parts` of all parts, in their order."""
    starts = range(0, num_parts, PARTS_AT_ONCE)
    ranges = [range(start, min(start + PARTS_AT_ONCE, num_parts)) for start in starts]
    processes = min(processes, len(ranges))
    if processes <= 1:
        for numbers in ranges:
            yield read_some_parts(output, numbers)
        return
    context = get_context('fork')
    worker_end, parent_end = context.Pipe(duplex=False)
    with (ProcessPoolExecutor(processes, context, start_reader, (output, worker_end, parent_end)) as pool,
          parent_end):  # closed first, it ends the readers
        waiting = deque()
        for numbers in ranges:
            waiting.append(pool.submit(read_in_process, numbers))
            if len(waiting) > 2 * processes:  # no more than these are held at once
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def start_reader(output: Output, parent: connection.Connection, parents_end: connection.Connection) -> None:
    """Make this process one that reads parts of `output`, and ends when its parent does."""
    global output_of_process
    output_of_process = output
    end_with_parent(parent, parents_end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_with_parent(parent: connection.Connection, parents_end: connection.Connection) -> None:
    """In a forked process: end it when the parent ends, however that comes, and with it its end of the pipe."""
    parents_end.close()

    def wait_for_end():
        connection.wait([parent])
        os._exit(1)
    threading.Thread(target=wait_for_end, daemon=True).start()


def read_in_process(numbers: range) -> tuple[str, str, Merged]:
    return read_some_parts(output_of_process, numbers)


def read_some_parts(output: Output, numbers: range) -> tuple[str, str, Merged]:
    """The entries of the parts' shards and the lines of what was left out, as text, and what they hold.

    RuntimeError: a part is not there.
    """
    output.connect()
    with ThreadPoolExecutor(min(CONNECTIONS, len(numbers))) as readers:
        contents = list(readers.map(output.read, map(part_index, numbers)))
    found = Merged()
    shards = []
    lines = []
    for number, content in zip(numbers, contents, strict=True):
        if content is None:
            raise RuntimeError(f'{part_index(number)} of {output.flag} {output.out} is gone')
        part = json.loads(content)
        found.parts += 1
        for shard in part['shards']:
            shards.append(json.dumps(shard))
            found.shards += 1
            found.samples += shard['samples']
            found.bytes += shard['raw_data']['bytes']
        for sample in part.get('skipped', ()):
            lines.append(json.dumps(sample) + '\n')
            found.skipped[sample['reason'].partition(':')[0]] += 1
        found.damaged += part.get('damaged', ())
    return ', '.join(shards), ''.join(lines), found
