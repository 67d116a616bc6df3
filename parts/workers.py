"""The workers of the commands. What they import takes seconds, so only the processes that they work in import it."""
from parts.output import Output


def make_converter(output: Output, shard_bytes: int, held_out: int | None, seed: int, place: int):
    """A worker of convert.py, see `parts.conversion.Converter`."""
    from parts.conversion import Converter
    return Converter(output, shard_bytes, held_out, seed, place)


def make_splitter(output: Output, held_out: Output, shard_bytes: int, edge, place: int):
    """A worker of convert.py, see `parts.splitting.Splitter`."""
    from parts.splitting import Splitter
    return Splitter(output, held_out, shard_bytes, edge, place)


def make_encoder(output: Output, settings, place: int):
    """A worker of encode.py, see `parts.encoding.Encoder`."""
    from parts.encoding import Encoder
    return Encoder(output, settings, place)
