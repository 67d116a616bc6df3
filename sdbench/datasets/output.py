"""OUT: a folder or an object store in which a dataset is made, part by part.

OUT/claim.json says by which program and settings it is made, and is there before anything else. A part is a folder in
OUT; its name is a hash of what it is made of. The index.json of a part is written when its shards are all there, so
that a part is done once it has one, and what a killed worker left is written over with the same bytes. OUT/index.json,
which makes a dataset of all parts, comes last.
"""
import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from streaming import MDSWriter

from sdbench.errors import DataError, UserError, one_line, plural, redacted
from sdbench.files import atomic_write, locked, parse_json
from sdbench.paths import CLAIM, INDEX, is_url
from sdbench.stores import PATIENT, TIMEOUT, TRIES, download, files_below, parse_address, write

LOCK = f'{CLAIM}.lock'  # of the run that works in a folder
SKIPPED = 'skipped.jsonl'  # what was left out, and why
DAMAGED = 'cut short or damaged'  # how the reason begins for which a file was not read to its end
LAYOUT = 3  # of OUT; in that of earlier versions parts were named otherwise
READERS = 64  # of the indexes of parts, at once
SHARD_BYTES = 1 << 26  # the most that a shard takes: Streaming's own default


class Output:
    """Where a dataset is made. A worker has a copy of it, which reaches the same place.

    Args:
        out: as the user gave it.
        flag: its name in error messages.

    Raises UserError if it is an address that cannot be written to or reached.
    """

    def __init__(self, out: str, flag: str):
        self.label = f'{flag} {out}'  # in error messages
        self.is_folder = not is_url(out)
        self.out = os.path.realpath(out) if self.is_folder else out.rstrip('/')
        if not self.is_folder:
            self.key = parse_address(out, self.label).key
            print(f'reaching {redacted(self.label)}', file=sys.stderr, flush=True)
            try:
                self.read(CLAIM, tries=TRIES, timeout=TIMEOUT)
            except DataError as error:
                raise UserError(str(error)) from None

    @contextlib.contextmanager
    def begun(self, settings: dict, sources: Sequence[str] = ()) -> Iterator[None]:
        """Claim OUT for this run, and hold the lock of a folder meanwhile, so that no other run works in it.

        In a store two runs of the same settings may work at once: both write the same.

        Args:
            settings: that its samples depend on, which JSON can hold; `program` is the name of the one that makes it.
            sources: the paths and addresses that it is made of.

        Raises UserError if OUT holds somebody's files, was begun with other settings, or another run works in it.
        """
        claim = {'layout': LAYOUT, **settings}
        if sources:
            claim['source'] = [redacted(name if is_url(name) else os.path.abspath(name)) for name in sources]
        with contextlib.ExitStack() as stack:
            if self.is_folder:
                path = Path(self.out, LOCK)
                stack.enter_context(locked(path, self.label))
                stack.callback(path.unlink, missing_ok=True)
            self._claim(json.loads(json.dumps(claim)))
            yield

    def _claim(self, settings: dict) -> None:
        """Write in OUT what it is made of. Raises UserError if it is made of something else."""
        # begin an OUT that nobody has begun
        held = self.read(CLAIM)
        if held is None:
            names = os.listdir(self.out) if self.is_folder else self.names()
            if any(name not in (CLAIM, LOCK) for name in names):
                raise UserError(f'{self.label} already holds something; give a new folder')
            self.write(CLAIM, json.dumps(settings).encode())
            return

        # begin one again of which nothing came: its parts are all done, and none has a sample, so that the earlier
        # command was a mistake. A store has no lock: one without parts may be of another run that has only begun
        begun = parse_json(held, f'{CLAIM} of {self.label}')
        if begun != settings:
            parts = self.parts()
            is_over = (parts or self.is_folder) and all(parts.values())
            if is_over and not any(self._index_of(part)['shards'] for part in parts):
                self.write(CLAIM, json.dumps(settings).encode())
                return

        # go on in one that was begun with the same settings
        for key in ('program', *settings, *begun):
            if begun.get(key) == settings.get(key):
                continue
            then = 'none' if begun.get(key) is None else begun[key]
            now = 'none' if settings.get(key) is None else settings[key]
            raise UserError(f'{self.label} was begun with {key} {then}, and this command has {now}; '
                            'give the same flags as then, or a new folder')

    def _index_of(self, part: str) -> dict:
        """Return the index.json of a part. Raises UserError, which names it, if it is not JSON."""
        return parse_json(self.read(f'{part}/{INDEX}'), f'{part}/{INDEX} of {self.label}')

    def write(self, name: str, content: bytes | BinaryIO) -> None:
        """Write a file, which appears whole in the place of an earlier one."""
        if isinstance(content, bytes):
            content = io.BytesIO(content)
        with self._reaching():
            if not self.is_folder:
                return write(content, f'{self.out}/{name}', self.label, **PATIENT)
            path = Path(self.out, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                shutil.copyfileobj(content, file)

    def read(self, name: str, **options: Any) -> bytes | None:
        """Return the content of a file; None if there is none. `options` are those of `download`."""
        with self._reaching(), tempfile.TemporaryDirectory() as folder:
            try:
                if self.is_folder:
                    return Path(self.out, name).read_bytes()
                copy = Path(folder, 'copy')
                download(f'{self.out}/{name}', str(copy), self.label, **PATIENT | options, in_threads=False)
                return copy.read_bytes()
            except FileNotFoundError:
                return None

    def names(self) -> list[str]:
        """Return the names of all files in OUT and its folders."""
        with self._reaching():
            if self.is_folder:
                return [os.path.relpath(os.path.join(folder, name), self.out)
                        for folder, _, names in os.walk(self.out) for name in names]
            return [file.key.removeprefix(self.key).lstrip('/')
                    for file in files_below(self.out, self.label, **PATIENT)]

    def is_done(self, part: str) -> bool:
        """Tell whether the part of that name is done."""
        return self.read(f'{part}/{INDEX}') is not None

    def parts(self) -> dict[str, bool]:
        """Return the names of all folders in OUT, and whether each is a part that is done."""
        found = {}
        for name in self.names():
            folder, _, rest = name.partition('/')
            if rest:
                found[folder] = found.get(folder, False) or rest == INDEX
        return found

    def require_begun(self) -> None:
        """Raise DataError if a worker does not see the OUT that the command has begun."""
        if self.read(CLAIM) is None:
            raise DataError(f'{self.label} is not the same folder on every machine; use a shared one or a store')

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn what a store or a disk raises into a DataError of one line."""
        try:
            yield
        except OSError as error:
            if self.is_folder:
                raise DataError(f'{self.label} cannot be read or written ({one_line(error)})') from None
            raise DataError(str(error)) from None


def part_name(*facts) -> str:
    """Return the name of a part, a hash of what it is made of: all that JSON can hold."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class PartWriter(MDSWriter):
    """Streaming's writer, for one part. Each shard goes to OUT as soon as it is full.

    Args:
        output: where to.
        part: its name.
        columns: names and MDS types.
        shard_bytes: the most that a shard takes.
    """

    def __init__(self, output: Output, part: str, columns: dict[str, str], shard_bytes: int = SHARD_BYTES):
        with tempfile.TemporaryDirectory() as unused:  # Streaming wants a folder, and would empty that of the part
            super().__init__(columns=columns, out=unused, hashes=['xxh64'], size_limit=shard_bytes)
        self.output = output
        self.part = part
        self.captions = Counter()  # that were written, by name
        self.long_captions = 0  # of which a training takes the beginning

    def flush_shard(self) -> None:
        """Send the samples that were written since the last shard, if any, as the next one."""
        if not self.new_samples:
            return  # Streaming would write an empty shard before a sample that is larger than a shard
        name, _ = self._name_next_shard()
        content = self.encode_joint_shard()
        self.shards.append({'samples': len(self.new_samples), 'raw_data': self._hash(content, name), 'zip_data': None,
                            **self.get_config()})
        self.output.write(f'{self.part}/{name}', content)

    def finish(self, skipped: Iterable[dict] = ()) -> None:
        """Send the last samples, and then say that the part is whole. `skipped` is what was left out of it."""
        self.flush_shard()
        index = {'version': 2, 'shards': self.shards, 'skipped': list(skipped), 'captions': dict(self.captions),
                 'long_captions': self.long_captions}
        self.output.write(f'{self.part}/{INDEX}', json.dumps(index).encode())


@dataclass
class Joined:
    """What all parts together hold."""
    shards: list[str] = field(default_factory=list)  # their entries in the index, as JSON
    samples: int = 0
    samples_of: dict[str, int] = field(default_factory=dict)  # each part
    bytes: int = 0  # of the shards
    captions: Counter = field(default_factory=Counter)  # by name
    long_captions: int = 0
    skipped: Counter = field(default_factory=Counter)  # what was left out, by kind of reason
    first_skipped: dict | None = None  # the first line of it
    damaged: list[dict] = field(default_factory=list)  # the lines of files that could not be read to their end

    def add_part(self, part: str, index: dict) -> None:
        """Add the shards of a part, by its index.json; their names become paths in OUT."""
        self.samples_of[part] = sum(shard['samples'] for shard in index['shards'])
        self.samples += self.samples_of[part]
        self.captions.update(index.get('captions', {}))
        self.long_captions += index.get('long_captions', 0)
        for shard in index['shards']:
            shard['raw_data']['basename'] = f'{part}/{shard["raw_data"]["basename"]}'
            self.shards.append(json.dumps(shard))
            self.bytes += shard['raw_data']['bytes']

    def add_skipped(self, lines: Iterable[dict], file: BinaryIO) -> None:
        """Count what was left out, and write its lines into a file."""
        for line in lines:
            text = json.dumps(line, ensure_ascii=False)  # a name is found as it is written
            if not self.skipped:
                self.first_skipped = line
            file.write(f'{text}\n'.encode(errors='backslashreplace'))  # bytes of a name that are no UTF-8
            self.skipped[line['reason'].partition(':')[0]] += 1
            if line['reason'].startswith(DAMAGED):
                self.damaged.append(line)

    def skipped_line(self, out: str) -> str:
        """Say how much was left out by kind of reason, and where it is listed."""
        reasons = ', '.join(f'{number:,} {reason}' for reason, number in self.skipped.most_common())
        return f'{reasons}; listed in {out}/{SKIPPED}'


def join_parts(output: Output, parts: Sequence[str], left_out: Iterable[dict] = ()) -> Joined:
    """Read what the parts of OUT hold, and list in OUT/skipped.jsonl what was left out, if anything was.

    Args:
        output: in which all parts are done.
        parts: their names, in the order of the dataset.
        left_out: more lines for the list: each has a `reason`, which begins with its kind, before a colon.

    Raises DataError if a part is not there or damaged.
    """
    joined = Joined()
    with tempfile.TemporaryFile() as skipped:
        joined.add_skipped(left_out, skipped)
        with ThreadPoolExecutor(READERS) as readers:
            contents = readers.map(output.read, [f'{part}/{INDEX}' for part in parts])
            for part, content in zip(parts, contents, strict=True):
                try:
                    index = json.loads(content)
                except (ValueError, TypeError):
                    raise DataError(f'{part}/{INDEX} of {output.label} is gone or damaged; remove the folder {part}, '
                                    'and run the same command again') from None
                joined.add_part(part, index)
                joined.add_skipped(index['skipped'], skipped)
        skipped.seek(0)
        if joined.skipped or output.read(SKIPPED) is not None:
            output.write(SKIPPED, skipped)
    return joined


def write_index(output: Output, joined: Joined, **about: Any) -> bool:
    """Write OUT/index.json with `about` in it, unless it is there as it should be. Return whether it was written."""
    # The shards' entries are JSON already: as objects, those of a large dataset would take gigabytes.
    beginning = json.dumps({'version': 2, **about}).removesuffix('}')
    index = f'{beginning}, "shards": [{", ".join(joined.shards)}]}}'.encode()
    if output.read(INDEX) == index:
        return False
    output.write(INDEX, index)
    return True


def done_already(output: Output, joined: Joined, source: str) -> str:
    """Say that an earlier run has made the dataset; `source` is the name of the flag of what it is made of."""
    return f'done already: {output.label} holds {plural(joined.samples, "sample")} of this {source}'
