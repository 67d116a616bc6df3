"""What each of the other commands was told. Nothing here changes or needs torch."""
import dataclasses
from dataclasses import dataclass

from settings.switch_table import flags_of_switches

SwitchesOfEncoding = dataclasses.make_dataclass(
    'SwitchesOfEncoding', [(flag, bool | str) for flag in flags_of_switches(in_encoding=True)], frozen=True,
    namespace={'__doc__': 'The switches that encode.py has as well.', '__module__': __name__})


@dataclass(frozen=True)
class Encode(SwitchesOfEncoding):
    """All settings of a run of encode.py. `batch_size` is of each device; `ray` is the address of a cluster."""
    remote: str
    local: str | None
    cache_limit: str | None
    max_bad_samples: float
    num_workers: int
    num_workers_by_default: bool
    model_name: str
    pretrained: bool
    image_size: int
    encoder_precision: str
    warmup_batches: int
    results: str
    seed: int
    out: str
    batch_size: int
    ray: str | None


@dataclass(frozen=True)
class Convert:
    """All settings of a run of convert.py.

    Attributes:
        source: tars, folders, globs and addresses.
        held_out: how many samples go to a dataset of their own; None: none do.
        num_workers: processes; None: as many as there are cores.
        size_limit: bytes of a shard.
        ray: address of a cluster.
    """
    source: list[str]
    out: str
    held_out: int | None
    seed: int
    num_workers: int | None
    size_limit: int
    ray: str | None


@dataclass(frozen=True)
class Export:
    """All settings of a run of export.py.

    Attributes:
        checkpoint: a file, or a folder or an object store, for its newest.
        live: take those weights that the optimizer moves, and not their average.
        model_name: for the configuration of each part; None: that of the run.
        pretrained: take the VAE of `model_name` where the checkpoint has none.
        tokenizer: None: that of the run.
    """
    checkpoint: str
    out: str
    live: bool
    model_name: str | None
    pretrained: bool
    tokenizer: str | None


@dataclass(frozen=True)
class Evaluate:
    """All settings of a run of evaluate.py. `batch_size` is of each device; `guidance` holds each scale once.

    `image_size` None is that of the model.
    """
    model: str
    data: str
    out: str
    inception: str | None
    clip: str | None
    reference: str | None
    samples: int
    guidance: list[float]
    steps: int
    seed: int
    image_size: int | None
    batch_size: int
    precision: str
    live: bool
    model_name: str | None
    pretrained: bool
    tokenizer: str | None
    save_pictures: bool
    ray: str | None
    results: str


ENCODING_FLAGS = ('pretrained', 'batch_size', 'num_workers', 'encoder_precision', *flags_of_switches(in_encoding=True),
                  'seed')
EVALUATE_FLAGS = ('batch_size', 'precision', 'samples', 'steps', 'seed', 'save_pictures')
