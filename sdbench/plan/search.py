"""Find the fastest way to train on some GPUs that leaves the training result as it is. Nothing here needs torch."""
import itertools
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from sdbench.flags.parser import build_parser, parse
from sdbench.flags.plan import GPUS, PlanSettings
from sdbench.flags.train import Train, divisors
from sdbench.forecast.forecast import DoesNotFit
from sdbench.gpus import CARDS, Card, cards_named, peak_of
from sdbench.plan.measured import Speeds
from sdbench.plan.parts import ENCODE, TRAIN, Impossible, Part, Plan, Preemptions
from sdbench.plan.prices import (
    CHECKPOINT_TB,
    JPEG_BYTES_PER_PIXEL,
    LATENT_BYTES_PER_PIXEL,
    Price,
    Storage,
    price_for,
    terabytes,
)
from sdbench.setup import Setup, setup_of_settings

RECIPE = '@recipes/fastest.txt --use_ema'  # flags of every plan, before --training_flags
ROOT = Path(__file__).parents[2]
SMALLER_MICROBATCHES = 2  # how many divisors below the largest microbatch that fits are tried as well
# Changes of the arithmetic, which the search leaves to the user: for a setting, what leads to each of its values
ARITHMETIC = {
    'allreduce_precision': {'bf16': 'With --allreduce_precision bf16, which rounds the gradients',
                            'fp32': 'With --allreduce_precision fp32, which does not round the gradients'},
    'half_precision_norms': {True: 'With --half_precision_norms, which computes norm layers in half precision',
                             False: 'With --no-half_precision_norms, which computes norm layers in float32'}}


class Phase(NamedTuple):
    """A phase of the training.

    Attributes:
        size: image size in pixels.
        steps: optimizer steps.
        images: number of images to train on, with repeats.
        different_images: number of different images.
    """
    size: int
    steps: int
    images: int
    different_images: int


@dataclass(frozen=True)
class Training:
    """The training to plan.

    Attributes:
        phases: its phases.
        base: setup of a run; the search replaces its device, GPU count, image size and switches.
        fixed: settings that the search leaves as they are, because the user gave them.
        preemptions: None if the machines are not preempted.
        save_batches: steps between two checkpoints.
        dollars_per_tb_month: price of storage.
        dollars_per_tb_read: price of traffic.
    """
    phases: tuple[Phase, ...]
    base: Setup
    fixed: frozenset[str]
    preemptions: Preemptions | None
    save_batches: int
    dollars_per_tb_month: float
    dollars_per_tb_read: float


def base_setup(settings: PlanSettings) -> tuple[Setup, frozenset[str]]:
    """Return the setup that all plans share, and the names of the flags in --training_flags, which no search changes.

    Ends the process with one line if a flag is wrong.
    """
    words = shlex.split(settings.training_flags)
    context = {'program': 'plan.py', 'label': '--training_flags: '}
    parse(Train, '', ['--dry_run', '1', *words], **context)
    given = vars(build_parser(Train, '', 'plan.py').parse_args(words))
    recipe = shlex.split(RECIPE.replace('@', f'@{ROOT}/'))
    for name in ('network_gbits', 'gpus_per_node'):
        if getattr(settings, name) is not None:
            words += [f'--{name}', str(getattr(settings, name))]
    base = setup_of_settings(parse(Train, '', [*recipe, '--dry_run', '1', *words], **context))
    return base, frozenset(given)


def cards_wanted(gpus: Sequence[tuple[int, str]]) -> list[tuple[Card, int]]:
    """Return each GPU model with its count; without any, GPUS of each known GPU."""
    wanted = []
    for count, name in gpus:
        wanted += [(card, count) for card in cards_named((name,))]
    return list(dict.fromkeys(wanted or [(card, GPUS) for card in CARDS.values()]))


def find_plan(card: Card, num_devices: int, training: Training, prices: Sequence[Price], speeds: Speeds
              ) -> Plan | Impossible:
    """Return the fastest plan for some GPUs, or why there is none and what would help.

    The phases do not depend on each other, so each is planned for itself: on encoded latents, or on images.
    """
    base = training.base
    precision = base.with_defaults().precision
    if peak_of(card.name, precision) is None:
        return Impossible(card, num_devices, f'its peak in {precision} is not known, so no speed can be forecast',
                          "--training_flags '--precision amp_fp16', for which more peaks are known")
    if base.batch_size % num_devices:
        largest = base.batch_size // num_devices * num_devices or num_devices
        return Impossible(card, num_devices, f'a batch of {base.batch_size} images is not divisible by {num_devices} '
                          f"GPUs", f"another GPU count, or --training_flags '--batch_size {largest}'")
    machines = replace(base, device=card.name, num_devices=num_devices).machines
    if num_devices % machines:
        return Impossible(card, num_devices, f'{num_devices} GPUs do not divide over {machines} machines',
                          'another GPU count, or --gpus_per_node')
    parts = []
    for phase in training.phases:
        setup = replace(base, device=card.name, num_devices=num_devices, image_size=phase.size)
        ways = []
        too_large = []
        for candidate in candidates(setup, training.fixed):
            try:
                ways += ways_to_train(candidate, card, phase, training, speeds)
            except DoesNotFit as error:
                too_large.append(error)
        if not ways:
            return too_large_for(card, num_devices, phase, training, speeds, too_large)
        parts += min(ways, key=lambda way: sum(part.days.likely for part in way))
    if not all(math.isfinite(part.days.most) for part in parts):
        return Impossible(card, num_devices, 'a preemption may come before the work since the last checkpoint is saved',
                          'a shorter --save_interval, fewer machines, or machines that are preempted less often')
    machine = math.ceil(num_devices / parts[-1].setup.machines)
    return Plan(card, num_devices, tuple(parts), price_for(card, machine, prices), storage_of(parts, training))


def too_large_for(card: Card, num_devices: int, phase: Phase, training: Training, speeds: Speeds,
                  errors: Sequence[DoesNotFit]) -> Impossible:
    """Return that a phase fits on a GPU with no switch, and what would help."""
    error = min(errors, key=lambda error: error.gib_needed)
    images = 'one image takes' if error.microbatch == 1 else f'a microbatch of {error.microbatch} takes'
    remedy = 'a GPU with more memory'
    without_ema = replace(training, base=replace(training.base, use_ema=False))
    if training.base.use_ema and isinstance(find_plan(card, num_devices, without_ema, (), speeds), Plan):
        remedy += ", or --training_flags '--no-use_ema', which trains a model without EMA"
    reason = f'at {phase.size} px {images} {error.gib_needed:.1f} GiB, more than the GPU has'
    return Impossible(card, num_devices, reason, remedy)


def candidates(setup: Setup, fixed: frozenset[str]) -> Iterator[Setup]:
    """Yield the setups that train the same, with each combination of the switches that are not fixed."""
    choices = {'latents': (True, False), 'compile': (setup.compile or True, False),
               'gradient_checkpointing': (False, True)}
    if fixed & {'use_synth_latents', 'use_synth_data'}:
        choices['latents'] = ('use_synth_latents' in fixed,)
    for name in fixed & choices.keys():
        choices[name] = (getattr(setup, name),)
    for values in itertools.product(*choices.values()):
        yield replace(setup, **dict(zip(choices, values, strict=True)))


def ways_to_train(setup: Setup, card: Card, phase: Phase, training: Training, speeds: Speeds) -> list[list[Part]]:
    """Return the parts of a phase with one setup, for the largest microbatch that fits and for some smaller ones.

    Raises DoesNotFit if no microbatch fits.
    """
    largest = speeds.training(setup, card)
    microbatches = [largest.setup.microbatch]
    if setup.microbatch is None:
        smaller = [size for size in divisors(setup.batch_size // setup.num_devices) if size < microbatches[0]]
        microbatches += smaller[::-1][:SMALLER_MICROBATCHES]
    encoding = []
    if setup.latents:  # the images of a phase are encoded once, compiled like the training
        speed = speeds.encoding(setup, card)
        encoding = [Part(ENCODE, phase.different_images, setup, speed, training.preemptions)]
    ways = []
    for microbatch in microbatches:
        run = largest if microbatch == microbatches[0] else speeds.training(replace(setup, microbatch=microbatch), card)
        part = Part(TRAIN, phase.images, run.setup, run.speed, training.preemptions)
        ways.append([*encoding, part])
    return ways


def storage_of(parts: Sequence[Part], training: Training) -> Storage:
    """Return what a training stores and reads: the images of all phases, the latents, and all checkpoints."""
    images = sum(terabytes(phase.different_images, phase.size, JPEG_BYTES_PER_PIXEL) for phase in training.phases)
    latents, read = 0.0, 0.0
    for part in parts:
        is_latents = part.kind == TRAIN and part.setup.latents
        size = part.setup.image_size
        read += terabytes(part.images, size, LATENT_BYTES_PER_PIXEL if is_latents else JPEG_BYTES_PER_PIXEL)
        if part.kind == ENCODE:
            latents += terabytes(part.images, size, LATENT_BYTES_PER_PIXEL)
    steps = sum(phase.steps for phase in training.phases)
    checkpoints = math.ceil(steps / training.save_batches) * CHECKPOINT_TB
    return Storage(images, latents, checkpoints, read, training.dollars_per_tb_month, training.dollars_per_tb_read)


def with_other_arithmetic(plan: Plan, training: Training, speeds: Speeds) -> dict[str, Plan]:
    """Return the best plans for the same GPUs with each single change of the arithmetic, by what makes the change."""
    changed = {}
    for setting, ways in ARITHMETIC.items():
        if setting == 'allreduce_precision' and plan.num_devices == 1:
            continue
        [(value, how)] = [(value, how) for value, how in ways.items()
                          if value != getattr(plan.training[0].setup, setting)]
        base = replace(training.base, **{setting: value})
        other = find_plan(plan.card, plan.num_devices, replace(training, base=base), (), speeds)
        if isinstance(other, Plan):
            changed[how] = other
    return changed
