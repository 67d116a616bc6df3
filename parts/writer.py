"""One part of a dataset, as a worker writes it: shards, each brought to OUT as soon as it is full, then their index."""
import json
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from streaming import MDSWriter

from parts.claims import part_index, part_name
from parts.output import Output

SHARD_BYTES = 1 << 26  # the most that a shard takes: Streaming's own default
SHARDS_ON_THEIR_WAY = 2  # of a part, full and not yet in OUT


class ShardWriter(MDSWriter):
    """Streaming's writer, whose full shards are handed on as bytes.

    Streaming's own would first remove what lies in the folder of the part, whosever it is, and writes a shard under its
    name before it is whole.

    Args:
        keep: takes the name and the bytes of a shard.
        columns: names and MDS types.
        shard_bytes: the most that a shard takes.
    """

    def __init__(self, keep, columns: dict[str, str], shard_bytes: int):
        with tempfile.TemporaryDirectory() as unused:  # Streaming wants a folder
            super().__init__(columns=columns, out=unused, hashes=['xxh64'], size_limit=shard_bytes)
        self.keep = keep

    def flush_shard(self) -> None:
        """Hand the samples that were written since the last shard on as the next one."""
        name, _ = self._name_next_shard()
        content = self.encode_joint_shard()
        self.shards.append({'samples': len(self.new_samples), 'raw_data': self._hash(content, name), 'zip_data': None,
                            **self.get_config()})
        self.keep(name, content)

    def finish(self) -> None:
        """Hand the last samples on."""
        if self.new_samples:
            self.flush_shard()
            self._reset_cache()


class PartWriter:
    """Writes one part. What a killed worker left of it is written over, since it is the same.

    Args:
        output: where to.
        number: of the part.
        columns: names and MDS types.
        shard_bytes: the most that a shard takes.
        attempt: how many workers have died of this part, see `parts.engine`.
        folder: of its shards in OUT; None: the folder of its number.
    """

    def __init__(self, output: Output, number: int, columns: dict[str, str], shard_bytes: int = SHARD_BYTES,
                 attempt: int = 0, folder: str | None = None):
        self.output = output
        self.number = number
        self.folder = folder or part_name(number)
        self.attempt = attempt
        self.writer = ShardWriter(self._keep, columns, shard_bytes)
        self.carrier = ThreadPoolExecutor(1)
        self.on_their_way: deque[Future] = deque()

    def write(self, sample: dict) -> None:
        """A sample, as MDSWriter takes it."""
        self.writer.write(sample)

    def finish(self, replaces: bool = False, **about) -> None:
        """Bring the last samples to OUT, and then say that the part is whole.

        Args:
            replaces: an index that is there already; else that one stays.
            about: what else there is to say of the part.
        """
        self.writer.finish()
        self.carrier.shutdown()
        for shard in self.on_their_way:
            shard.result()  # raises what went wrong with it
        for shard in self.writer.shards:
            name = self._name(shard['raw_data']['basename'])
            shard['raw_data']['basename'] = name
            self.output.remove_unfinished(name, self.attempt)
        index = {'shards': self.writer.shards, **about}
        write = self.output.write if replaces else self.output.write_first
        write(part_index(self.number), json.dumps(index).encode(), self.attempt)
        self.output.remove_unfinished(part_index(self.number), self.attempt)

    def _keep(self, name: str, content: bytes) -> None:
        self.on_their_way.append(self.carrier.submit(self.output.write, self._name(name), content, self.attempt))
        while len(self.on_their_way) > SHARDS_ON_THEIR_WAY:
            self.on_their_way.popleft().result()

    def _name(self, basename: str) -> str:
        return f'{self.folder}/{basename}'
