"""What a run of benchmark.py was told: every flag with its default filled in. Nothing here changes or needs torch."""
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from settings.switch_table import flags_of_switches

Switches = dataclasses.make_dataclass(
    'Switches', [(flag, bool | str) for flag in flags_of_switches()], frozen=True,
    namespace={'__doc__': 'Every switch of the table.', '__module__': __name__})


@dataclass(frozen=True)
class Train(Switches):
    """The flags of a run, by their names, and what follows from them.

    Attributes:
        num_workers_by_default: whether the program chose their number.
        only_measures: --max_duration was not given, so that the run is as long as its measurement.
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
    model_name: str
    pretrained: bool
    image_size: int
    encoder_precision: str
    precision: str
    device_train_microbatch_size: int | Literal['auto']
    warmup_batches: int
    measure_batches: int | None
    dry_run: int | None
    loader_only: bool
    profile: str | None
    results: str
    max_duration: str
    only_measures: bool
    seed: int
    on_nan: str
    load_weights: str | None
    dist_timeout: int
    learning_rate: float
    lr_warmup: str | None
    lr_schedule: str
    weight_decay: float
    clip_grad_norm: float | None
    use_ema: bool
    ema_half_life: str | None
    ema_start: str | None
    save_folder: str | None
    save_interval: str | None
    save_num_checkpoints_to_keep: int | None
    autoresume: bool
    eval_remote: str | None
    eval_interval: str | None
    sample_prompts: str | None
    sample_interval: str | None
    sample_folder: str
    wandb_name: str | None
    wandb_project: str | None
    tensorboard: str | None
    training_images: int | None
    dollars_per_gpu_hour: float

    @property
    def searches_microbatch(self) -> bool:
        return self.device_train_microbatch_size == 'auto'

    @property
    def keeps_nothing(self) -> bool:
        """Whether nothing stays of a training that was asked for."""
        return not self.only_measures and not self.save_folder

    def flags(self) -> dict[str, Any]:
        """The value of every flag, by its name."""
        return dataclasses.asdict(self)


def settings_from(kind: type, flags: dict[str, Any]):
    """The settings of a command, of the values of all its flags by their names."""
    return kind(**{field.name: flags[field.name] for field in dataclasses.fields(kind)})


ENCODER_PRECISIONS = {'amp_bf16': 'bf16', 'amp_fp16': 'fp16', 'fp32': 'fp32'}  # unless given, by --precision
LOADER_FLAGS = ('pretrained', 'batch_size', 'num_workers', 'warmup_batches', 'seed')
TRAINING_FLAGS = (*LOADER_FLAGS, 'device_train_microbatch_size', 'precision', 'encoder_precision', 'use_ema',
                  *flags_of_switches(), 'max_duration', 'learning_rate', 'lr_warmup', 'lr_schedule', 'weight_decay',
                  'clip_grad_norm', 'ema_half_life', 'ema_start', 'caption_drop', 'random_flip', 'eval_interval')
