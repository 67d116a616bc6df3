"""Find the fastest way to train on some GPUs that leaves the training result as it is. Nothing here needs torch."""
import itertools
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from sdbench.errors import UserError
from sdbench.flags.parser import build_parser, parse
from sdbench.flags.plan import GPUS, PlanSettings
from sdbench.flags.train import Train, divisible_batch_size
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
from sdbench.setup import FLAGS, Setup, setup_of_settings

RECIPE = '@recipes/fastest.txt --use_ema'  # flags of every plan, before --training_flags
ROOT = Path(__file__).parents[2]
INPUT_FLAGS = {True: 'use_synth_latents', False: 'use_synth_data'}  # by Setup.latents
# Changes of the arithmetic, which the search leaves to the user: flags with their values, and what they do
ARITHMETIC = {
    '--allreduce_precision bf16, which rounds the gradients': {'allreduce_precision': 'bf16'},
    '--half_precision_norms, which computes norm layers in half precision': {'half_precision_norms': True},
    '--no-half_precision_norms, which computes norm layers in float32': {'half_precision_norms': False}}
# Flags with which a training may be possible on other GPUs
REMEDIES = {"--training_flags='--precision amp_fp16'": {'precision': 'amp_fp16'},
            "--training_flags='--no-use_ema', which plans a model without EMA on all GPUs": {'use_ema': False},
            'no --device_train_microbatch_size, which then is the largest that fits': {'microbatch': None}}


class Phase(NamedTuple):
    """A phase of the training."""
    size: int  # of the images in pixels
    steps: int
    images: int  # to train on, with repeats
    different_images: int


@dataclass(frozen=True)
class Training:
    """The training to plan."""
    phases: tuple[Phase, ...]
    base: Setup  # of a run; the search replaces its device, GPU count, image size and switches
    fixed: frozenset[str]  # settings that the search leaves as they are, because the user gave them
    preemptions: Preemptions
    dollars_per_tb_month: float
    dollars_per_tb_read: float


def base_setup(settings: PlanSettings) -> tuple[Setup, frozenset[str]]:
    """Return the setup that all plans share, and the names of the flags in --training_flags, which no search changes.

    Raises UserError for a flag that does not change a step.
    """
    words = [*settings.training_flags]
    given = vars(build_parser(Train, '', 'plan.py').parse_args(words))
    for name in given:
        if name == 'image_size' or name not in (*FLAGS.values(), *INPUT_FLAGS.values()):
            remedy = 'give image sizes in --schedule' if name == 'image_size' else 'leave it out'
            raise UserError(f'--training_flags: --{name} has no effect on a plan; {remedy}')
    for name in ('network_gbits', 'gpus_per_node'):
        if getattr(settings, name) is not None:
            words += [f'--{name}', str(getattr(settings, name))]
    return setup_of_settings(parse(Train, '', [*recipe_flags(), *words], 'plan.py')), frozenset(given)


def recipe_flags() -> list[str]:
    return [*shlex.split(RECIPE.replace('@', f'@{ROOT}/')), '--dry_run', '1']


def cards_wanted(gpus: Sequence[tuple[int, str]]) -> list[tuple[Card, int]]:
    """Return each GPU model with its count; without any, GPUS of each known GPU."""
    wanted = [(card, count) for count, name in gpus for card in cards_named([name])]
    return list(dict.fromkeys(wanted or [(card, GPUS) for card in CARDS.values()]))


def find_plan(card: Card, num_devices: int, training: Training, prices: Sequence[Price], speeds: Speeds
              ) -> Plan | Impossible:
    """Return the fastest plan for some GPUs, or why there is none and what would help."""
    found = fastest_plan(card, num_devices, training, prices, speeds)
    if isinstance(found, Impossible):
        for how, values in REMEDIES.items():
            changed = replace(training, base=replace(training.base, **values))
            if isinstance(fastest_plan(card, num_devices, changed, (), speeds), Plan):
                found = replace(found, remedy=f'{found.remedy}, or {how}')
    return found


def fastest_plan(card: Card, num_devices: int, training: Training, prices: Sequence[Price], speeds: Speeds
                 ) -> Plan | Impossible:
    """Return the fastest plan for some GPUs with the flags that the training fixes, or why there is none.

    The phases do not depend on each other, so each is planned for itself: on encoded latents, or on images.
    """
    base = replace(training.base, device=card.name, num_devices=num_devices)
    precision = base.with_defaults().precision
    if peak_of(card.name, precision) is None:
        return Impossible(card, num_devices, f'its peak in {precision} is not known, so no speed can be forecast',
                          'another GPU')
    if base.batch_size % num_devices:
        divisible = divisible_batch_size(base.batch_size, num_devices, base.microbatch)
        return Impossible(card, num_devices, f'a batch of {base.batch_size} images is not divisible by {num_devices} '
                          f"GPUs", f"another GPU count, or --training_flags='--batch_size {divisible}'")
    if num_devices % base.machines:
        return Impossible(card, num_devices, f'{num_devices} GPUs do not divide over {base.machines} machines',
                          'another GPU count, or --gpus_per_node')
    parts = []
    for phase in training.phases:
        ways = []
        too_large = []
        for setup in candidates(replace(base, image_size=phase.size), training.fixed):
            try:
                ways.append(parts_of(setup, card, phase, training, speeds))
            except DoesNotFit as error:
                too_large.append(error)
        if not ways:
            least = min(too_large, key=lambda error: error.gib_needed)
            images = 'one image takes' if least.microbatch == 1 else f'a microbatch of {least.microbatch} takes'
            reason = f'at {phase.size} px {images} {least.gib_needed:.1f} GiB, and the GPU has {card.gib:g}'
            return Impossible(card, num_devices, reason, 'a GPU with more memory')
        parts += min(ways, key=lambda way: sum(part.days.likely for part in way))
    if not all(math.isfinite(part.days.most) for part in parts):
        return Impossible(card, num_devices, 'a preemption may come before the work since the last checkpoint is saved',
                          'a shorter --save_interval, fewer machines, or machines that are preempted less often')
    return Plan(card, num_devices, tuple(parts), price_for(base, prices), storage_of(parts, training))


def candidates(setup: Setup, fixed: frozenset[str]) -> Iterator[Setup]:
    """Yield the setups that train the same, with each combination of the switches that are not fixed.

    On several GPUs, compiled blocks are the default, and a UNet that is compiled whole is at most about 1 % faster.
    """
    choices = {'latents': (True, False), 'compile': (setup.compile or True, False),
               'compile_blocks': (None, True) if setup.num_devices == 1 else (None,),
               'gradient_checkpointing': (False, True)}
    if fixed & {*INPUT_FLAGS.values()}:
        choices['latents'] = (INPUT_FLAGS[True] in fixed,)
    for name in fixed & choices.keys():
        choices[name] = (getattr(setup, name),)
    for values in itertools.product(*choices.values()):
        candidate = replace(setup, **dict(zip(choices, values, strict=True)))
        if candidate.compile not in (False, 'reduce-overhead') or not candidate.compile_blocks:
            yield candidate


def parts_of(setup: Setup, card: Card, phase: Phase, training: Training, speeds: Speeds) -> list[Part]:
    """Return the parts of a phase. The images for latents are encoded once, compiled like the training.

    Raises DoesNotFit if no microbatch fits.
    """
    parts = [Part(TRAIN, phase.images, setup, speeds.of(TRAIN, setup, card), training.preemptions)]
    if setup.latents:
        parts.insert(0, Part(ENCODE, phase.different_images, setup, speeds.of(ENCODE, setup, card),
                             training.preemptions))
    return parts


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
    checkpoints = math.ceil(steps / training.preemptions.batches) * CHECKPOINT_TB
    return Storage(images, latents, checkpoints, read, training.dollars_per_tb_month, training.dollars_per_tb_read)


def with_other_arithmetic(plan: Plan, training: Training, speeds: Speeds) -> dict[str, Plan]:
    """Return the fastest plans for the same GPUs with each single change of the arithmetic, by what changes it."""
    changed = {}
    for how, values in ARITHMETIC.items():
        base = replace(training.base, **values)
        if base == training.base or plan.num_devices == 1 and 'allreduce_precision' in values:
            continue
        other = fastest_plan(plan.card, plan.num_devices, replace(training, base=base), (), speeds)
        if isinstance(other, Plan):
            changed[how] = replace(other, price=plan.price)
    return changed
