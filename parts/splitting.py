"""A part of a dataset is split: what is held out goes to a dataset of its own. What a worker does for it.

The samples that stay are written anew beside the shards of the part. When the new index of the part is there, the old
shards are removed, by the names that the new index keeps. So a worker may be killed at any moment.
"""
import tempfile
from collections.abc import Iterator

from inputs.shards import MDS_COLUMNS
from inputs.verified_stream import open_shards
from parts.claims import part_name, read_part
from parts.engine import Part
from parts.held_out import Draw, first_draws, remove_replaced
from parts.output import FolderOutput, Output
from parts.writer import PartWriter


class Splitter:
    """A worker that splits parts.

    Args:
        output: that holds them.
        held_out: where the samples up to the edge go.
        shard_bytes: the most that a shard takes.
        edge: the last sample that is held out.
        place: of this worker among those of its machine.
    """

    def __init__(self, output: Output, held_out: Output, shard_bytes: int, edge: Draw, place: int):
        self.output = output
        self.held_out = held_out
        self.shard_bytes = shard_bytes
        self.edge = edge

    def __call__(self, parts: list[Part]) -> list[int]:
        return [split_part(part, self.output, self.held_out, self.shard_bytes, self.edge) for part in parts]


def split_part(part: Part, output: Output, held_out: Output, shard_bytes: int, edge: Draw) -> int:
    """Move the samples up to the edge from a part of OUT to the part of the same number in `held_out`.

    Returns its number.
    """
    index = read_part(output, part.number)
    if 'replaced' in index:  # a worker that was taken for dead has done it
        return part.number
    leaving = {draw.sample for draw in first_draws(index, part.number) if draw <= edge}
    kept = PartWriter(output, part.number, MDS_COLUMNS, shard_bytes, part.attempt, f'{part_name(part.number)}-kept')
    moved = PartWriter(held_out, part.number, MDS_COLUMNS, shard_bytes, part.attempt)
    for number, sample in enumerate(samples_of(index['shards'], output)):
        writer = moved if number in leaving else kept
        writer.write(sample)
    moved.finish(replaces=True)
    replaced = [shard['raw_data']['basename'] for shard in index.pop('shards')]
    kept.finish(replaces=True, **index, replaced=replaced)
    remove_replaced(output, part.number, replaced)
    return part.number


def samples_of(shards: list[dict], output: Output) -> Iterator[dict]:
    """The samples of some shards of OUT, in their order. Raises DataError if one is not what its index says."""
    index = {'version': 2, 'shards': shards}
    with tempfile.TemporaryDirectory(prefix='shards-') as copies:
        folder = None if isinstance(output, FolderOutput) else copies
        opened = open_shards(output.reading_place, folder, index)
        for number in range(len(opened)):
            reader = opened.fetch(number)
            yield from (reader[sample] for sample in range(len(reader)))
            opened.drop(number)
