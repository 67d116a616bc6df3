"""Write a dataset part by part into OUT, which is a folder or an address in an object store.

OUT/claim.json is written first: it records the program and settings that make the dataset. A part is a folder in OUT
whose name is a hash of its sources and settings. The index.json of a part is written after its shards, so a part with
an index.json is done. If a worker is killed, another worker overwrites its files with the same bytes. OUT/index.json,
which joins all parts into a dataset, is written last.
"""
import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from streaming import MDSWriter

from sdbench.errors import DataError, UserError, redacted
from sdbench.files import CLAIM, INDEX, is_url, locked, parse_json
from sdbench.stores import files_below, read_file, write_file
from sdbench.stores.addresses import PATIENT, QUICK, Retry, parse_address

LOCK = f'{CLAIM}.lock'  # held by the run that writes to a folder
SKIPPED = 'skipped.jsonl'  # which samples and files were skipped, and why
DAMAGED = 'cut short or damaged'  # prefix of the reason for a file that could not be read to its end
LAYOUT = 3  # version of the layout of OUT; earlier versions named parts differently
READERS = 64  # threads that read the index.json of parts
SHARD_BYTES = 1 << 26  # largest size of a shard: Streaming's own default


class OutputFolder:
    """A folder, or an address in an object store, that one command claims and fills with its results.

    It can be pickled, so workers write to the same place. `flag` is the name of its flag, for error messages.

    Raises UserError if an address is not supported or cannot be reached. Its methods raise OSError if OUT cannot be
    read or written.
    """

    def __init__(self, out: str, flag: str):
        self.label = f'{flag} {out}'  # begins error messages
        self.is_folder = not is_url(out)
        self.out = os.path.realpath(out) if self.is_folder else out.rstrip('/')
        if not self.is_folder:
            self.key = parse_address(out, self.label).key
            print(f'reaching {redacted(self.label)}', file=sys.stderr, flush=True)
            try:
                self.read(CLAIM, QUICK)
            except OSError as error:
                raise UserError(str(error)) from None

    @contextlib.contextmanager
    def begun(self, settings: dict, sources: Sequence[str] = ()) -> Iterator[None]:
        """Claim OUT for this run. For a folder, hold its lock until the context ends.

        A store has no lock. Two runs with the same settings may write to it concurrently: their bytes are the same.

        `settings` are the values that the samples depend on, which JSON must support, and the `program`.

        Raises UserError if OUT contains other files, has samples that were made with other settings, or is in use.
        """
        claim = {'layout': LAYOUT, **settings}
        if sources:
            claim['source'] = [redacted(name if is_url(name) else os.path.abspath(name)) for name in sources]
        claim = json.loads(json.dumps(claim))
        with contextlib.ExitStack() as stack:
            if self.is_folder:
                path = Path(self.out, LOCK)
                stack.enter_context(locked(path, self.label))
                stack.callback(path.unlink, missing_ok=True)

            content = self.read(CLAIM)
            earlier = {}
            if content is not None:
                earlier = parse_json(content, f'{CLAIM} of {self.label}')
            elif set(self.names()) - {LOCK}:
                raise UserError(f'{self.label} already holds other files; give a new folder')
            differing = [key for key in ('program', *claim, *earlier) if earlier.get(key) != claim.get(key)]
            if differing:
                # Parts without a sample, for example after a wrong flag, consist of an INDEX only and are no results.
                if {os.path.basename(name) for name in self.names()} - {CLAIM, LOCK, SKIPPED, INDEX}:
                    key = differing[0]
                    raise UserError(f'{self.label} was begun with {key} {earlier.get(key)}, and this command has '
                                    f'{claim.get(key)}; give the earlier flags, or a new folder')
                self.write(CLAIM, json.dumps(claim).encode())
            yield

    def write(self, name: str, content: bytes | BinaryIO) -> None:
        """Write a file of OUT, which replaces an earlier one when it is complete."""
        path = os.path.join(self.out, name)
        if self.is_folder:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, content, self.label)

    def read(self, name: str, retry: Retry = PATIENT) -> bytes | None:
        """Return the content of a file of OUT, or None if it does not exist."""
        return read_file(os.path.join(self.out, name), self.label, retry)

    def names(self) -> list[str]:
        """Return the paths of all files in OUT, relative to OUT."""
        if not self.is_folder:
            return [file.key.removeprefix(self.key).lstrip('/')
                    for file in files_below(self.out, self.label, PATIENT)]
        return [os.path.relpath(os.path.join(folder, name), self.out)
                for folder, _, names in os.walk(self.out) for name in names]

    def parts(self) -> dict[str, bool]:
        """Return a dict of the folders in OUT by name: True if the folder is a part that is done."""
        found = {}
        for name in self.names():
            folder, _, rest = name.partition('/')
            if rest:
                found[folder] = found.get(folder, False) or rest == INDEX
        return found

    def require_begun(self) -> None:
        """Raise DataError if this worker's OUT is not the folder that the command has claimed."""
        if self.read(CLAIM) is None:
            raise DataError(f'{self.label} is not the same folder on every machine; use a shared folder or a store')


def part_name(*facts) -> str:
    """Return the name of a part: a hash of `facts`, the values that its samples depend on. JSON must support them."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class PartWriter(MDSWriter):
    """Streaming's writer for the shards of one part. It writes each shard to OUT as soon as the shard is full.

    `columns` are the MDS types by column name.
    """

    def __init__(self, output: OutputFolder, part: str, columns: dict[str, str], shard_bytes: int = SHARD_BYTES):
        with tempfile.TemporaryDirectory() as unused:  # Streaming requires a folder, and would empty the part's folder
            super().__init__(columns=columns, out=unused, hashes=['xxh64'], size_limit=shard_bytes)
        self.output = output
        self.part = part
        self.captions = Counter()  # captions written, by name
        self.long_captions = 0  # captions whose end the text encoder does not see
        self.shapes = Counter()  # images by what a training changes about them, see `write_sample` in converter.py

    def flush_shard(self) -> None:
        """Write the samples since the last shard, if any, as the next shard. Streaming calls this."""
        if not self.new_samples:
            return  # Streaming would write an empty shard before a sample that is larger than a shard
        name, _ = self._name_next_shard()
        content = self.encode_joint_shard()
        self.shards.append({'samples': len(self.new_samples), 'raw_data': self._hash(content, name), 'zip_data': None,
                            **self.get_config()})
        self.output.write(f'{self.part}/{name}', content)

    def finish(self, skipped: Sequence[dict] = ()) -> None:
        """Write the last shard, and then index.json with the lines for skipped.jsonl, which makes the part done."""
        self.flush_shard()
        index = {'version': 2, 'shards': self.shards, 'skipped': skipped, 'captions': self.captions,
                 'long_captions': self.long_captions, 'shapes': self.shapes}
        self.output.write(f'{self.part}/{INDEX}', json.dumps(index).encode())


@dataclass
class Joined:
    """The totals over all parts of a dataset."""
    shards: list[str] = field(default_factory=list)  # entries for OUT/index.json, as JSON text
    samples: int = 0
    samples_of: dict[str, int] = field(default_factory=dict)  # by name of the part
    bytes: int = 0  # size of all shards
    captions: Counter = field(default_factory=Counter)  # by name
    long_captions: int = 0
    shapes: Counter = field(default_factory=Counter)  # as in PartWriter; parts of earlier versions have none
    skipped: Counter = field(default_factory=Counter)  # lines in skipped.jsonl, by kind of reason
    first_skipped: dict | None = None  # the first line in skipped.jsonl
    damaged: list[dict] = field(default_factory=list)  # lines about files that could not be read to their end

    def skipped_line(self, out: str) -> str:
        """Return a text with the number of skipped items for each kind of reason, and the path of skipped.jsonl."""
        reasons = ', '.join(f'{number:,} {reason}' for reason, number in self.skipped.most_common())
        return f'{reasons}; listed in {out}/{SKIPPED}'


def join_parts(output: OutputFolder, parts: Sequence[str], skipped: Sequence[dict] = ()) -> Joined:
    """Read the index.json of each part, write OUT/skipped.jsonl if anything was skipped, and return the totals.

    `parts` are their names in the order of the dataset, and `skipped` are lines in addition to the parts' own.

    Raises DataError if a part is missing or damaged.
    """
    joined = Joined()
    with tempfile.TemporaryFile() as file, ThreadPoolExecutor(READERS) as readers:

        def add_skipped(lines: Sequence[dict]) -> None:
            for line in lines:
                text = json.dumps(line, ensure_ascii=False)  # a search finds names that are not escaped
                file.write(f'{text}\n'.encode(errors='backslashreplace'))  # a file name may not be UTF-8
                joined.first_skipped = joined.first_skipped or line
                joined.skipped[line['reason'].partition(':')[0]] += 1
                if line['reason'].startswith(DAMAGED):
                    joined.damaged.append(line)

        add_skipped(skipped)
        contents = readers.map(output.read, [f'{part}/{INDEX}' for part in parts])
        for part, content in zip(parts, contents, strict=True):
            try:
                index = json.loads(content)
            except (ValueError, TypeError):
                raise DataError(f'{part}/{INDEX} of {output.label} is missing or damaged; remove the folder {part}, '
                                'and run the same command again') from None
            add_skipped(index['skipped'])
            joined.samples_of[part] = sum(shard['samples'] for shard in index['shards'])
            joined.samples += joined.samples_of[part]
            joined.captions.update(index.get('captions', {}))
            joined.long_captions += index.get('long_captions', 0)
            joined.shapes.update(index.get('shapes', {}))
            for shard in index['shards']:
                shard['raw_data']['basename'] = f'{part}/{shard["raw_data"]["basename"]}'  # relative to OUT
                joined.shards.append(json.dumps(shard))
                joined.bytes += shard['raw_data']['bytes']

        # Replace the skipped.jsonl of an earlier run even if nothing is skipped any more.
        file.seek(0)
        if joined.skipped or output.read(SKIPPED) is not None:
            output.write(SKIPPED, file)
    return joined


def write_index(output: OutputFolder, joined: Joined, **about: Any) -> bool:
    """Write OUT/index.json, with `about` as additional keys. Return False if the same index.json was already there."""
    # The entries of the shards stay JSON text, because objects for a large dataset would take gigabytes.
    beginning = json.dumps({'version': 2, **about}).removesuffix('}')
    index = f'{beginning}, "shards": [{", ".join(joined.shards)}]}}'.encode()
    if output.read(INDEX) == index:
        return False
    output.write(INDEX, index)
    return True
