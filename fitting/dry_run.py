"""--dry_run: what a run would need and could reach, on any machine, before a GPU is rented. Nothing is trained.

Parameters and arithmetic are counted by torch, memory as fitting/fake_step.py does it, and speed follows from NVIDIA's
peaks (models/peaks.py). So the memory is an estimate, and the speed at 100 % of the peak is a bound, no forecast.
"""
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from composer.utils import dist
from tqdm import tqdm

from fitting.fake_step import FakeModel, StepMemory, build_fake
from fitting.memory import (
    GIB,
    UNCOUNTED_SHARE,
    build_outline,
    lasting_bytes,
    needed_bytes,
    taken_on_a_gpu,
    trace_training,
)
from fitting.microbatch import divisors
from inputs.shards import read_index, require_columns
from inputs.words import counted
from settings.costs import days_to_train, gpu_hours
from models.diffusion_model import DiffusionModel
from models.loading import ModelFiles, find_model
from models.peaks import PEAKS, peak_of
from settings import switch_table
from settings.train import Train
from settings.switch_table import Switch

CARDS = {'24 GB': 23.5, '40 GB': 39.5, '80 GB': 79.2, '141 GB': 139}  # GiB that torch finds on one
SHARES_OF_PEAK = (1, 0.5, 0.3)
ACCURACY = f"""\
Memory is counted from the tensors of a step, at its peak. CUDA, its libraries and its allocator take more: an H200 took
9 to 11 % more than is counted (milabench: 55 GiB at 32 images, 115.6 at 80). So {UNCOUNTED_SHARE:.0%} is added, and a
microbatch is said to fit where that is within the card. --compile is not counted; as a rule it needs less."""


@dataclass(frozen=True)
class Estimate:
    """The memory of a device with one set of switches.

    Attributes:
        title: the switches, for people.
        settings: of the run, with these switches.
        model: a fake one.
        lasting: bytes by item that do not depend on the microbatch.
        step: bytes of a step.
    """
    title: str
    settings: Train
    model: DiffusionModel
    lasting: dict[str, int]
    step: StepMemory

    def needed(self, microbatch: int) -> dict[str, int]:
        """Bytes by item at the peak of a step."""
        return needed_bytes(self.settings, self.lasting, self.step, microbatch, self.settings.dry_run)

    def largest_microbatch(self, gib: float) -> int | None:
        """The largest that fits into so much memory; None: not even one image does."""
        for microbatch in microbatches(self.settings):
            if taken_on_a_gpu(self.needed(microbatch)) <= gib * GIB:
                return microbatch
        return None

    def gib_per_image(self) -> float:
        """What each image more in a microbatch takes."""
        few, many = (sum(self.step.peak(microbatch, accumulated=True).values()) for microbatch in (64, 128))
        return (many - few) / 64 / GIB


def dry_run(settings: Train, build_model: Callable) -> dict[str, int | None]:
    """Print what the run would need and could reach; returns the largest microbatch for each of CARDS.

    Args:
        settings: of the run.
        build_model: makes the model that the run would train.

    Raises ValueError if the model or the remote is not there.
    """
    latents = settings.use_synth_latents
    if settings.remote:
        index = read_index(settings.remote)
        require_columns(settings.remote, index)
        latents = 'latents' in index
    files = find_model(settings.model_name)  # sizes need no weights
    counting = estimates_with_each_switch(settings, files, latents, build_model)
    if dist.get_global_rank() == 0:
        print('counting the memory of a step, with and without each switch', file=sys.stderr, flush=True)
    is_quiet = dist.get_global_rank() > 0 or None  # None: where nobody looks
    number = len(switches_of_memory(settings.precision)) + 2
    estimates = list(tqdm(counting, 'counting memory', number, leave=False, unit='setting', disable=is_quiet))
    given = estimates[0]
    if dist.get_global_rank() == 0:
        flops_per_image = sum(given.model.flops_per_image.values())
        print(title(settings, latents), *parts_table(given.model), *memory_table(given), *cards_table(estimates),
              ACCURACY, *speed_table(settings, flops_per_image), sep='\n')
    return {card: given.largest_microbatch(gib) for card, gib in CARDS.items()}


def estimates_with_each_switch(settings: Train, files: ModelFiles, latents: bool,
                               build_model: Callable) -> Iterator[Estimate]:
    """The run as it is, then with each switch turned over, and without a fused kernel for attention."""
    given = build_fake(build_outline(settings, files, latents, build_model))
    yield estimate('as given', settings, given)
    for switch in switches_of_memory(settings.precision):
        other_value = not getattr(settings, switch.flag)
        turned = dataclasses.replace(settings, **{switch.flag: other_value})
        [title] = switch.as_flags(other_value)
        yield estimate(title, turned, build_fake(build_outline(turned, files, latents, build_model)))
    yield estimate('attention without a fused kernel', settings, given, fused_attention=False)


def switches_of_memory(precision: str) -> list[Switch]:
    """Those that change what a step needs in this precision: the run is shown with and without each."""
    return [switch for switch in switch_table.SWITCHES
            if switch.bears_on_memory and not (switch.needs_half_precision and precision == 'fp32')]


def estimate(title: str, settings: Train, fake: FakeModel, fused_attention: bool = True) -> Estimate:
    """The memory of a device for a model that is built with the switches of `settings`."""
    lasting = lasting_bytes(settings, fake.model, settings.dry_run)
    return Estimate(title, settings, fake.model, lasting, trace_training(settings, fake, fused_attention))


def microbatches(settings: Train) -> list[int]:
    """Those that a device's share of the batch can be taken in, the largest first."""
    return divisors(settings.batch_size // settings.dry_run)


def title(settings: Train, latents: bool) -> str:
    devices = settings.dry_run
    words = [f'{settings.image_size} pixels', settings.precision, f'text encoder in {settings.encoder_precision}']
    if latents:
        words.append('latents that are encoded already')
    else:
        words[-1] = f'encoders in {settings.encoder_precision}'
    if settings.use_ema:
        words.append('EMA')
    place = f'each of {devices} GPUs' if devices > 1 else '1 GPU'
    share = counted(settings.batch_size // devices, 'image')
    return f'{settings.model_name}: {", ".join(words)}; {share} a step on {place}'


def parts_table(model: DiffusionModel) -> list[str]:
    """Parameters and arithmetic of each part."""
    flops = model.flops_per_image
    modules = {'unet': ('UNet, forward and backward', model.unet), 'text_encoder': ('text encoder', model.text_encoder)}
    if model.vae is not None:
        modules['vae'] = ('VAE, its encoder at work', model.vae)
    rows = [['', 'parameters', 'GFLOP an image']]
    for key, (name, module) in modules.items():
        parameters = sum(parameter.numel() for parameter in module.parameters())
        rows.append([name, f'{parameters:,}', f'{flops[key] / 1e9:,.1f}'])
    rows.append(['together', '', f'{sum(flops.values()) / 1e9:,.1f}'])
    return ['', *aligned(rows)]


def memory_table(given: Estimate) -> list[str]:
    """GiB of a device by item, for each microbatch up to the first that no card holds."""
    sizes = []
    for size in reversed(microbatches(given.settings)):
        sizes.append(size)
        if taken_on_a_gpu(given.needed(size)) > max(CARDS.values()) * GIB:
            break
    needs = [given.needed(size) for size in sizes]
    items = dict.fromkeys(item for needed in needs for item in needed)
    rows = [['GiB by microbatch', *map(str, sizes)]]
    for item in items:
        rows.append([item, *(f'{needed.get(item, 0) / GIB:.2f}' for needed in needs)])
    rows.append(['counted', *(f'{sum(needed.values()) / GIB:.1f}' for needed in needs)])
    rows.append([f'with {UNCOUNTED_SHARE:.0%} more', *(f'{taken_on_a_gpu(needed) / GIB:.1f}' for needed in needs)])
    return ['', *aligned(rows)]


def cards_table(estimates: list[Estimate]) -> list[str]:
    """The largest microbatch on each card, with each of the switches."""
    rows = [['largest microbatch on', *CARDS, 'GiB an image']]
    for each in estimates:
        fitting = [each.largest_microbatch(gib) for gib in CARDS.values()]
        rows.append([each.title, *(str(size or 'none') for size in fitting), f'{each.gib_per_image():.2f}'])
    return ['', *aligned(rows), '']


def speed_table(settings: Train, flops_per_image: int) -> list[str]:
    """Images/s on each card whose peak is known, at three shares of it, and what the whole training would take."""
    devices = settings.dry_run
    precision = settings.precision
    images = settings.training_images
    dollars = settings.dollars_per_gpu_hour
    shares = ' / '.join(f'{share:.0%}' for share in SHARES_OF_PEAK)
    heads = [f'of the peak of {counted(devices, "GPU")}', 'TFLOP/s each', f'images/s at {shares}']
    if images:
        heads += ['days', 'dollars']
    rows = [heads]
    for card in PEAKS:
        peak = peak_of(card, precision)
        if peak is None:
            continue
        speeds = [share * devices * peak * 1e12 / flops_per_image for share in SHARES_OF_PEAK]
        row = [card, f'{peak:g}', in_a_row(speeds)]
        if images:
            hours = [gpu_hours(speed, devices, images) for speed in speeds]
            row.append(in_a_row([days_to_train(speed, images) for speed in speeds]))
            row.append(in_a_row([each * dollars for each in hours], '$'))
        rows.append(row)
    if len(rows) == 1:
        return ['', f'No peak is known in {precision}, so nothing is said of speed.']
    lines = ['', *aligned(rows), 'On a card with no largest microbatch above the run does not fit, whatever its speed.']
    if images:
        lines.append(f'Days and dollars are for {images:,} images at ${dollars:g} a GPU-hour on every card '
                     '(--dollars_per_gpu_hour).')
    return lines


def in_a_row(figures: list[float], sign: str = '') -> str:
    """Figures with three significant digits, or whole."""
    def printed(figure: float) -> str:
        if figure == 0:
            return f'{sign}0'
        decimals = max(0, 2 - math.floor(math.log10(figure)))
        return f'{sign}{figure:,.{decimals}f}'
    return ' / '.join(map(printed, figures))


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of a table: the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append('  '.join(cells))
    return lines
