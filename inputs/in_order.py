"""The samples of a dataset of shards in their order, as bytes and text."""
from collections.abc import Iterator
from itertools import accumulate, pairwise

from inputs.errors import DataError
from inputs.verified_stream import Shards


def samples_in_order(shards: Shards, first: int, stop: int) -> Iterator[dict]:
    """The columns of the samples from number `first` up to `stop`, of all.

    Raises DataError if a shard cannot be had, or a caption is no text.
    """
    starts = [0, *accumulate(reader.samples for reader in shards.readers)]
    for number, (start, end) in enumerate(pairwise(starts)):
        if end <= first or start >= stop:
            continue
        reader = shards.fetch(number)
        for sample in range(max(first, start), min(stop, end)):
            try:
                yield reader[sample - start]
            except UnicodeDecodeError:
                raise DataError(f'sample {sample}: the caption is not UTF-8; leave that sample out') from None
