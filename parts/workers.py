"""The workers of the commands. What they import takes seconds, so only the processes that they work in import it."""
from parts.output import Output


def make_converter(output: Output, shard_bytes: int, place: int):
    """A worker of convert.py, see `parts.conversion.Converter`."""
    from parts.conversion import Converter
    return Converter(output, shard_bytes, place)


def make_encoder(output: Output, settings, place: int):
    """A worker of encode.py, see `parts.encoding.Encoder`."""
    from parts.encoding import Encoder
    return Encoder(output, settings, place)
