"""The parts of a dataset become one: their indexes are joined into OUT/index.json."""
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO

from inputs.errors import DataError
from inputs.places import INDEX
from parts.claims import SKIPPED, part_index, read_part
from parts.output import Output

READERS = 64  # of part indexes, at once
PARTS_AT_ONCE = 1000  # whose indexes are held


@dataclass
class Merged:
    """What all parts together hold."""
    shards: int = 0
    samples: int = 0
    bytes: int = 0  # of the shards
    skipped: Counter = field(default_factory=Counter)  # what was left out, by reason
    damaged: list[dict] = field(default_factory=list)  # the files that could not be read to their end


def merge_parts(output: Output, num_parts: int, about: dict, left_out: Iterable[dict] = (),
                counts: Counter | None = None, numbers: Sequence[int] | None = None,
                check: Callable[[Merged], None] | None = None) -> Merged:
    """Write OUT/index.json, the index of all parts with `about` beside them, unless they hold no sample.

    What was left out is listed in OUT/skipped.jsonl, if anything was. The entries pass through one by one, so that
    memory stays flat.

    Args:
        output: in which every part is done.
        num_parts: of the dataset.
        about: more entries for the index.
        left_out: more lines for the list of what was left out.
        counts: of these, by reason.
        numbers: of the parts, where they are not all from 0 to `num_parts`.
        check: called before the index is written; where it raises, there is none.

    Raises DataError if a part is not there or damaged.
    """
    merged = Merged(skipped=Counter(counts))
    if numbers is None:
        numbers = range(num_parts)
    with tempfile.TemporaryFile() as index, tempfile.TemporaryFile() as skipped:
        for line in left_out:
            skipped.write(json.dumps(line).encode() + b'\n')
        index.write(b'{"version": 2, ')
        for key, value in about.items():
            index.write(f'{json.dumps(key)}: {json.dumps(value)}, '.encode())
        index.write(b'"shards": [')
        for number, part in zip(numbers, read_parts(output, numbers), strict=True):
            for shard in part['shards']:
                index.write(b', ' if merged.shards else b'')
                index.write(json.dumps(shard).encode())
                merged.shards += 1
                merged.samples += shard['samples']
                merged.bytes += shard['raw_data']['bytes']
            for line in part.get('skipped', ()):
                skipped.write(json.dumps(line).encode() + b'\n')
                merged.skipped[line['reason'].partition(':')[0]] += 1  # without the particulars
            merged.damaged += [{'part': number, **file} for file in part.get('damaged', ())]
        index.write(b']}')
        publish_skipped(output, merged, skipped)
        if merged.samples:
            if check is not None:
                check(merged)
            index.seek(0)
            output.write(INDEX, index)
    return merged


def publish_skipped(output: Output, merged: Merged, skipped: BinaryIO) -> None:
    """Bring the list of what was left out to OUT, or remove an earlier one where nothing was."""
    skipped.seek(0)
    if merged.skipped:
        output.write(SKIPPED, skipped)
    else:
        output.remove([SKIPPED])


def read_parts(output: Output, numbers: Sequence[int]) -> Iterator[dict]:
    """The index of each part, in the order of `numbers`, many read at once.

    Raises DataError if one is not there or damaged.
    """
    def read(number: int) -> dict:
        part = read_part(output, number)
        if part is None:
            raise DataError(f'{part_index(number)} of {output.place} is gone; run the same command again')
        return part

    with ThreadPoolExecutor(READERS) as readers:
        for start in range(0, len(numbers), PARTS_AT_ONCE):
            yield from readers.map(read, numbers[start:start + PARTS_AT_ONCE])

