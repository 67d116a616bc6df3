"""--dry_run: what a run would need and could reach, on any machine, before a GPU is rented. Nothing is trained.

Parameters and arithmetic are counted by torch, memory as fitting/fake_step.py does it, and speed follows from NVIDIA's
peaks (models/peaks.py) and the share of them that was reached elsewhere.
"""
import dataclasses
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from composer.utils import dist

from fitting.fake_step import StepMemory, trace_step
from fitting.memory import GIB, build_outline, lasting_bytes
from fitting.microbatch import sizes_to_try
from inputs.shards import read_index
from inputs.words import counted
from models.diffusion_model import DiffusionModel
from models.loading import find_model
from models.peaks import PEAKS, peak_of
from settings.costs import days_to_train, gpu_hours
from settings.train import Train

CARDS = {'24 GB': 23.5, '40 GB': 39.5, '80 GB': 79.2, '141 GB': 139}  # GiB that torch finds on one
# What a GPU takes beside the tensors that are counted: CUDA itself, its libraries' workspaces, and memory that the
# allocator holds in pieces. milabench's H200, by NVML: 55 GiB where 49.7 are counted, 115.6 where 106.2 are.
UNCOUNTED_SHARE = 0.12
ACCURACY = f"""\
Each row below the first is the run as given with that one change. Memory is counted from the tensors of a step, at its
peak. CUDA, its libraries and its allocator take more: an H200 took 9 to 11 % more than is counted (milabench: 55 GiB at
32 images, 115.6 at 80). So {UNCOUNTED_SHARE:.0%} is added, and a microbatch is said to fit where that is in the card.
--compile is not counted; as a rule it needs less."""
SHARES_OF_PEAK = (0.18, 0.3, 0.5)
SPEEDS = """\
18 % of the peak is what 8 A100s reached in the published benchmark (published.csv); the other columns hold if the run
reaches 30 or 50 %. A card that has no microbatch in the table above is too small for the run."""


@dataclass(frozen=True)
class Estimate:
    """The memory of a device with one set of flags.

    Attributes:
        title: the flags, for people.
        settings: of the run, with these flags.
        model: without memory.
        lasting: bytes by item that do not depend on the microbatch.
        step: bytes of a step.
    """
    title: str
    settings: Train
    model: DiffusionModel
    lasting: dict[str, int]
    step: StepMemory

    @property
    def share(self) -> int:
        """Images of a batch on each device."""
        return self.settings.batch_size // self.settings.dry_run

    def needed(self, microbatch: int) -> dict[str, int]:
        """Bytes by item at the peak of a step, which is within a microbatch."""
        return self.lasting | self.step.peak(microbatch, accumulated=microbatch < self.share)

    def taken(self, microbatch: int) -> float:
        """GiB of a GPU, with what cannot be counted."""
        return sum(self.needed(microbatch).values()) * (1 + UNCOUNTED_SHARE) / GIB

    def largest_microbatch(self, gib: float) -> int | None:
        """The largest that fits into so much memory; None: not even one image does."""
        return max((size for size in sizes_to_try(self.share) if self.taken(size) <= gib), default=None)


def dry_run(settings: Train, build_model: Callable) -> dict[str, int | None]:
    """Print what the run would need and could reach; returns the largest microbatch for each of CARDS.

    Args:
        settings: of the run.
        build_model: makes the model that the run would train.

    Raises ValueError if the model, the remote or a GPU of that name is not known.
    """
    if dist.get_global_rank() > 0:
        return {}
    gpus = gpus_named(settings.gpu)
    latents = is_on_latents(settings)
    print('counting the memory of a step', file=sys.stderr, flush=True)
    given = estimate('as given', settings, latents, build_model)
    lighter = [estimate(*each, build_model) for each in with_less_memory(settings, latents)]
    flops_per_image = sum(given.model.flops_per_image.values())
    parameters = sum(parameter.numel() for parameter in given.model.unet.parameters())
    arithmetic = (f'{parameters:,} parameters of the UNet are trained, with {flops_per_image / 1e9:,.1f} GFLOP of '
                  'arithmetic for an image')
    print(title(settings, latents), arithmetic, memory_table(given).to_string(float_format='{:.2f}'.format),
          f'{cards_table([given, *lighter]).to_string()}\n{ACCURACY}', speeds(settings, flops_per_image, gpus),
          sep='\n\n')
    return {card: given.largest_microbatch(gib) for card, gib in CARDS.items()}


def gpus_named(name: str | None) -> list[str]:
    """The GPUs whose peak is known and whose names have all words of `name`; None: all. Raises ValueError if none has.
    """
    words = set(re.findall('[A-Z0-9]+', (name or '').upper()))
    found = [gpu for gpu in PEAKS if words <= set(re.findall('[A-Z0-9]+', gpu.upper()))]
    if not found:
        raise ValueError(f'--gpu {name} is no GPU that is known here; give one of {", ".join(PEAKS)}')
    return found


def is_on_latents(settings: Train) -> bool:
    """Whether the training needs no VAE. Raises ValueError if --remote is no dataset."""
    if not settings.remote:
        return settings.use_synth_latents
    return 'latents' in read_index(settings.remote)


def with_less_memory(settings: Train, latents: bool) -> list[tuple[str, Train, bool]]:
    """The run with each thing that it has not and that takes less memory: in words, its settings, and whether it is on
    latents."""
    half = settings.image_size // 16 * 8
    changes = {
        '--encoder_precision bf16': {'encoder_precision': 'bf16'},
        '--half_precision_norms': {'half_precision_norms': settings.precision != 'fp32'},
        '--gradient_checkpointing': {'gradient_checkpointing': True},
        'without --use_ema': {'use_ema': False},
        f'--image_size {half}': {'image_size': half if half >= 64 else settings.image_size},
    }
    runs = [(words, dataclasses.replace(settings, **change), latents) for words, change in changes.items()]
    found = [run for run in runs if run[1] != settings]
    if not latents:
        found.append(('latents (encode.py)', settings, True))
    return found


def estimate(title: str, settings: Train, latents: bool, build_model: Callable) -> Estimate:
    """The memory of a device for the model that is built with these settings."""
    model = build_outline(settings, find_model(settings.model_name), latents, build_model)  # sizes need no weights
    lasting = lasting_bytes(settings, model, settings.dry_run)
    return Estimate(title, settings, model, lasting, trace_step(model, settings.precision))


def title(settings: Train, latents: bool) -> str:
    devices = settings.dry_run
    words = [f'{settings.image_size} pixels', settings.precision, f'encoders in {settings.encoder_precision}']
    if latents:
        words.append('latents that are encoded already')
    if settings.use_ema:
        words.append('EMA')
    share = counted(settings.batch_size // devices, 'image')
    return f'{settings.model_name}: {", ".join(words)}; {share} a step on each of {counted(devices, "GPU")}'


def memory_table(given: Estimate) -> pd.DataFrame:
    """GiB of a device by item, for each microbatch up to the first that no card holds."""
    columns = {}
    for size in sizes_to_try(given.share):
        columns[size] = given.needed(size)
        if given.taken(size) > max(CARDS.values()):
            break
    table = pd.DataFrame(columns).fillna(0) / GIB
    counted = table.sum()
    table.loc['counted'] = counted
    table.loc[f'with {UNCOUNTED_SHARE:.0%} more'] = counted * (1 + UNCOUNTED_SHARE)
    return table.rename_axis(columns='GiB by microbatch')


def cards_table(estimates: list[Estimate]) -> pd.DataFrame:
    """The largest microbatch on each card: where nothing fits in the first row, a later one says what would."""
    table = pd.DataFrame(columns=CARDS)
    for each in estimates:
        table.loc[each.title] = [each.largest_microbatch(gib) or 'none' for gib in CARDS.values()]
    return table.rename_axis(columns='largest microbatch on')


def speeds(settings: Train, flops_per_image: int, gpus: list[str]) -> str:
    """Images/s of each of these GPUs at shares of its peak, and what the whole training would take."""
    devices = settings.dry_run
    images = settings.training_images
    dollars = settings.dollars_per_gpu_hour
    shares = ' / '.join(f'{share:.0%}' for share in SHARES_OF_PEAK)
    rows = {}
    for gpu in gpus:
        peak = peak_of(gpu, settings.precision)
        if peak is None:
            continue
        images_per_sec = [share * devices * peak * 1e12 / flops_per_image for share in SHARES_OF_PEAK]
        rows[gpu] = {'peak TFLOP/s': f'{peak:g}', f'images/s at {shares} of it': in_a_row(images_per_sec)}
        if images:
            rows[gpu]['days'] = in_a_row([days_to_train(speed, images) for speed in images_per_sec])
            rows[gpu]['dollars'] = in_a_row([gpu_hours(speed, devices, images) * dollars for speed in images_per_sec])
    if not rows:
        return f'No peak is known in {settings.precision}, so nothing is said of speed; try another --precision.'
    table = pd.DataFrame.from_dict(rows, orient='index').rename_axis(columns=f'on {counted(devices, "GPU")}')
    text = f'{table.to_string()}\n{SPEEDS}'
    if images:
        text += (f'\nDays and dollars are for {images:,} images at ${dollars:g} a GPU-hour, one price for all cards '
                 '(--dollars_per_gpu_hour).')
    return text


def in_a_row(figures: list[float]) -> str:
    """Figures with three significant digits, or whole."""
    return ' / '.join(f'{figure:,.3g}' if figure < 100 else f'{figure:,.0f}' for figure in figures)
