"""What a run was told: every flag with its default filled in, by subject. Nothing here changes or needs torch.

A field has the name of its flag. Each function is handed the subject, or the values, that it works with.
"""
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from settings.switch_table import flags_of_switches


@dataclass(frozen=True)
class DataSettings:
    """Where samples come from, and how they are read and changed.

    Attributes:
        num_workers: processes that decode, for each device.
        num_workers_by_default: whether the program chose their number.
        batch_size: images of a step, over all devices.
        caption_drop: share of the captions, 0 to 1.
    """
    remote: str | None
    local: str | None
    cache_limit: str | None
    max_bad_samples: float
    num_workers: int
    num_workers_by_default: bool
    use_synth_data: bool
    use_synth_latents: bool
    batch_size: int
    tokenizer: str | None
    random_flip: bool
    caption_drop: float


@dataclass(frozen=True)
class ModelSettings:
    """Which model is trained. `image_size` is in pixels; `encoder_precision` is bf16, fp16 or fp32."""
    model_name: str
    pretrained: bool
    image_size: int
    encoder_precision: str


@dataclass(frozen=True)
class PrecisionAndMicrobatch:
    """What a step is computed in, and how many images at once.

    Attributes:
        precision: amp_bf16, amp_fp16 or fp32.
        device_train_microbatch_size: as it was asked for; 'auto' is searched for before the run.
    """
    precision: str
    device_train_microbatch_size: int | Literal['auto']


# With a field for each switch, which is a bool or a text.
SpeedSettings = dataclasses.make_dataclass(
    'SpeedSettings', [(flag, bool | str) for flag in flags_of_switches()], bases=(PrecisionAndMicrobatch,),
    frozen=True, namespace={'__doc__': 'What bears on speed: precision, microbatch, and every switch of the table.',
                            '__module__': __name__})


@dataclass(frozen=True)
class MeasurementSettings:
    """What is measured, and where the record goes.

    Attributes:
        measure_batches: length of the window; None: from the warm-up to the end of the run.
        dry_run: how many GPUs to speak of, without a run; None: there is a run.
        profile: folder for a trace.
        results: file of records.
    """
    warmup_batches: int
    measure_batches: int | None
    dry_run: int | None
    loader_only: bool
    profile: str | None
    results: str


@dataclass(frozen=True)
class TrainingSettings:
    """How long is trained, from what, and what ends it.

    Attributes:
        max_duration: a time, such as 5000ba.
        only_measures: --max_duration was not given, so that the run is as long as its measurement.
        on_nan: stop or skip.
        dist_timeout: seconds that ranks wait for each other at the start.
    """
    max_duration: str
    only_measures: bool
    seed: int
    on_nan: str
    load_weights: str | None
    dist_timeout: int


@dataclass(frozen=True)
class OptimizerSettings:
    """How the weights move, and their average. `lr_warmup`, `ema_half_life` and `ema_start` are times."""
    learning_rate: float
    lr_warmup: str | None
    lr_schedule: str
    weight_decay: float
    clip_grad_norm: float | None
    use_ema: bool
    ema_half_life: str | None
    ema_start: str | None


@dataclass(frozen=True)
class SavingSettings:
    """Where checkpoints go, and how often. `save_folder` is a folder or an object store."""
    save_folder: str | None
    save_interval: str | None
    save_num_checkpoints_to_keep: int | None
    autoresume: bool


@dataclass(frozen=True)
class EvaluationSettings:
    """The samples that are held out, and how often the loss on them is calculated."""
    eval_remote: str | None
    eval_interval: str | None


@dataclass(frozen=True)
class DrawingSettings:
    """The file of prompts, how often they are drawn, and where to."""
    sample_prompts: str | None
    sample_interval: str | None
    sample_folder: str


@dataclass(frozen=True)
class LoggingSettings:
    """Where the curves of a run go. `tensorboard` is a folder."""
    wandb_name: str | None
    wandb_project: str | None
    tensorboard: str | None


@dataclass(frozen=True)
class CostSettings:
    """What the whole training would be: its images, None where no cost is shown, and the price of a GPU."""
    training_images: int | None
    dollars_per_gpu_hour: float


@dataclass(frozen=True)
class Settings:
    """All settings of a run of benchmark.py, by subject."""
    data: DataSettings
    model: ModelSettings
    speed: SpeedSettings
    measurement: MeasurementSettings
    training: TrainingSettings
    optimizer: OptimizerSettings
    saving: SavingSettings
    evaluation: EvaluationSettings
    drawing: DrawingSettings
    logging: LoggingSettings
    cost: CostSettings

    @property
    def searches_microbatch(self) -> bool:
        return self.speed.device_train_microbatch_size == 'auto'

    @property
    def keeps_nothing(self) -> bool:
        """Whether nothing stays of a training that was asked for."""
        return not self.training.only_measures and not self.saving.save_folder

    def flags(self) -> dict[str, Any]:
        """The value of every flag, by its name."""
        values = {}
        for subject in dataclasses.fields(self):
            values |= dataclasses.asdict(getattr(self, subject.name))
        return values


SwitchesOfEncoding = dataclasses.make_dataclass(
    'SwitchesOfEncoding', [(flag, bool | str) for flag in flags_of_switches(in_encoding=True)], frozen=True,
    namespace={'__doc__': 'The switches that encode.py has as well.', '__module__': __name__})


@dataclass(frozen=True)
class EncodingFlags(SwitchesOfEncoding):
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
class ConversionFlags:
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
class ExportFlags:
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
class EvaluateFlags:
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


def settings_from(flags: dict[str, Any]) -> Settings:
    """The settings that the values of all flags are, by their names."""
    return Settings(**{subject.name: subject_from(subject.type, flags) for subject in dataclasses.fields(Settings)})


def subject_from(kind: type, flags: dict[str, Any]):
    """One subject of them, or all flags of another command."""
    return kind(**{field.name: flags[field.name] for field in dataclasses.fields(kind)})


ENCODER_PRECISIONS = {'amp_bf16': 'bf16', 'amp_fp16': 'fp16', 'fp32': 'fp32'}  # unless given, by --precision
LOADER_FLAGS = ('pretrained', 'batch_size', 'num_workers', 'warmup_batches', 'seed')
TRAINING_FLAGS = (*LOADER_FLAGS, 'device_train_microbatch_size', 'precision', 'encoder_precision', 'use_ema',
                  *flags_of_switches(), 'max_duration', 'learning_rate', 'lr_warmup', 'lr_schedule', 'weight_decay',
                  'clip_grad_norm', 'ema_half_life', 'ema_start', 'caption_drop', 'random_flip', 'eval_interval')
ENCODING_FLAGS = ('pretrained', 'batch_size', 'num_workers', 'encoder_precision', *flags_of_switches(in_encoding=True),
                  'seed')
EVALUATE_FLAGS = ('batch_size', 'precision', 'samples', 'steps', 'seed', 'save_pictures')
