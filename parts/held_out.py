"""Which samples a conversion holds out: those whose images have the smallest draws.

A draw is a hash of the seed and of an image's bytes. So neither the number of workers nor the order of files nor the
size of parts changes on which side an image is, and copies of an image are on one side. With more images in SOURCE only
those at the edge change sides.

The index of each part keeps its smallest draws. When all parts are there, the smallest of all say where the edge is,
and OUT/held-out.json keeps it. The parts that hold such samples are then split (parts/splitting.py). A part that is
converted anew later, because a file of it was damaged, is split at the same edge: what was trained on is never held
out afterwards, but the number of what is held out may then be another one.
"""
import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from inputs.words import counted
from parts.claims import (
    EDGE,
    finished_parts,
    is_begun,
    names_beside_claim,
    read_json,
    redo,
    refuse_finished,
    release,
    remove_part_folders,
)
from parts.merge import read_parts
from parts.output import Output


class Draw(NamedTuple):
    """A sample's place in the order in which samples are held out; copies of an image follow the order of samples."""
    draw: int
    part: int
    sample: int  # its number in the part, before that is split


class TooFewSamples(ValueError):
    """Nothing would be left to train on."""


def draw_of(image: bytes, seed: int) -> int:
    """Of 64 bits."""
    return int.from_bytes(hashlib.blake2b(image, digest_size=8, key=str(seed).encode()).digest())


def smallest_draws(draws: Iterable[int], number: int) -> list[tuple[int, int]]:
    """The `number` smallest draws of a part's samples, each with the number of its sample."""
    return heapq.nsmallest(number, ((draw, sample) for sample, draw in enumerate(draws)))


def first_draws(part: dict, number: int) -> Iterator[Draw]:
    """The smallest draws of the part of that number, as its index keeps them, in their order."""
    for draw, sample in part['draws']:
        yield Draw(draw, number, sample)


def find_edge(output: Output, num_parts: int, number: int) -> Draw | None:
    """The last sample that is held out, from now on kept in OUT; None if there are no samples at all.

    Args:
        output: in which every part is done.
        num_parts: of the dataset.
        number: of samples to hold out.

    Raises TooFewSamples if there are no more than that.
    """
    kept = read_json(output, EDGE)
    if kept is not None:
        return Draw(*kept)
    samples = 0

    def all_draws() -> Iterator[Draw]:
        nonlocal samples
        for part_number, part in enumerate(read_parts(output, range(num_parts))):
            samples += sum(shard['samples'] for shard in part['shards'])
            yield from first_draws(part, part_number)
    smallest = heapq.nsmallest(number, all_draws())
    if samples == 0:
        return None
    if samples <= number:
        raise TooFewSamples(f'--held_out {number} leaves none of the {counted(samples, "sample")} to train on; use at '
                            f'most {samples - 1}')
    output.write(EDGE, json.dumps(smallest[-1]).encode())
    return smallest[-1]


def parts_with_held_out(output: Output, num_parts: int, edge: Draw) -> Iterator[tuple[int, dict]]:
    """The number and the index of each part that holds, or held before it was split, samples up to the edge."""
    for number, part in enumerate(read_parts(output, range(num_parts))):
        if any(draw <= edge for draw in first_draws(part, number)):
            yield number, part


def remove_replaced(output: Output, number: int, names: Iterable[str]) -> None:
    """Remove the shards that a part had before it was split."""
    output.remove(names)
    remove_part_folders(output, [number])


def refuse_leftovers(output: Output, held_out: Output) -> None:
    """Raises ValueError if there are samples that were held out of another OUT, or either place is somebody else's."""
    output.require_new_or_begun()
    held_out.require_new_or_begun()
    if is_begun(held_out) and not is_begun(output) and any(names_beside_claim(held_out)):
        raise ValueError(f'{held_out.place} holds what an earlier run held out of another {output.place}; give a new '
                         'folder')
    if output.read(EDGE) is None:  # nothing of this OUT can be held out yet
        refuse_finished(held_out)


def parts_that_lost_samples(output: Output, held_out: Output, done: Iterable[int]) -> set[int]:
    """The parts of `done` that were split, and whose samples are gone from `held_out`, as where somebody removed it."""
    if output.read(EDGE) is None:
        return set()
    numbers = sorted(done)
    there = finished_parts(held_out, max(numbers, default=0) + 1)
    parts = zip(numbers, read_parts(output, numbers), strict=True)
    return {number for number, part in parts if 'replaced' in part and number not in there}


def give_back(output: Output, held_out: Output, num_parts: int, program: str) -> None:
    """Take all parts of a dataset back, which is too small to hold samples out of, so that the next run may use OUT."""
    redo(output, range(num_parts))
    redo(held_out, range(num_parts))
    release(held_out, num_parts, program)
    release(output, num_parts, program)
