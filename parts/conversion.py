"""Images with captions become a part of a dataset: what a worker of convert.py does."""
import torch

from inputs.shards import MDS_COLUMNS
from parts.claims import require_same_place
from parts.engine import Part
from parts.held_out import draw_of, smallest_draws
from parts.output import Output
from parts.tars import Damage, make_sample, read_samples
from parts.writer import PartWriter


class Converter:
    """A worker that makes parts out of tars and images.

    Args:
        output: where to.
        shard_bytes: the most that a shard takes.
        held_out: samples that are to be held out of the whole dataset; None: none.
        seed: of the draws that decide which.
        place: of this worker among those of its machine.

    Raises DataError if this machine does not see the same OUT as the one that gives it parts.
    """

    def __init__(self, output: Output, shard_bytes: int, held_out: int | None, seed: int, place: int):
        torch.set_num_threads(1)  # the workers are the parallelism
        self.output = output
        self.shard_bytes = shard_bytes
        self.held_out = held_out
        self.seed = seed
        require_same_place(output)

    def __call__(self, parts: list[Part]) -> list[dict]:
        return [convert_part(part, self.output, self.shard_bytes, self.held_out, self.seed) for part in parts]


def convert_part(part: Part, output: Output, shard_bytes: int, held_out: int | None, seed: int) -> dict:
    """Write the shards of a part's files, and with their index what was skipped and which files are damaged; where
    samples are to be held out, also the smallest draws.

    Returns its number, its images, its bytes and the damaged files.
    """
    writer = PartWriter(output, part.number, MDS_COLUMNS, shard_bytes, part.attempt)
    images = 0
    draws = []  # of each sample
    skipped = []
    damaged = []
    for file in part.files:
        for key, fields in read_samples(file):
            try:
                sample = make_sample(fields)
            except ValueError as reason:
                skipped.append({'source': file.name, 'key': key, 'reason': str(reason)})
                if isinstance(fields, Damage):
                    damaged.append({'name': file.name, 'reason': str(reason)})
                continue
            writer.write(sample)
            images += 1
            if held_out:
                draws.append(draw_of(sample['jpg'], seed))
    about = {'skipped': skipped, 'damaged': damaged}
    if held_out:
        about['draws'] = smallest_draws(draws, held_out)
    writer.finish(**about)
    return {'number': part.number, 'images': images, 'bytes': sum(file.size for file in part.files),
            'damaged': damaged}
