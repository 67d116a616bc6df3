"""Make a dataset part by part, as convert.py and encode.py both do: what is missing is made, and then all is joined.

The index.json of a part is written when its shards are all there. OUT/index.json, which makes a dataset of the parts,
comes last.
"""
import json
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from sdbench.datasets.output import DAMAGED, SKIPPED, Output
from sdbench.errors import DataError, plural
from sdbench.flags.train import BATCH_SIZE, TINY_MODEL
from sdbench.paths import INDEX

READERS = 64  # of part indexes, at once
FEWEST_SAMPLES = 10_000  # from which a model learns from random weights; of fewer, one that is trained already


@dataclass
class Joined:
    """What all parts together hold."""
    shards: list[str] = field(default_factory=list)  # their entries in the index, as JSON
    samples: int = 0
    samples_of: dict[str, int] = field(default_factory=dict)  # each part
    bytes: int = 0  # of the shards
    skipped: Counter = field(default_factory=Counter)  # what was left out, by kind of reason
    first_skipped: dict | None = None  # the first line of it
    damaged: list[dict] = field(default_factory=list)  # the lines of files that could not be read to their end
    whole_files: set[str] = field(default_factory=set)  # lines of whole files: each piece of a file has the same

    def add_part(self, part: str, shards: list[dict]) -> None:
        """Add the shards of a part; their names become paths in OUT."""
        self.samples_of[part] = sum(shard['samples'] for shard in shards)
        self.samples += self.samples_of[part]
        for shard in shards:
            shard['raw_data']['basename'] = f'{part}/{shard["raw_data"]["basename"]}'
            self.shards.append(json.dumps(shard))
            self.bytes += shard['raw_data']['bytes']

    def add_skipped(self, lines: Iterable[dict], file: BinaryIO) -> None:
        """Count what was left out, and write its lines into a file."""
        for line in lines:
            text = json.dumps(line)
            if text in self.whole_files:
                continue
            if line['key'] is None:
                self.whole_files.add(text)
            if not self.skipped:
                self.first_skipped = line
            file.write(f'{text}\n'.encode())
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
            for start in range(0, len(parts), READERS):  # few are held at once
                some = parts[start:start + READERS]
                contents = readers.map(output.read, [f'{part}/{INDEX}' for part in some])
                for part, content in zip(some, contents, strict=True):
                    try:
                        index = json.loads(content)
                    except (ValueError, TypeError):
                        raise DataError(f'{part}/{INDEX} of {output.label} is gone or damaged; remove the folder '
                                        f'{part}, and run the same command again') from None
                    joined.add_part(part, index['shards'])
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


def training_command(out: str, samples: int, model_name: str, pretrained: bool, flags: Sequence[str] = ()) -> str:
    """Return the command that trains on a dataset: from random weights on many samples, from trained ones on few."""
    # the data and the model
    command = ['composer', 'benchmark.py', '--remote', out, '--model_name', model_name]
    if pretrained:
        command.append('--pretrained')

    # length and batch, by the number of samples
    if samples >= FEWEST_SAMPLES:
        batch_size = min(BATCH_SIZE, power_of_two(samples // 100))  # an epoch has a hundred batches at least
        command += ['--use_ema', '--ema_half_life', '1ep', '--max_duration', '10ep']
    else:
        batch_size = min(16, power_of_two(samples))
        if pretrained and model_name != TINY_MODEL:  # which has no trained UNet
            command += ['--load_weights', model_name, '--learning_rate', '1e-5']
        command += ['--max_duration', '2000ba']
    if batch_size != BATCH_SIZE:
        command += ['--batch_size', str(batch_size)]

    # the checkpoints
    save_folder = f'{os.path.basename(out.rstrip("/"))}-checkpoints'
    return shlex.join([*command, *flags, '--caption_drop', '0.1', '--save_folder', save_folder, '--autoresume'])


def power_of_two(number: int) -> int:
    """Return the largest power of two that is no larger than a number from 1 on."""
    return 1 << (number.bit_length() - 1)
