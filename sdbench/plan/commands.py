"""Write the commands that measure a plan and that train it, with the flags of its own setup."""
import re
import shlex
import textwrap
from dataclasses import replace

from sdbench.flags.parser import parse
from sdbench.flags.plan import SD2_SCHEDULE
from sdbench.flags.train import SD2_BASE, Train
from sdbench.plan.parts import ENCODE, Part, Plan, Preemptions
from sdbench.plan.search import INPUT_FLAGS, RECIPE, recipe_flags
from sdbench.records.metrics import WIDTH
from sdbench.setup import FLAGS, Setup, setup_of_settings

MEASURED_STEPS = 100  # of each phase, in the commands that measure a plan
SD2_SIZES = [size for _, size in SD2_SCHEDULE]
# Variables of recipes/stable-diffusion-2.sh with their defaults
DEFAULTS = {'STEPS_1': SD2_SCHEDULE[0][0], 'STEPS_2': SD2_SCHEDULE[1][0], 'LATENTS': '1', 'LAUNCH': 'composer',
            'ENCODE_FLAGS': '--compile', 'PHASE_FLAGS': '@recipes/fastest.txt'}
QUOTED = r''''[^']*'|"[^"]*"'''  # in a shell command


def flags_of(setup: Setup) -> list[str]:
    """Return the flags that a training with this setup needs besides RECIPE, its launcher, input and image size."""
    recipe = setup_of_settings(parse(Train, '', recipe_flags()))
    skipped = ['device', 'num_devices', 'gpus_per_node', 'image_size', 'latents']
    if not setup.needs_network:
        skipped.append('network_gbits')
    words = []
    for name, flag in FLAGS.items():
        value = getattr(setup, name)
        if name in skipped or value == getattr(recipe, name):
            continue
        if isinstance(value, bool):
            words.append(f'--{flag}' if value else f'--no-{flag}')
        else:
            words.append(f'--{flag} {f"{value:g}" if isinstance(value, float) else shlex.quote(str(value))}')
    return words


def switches(part: Part) -> list[str]:
    """Return the flags of a part that trains besides RECIPE and its image size."""
    return [f'--{INPUT_FLAGS[part.setup.latents]}', *flags_of(part.setup)]


def encoding_flags(setup: Setup) -> list[str]:
    """Return the flags with which encode.py encodes as a plan assumes it, besides the model, input and image size."""
    flags = []
    precision = setup.with_defaults().encoder_precision  # by default, that of the training
    if precision != 'bf16':  # the default of encode.py, on GPUs that support it
        flags.append(f'--encoder_precision {precision}')
    if setup.compile:
        flags.append('--compile' if setup.compile is True else f'--compile {setup.compile}')
    return flags


def launcher(plan: Plan) -> str:
    """Return the command that starts a program on all GPUs of a plan."""
    each = plan.num_devices // plan.machines
    if plan.machines > 1:
        return (f'composer -n {each} --world_size {plan.num_devices} --node_rank $N --base_rank $(({each} * N)) '
                '--master_addr $HOST --master_port 29500')
    return 'composer' if each == plan.card.gpus_per_node else f'composer -n {each}'


def measuring_command(plan: Plan, part: Part) -> str:
    """Return the command that measures a part of a plan: a training on all of its machines, an encoding on one."""
    size = f'--image_size {part.setup.image_size}'
    if part.kind == ENCODE:
        model = [flag for flag in flags_of(part.setup) if flag.startswith('--model_name')]
        return ' '.join([f'python encode.py --remote IMAGES --out trial-latents-{part.setup.image_size} {size}', *model,
                         *encoding_flags(part.setup)])
    return ' '.join([launcher(plan), 'benchmark.py', RECIPE, *switches(part), size,
                     f'--measure_batches {MEASURED_STEPS}'])


def training_command(plan: Plan) -> str | None:
    """Return the command that trains a plan from the images in the folder photos; None if the recipe cannot train it.

    The recipe is for one machine, and has two phases with the same flags.
    """
    first = plan.training[0]
    setup = replace(first.setup, model_name=SD2_BASE)  # the recipe gives each command its model
    are_alike = all(replace(part.setup, image_size=setup.image_size, model_name=SD2_BASE) == setup
                    for part in plan.training)
    if plan.machines > 1 or not are_alike or [part.setup.image_size for part in plan.training] != SD2_SIZES:
        return None

    # Name each variable of the recipe whose default is not what the plan assumes.
    flags = flags_of(setup)
    if first.preemptions.batches != Preemptions.batches:
        flags.append(f'--save_interval {first.preemptions.batches}ba')
    given = {f'STEPS_{number}': part.steps for number, part in enumerate(plan.training, start=1)}
    given |= {'LATENTS': '1' if setup.latents else '', 'LAUNCH': launcher(plan),
              'ENCODE_FLAGS': ' '.join(encoding_flags(setup)),
              'PHASE_FLAGS': ' '.join(['@recipes/fastest.txt', *flags])}
    variables = [f'{name}={shlex.quote(str(value)) if value else ""}' for name, value in given.items()
                 if value != DEFAULTS[name] and (setup.latents or name != 'ENCODE_FLAGS')]
    name = first.setup.model_name
    model = 'FOLDER' if name == SD2_BASE else shlex.quote(name)
    return ' '.join([*variables, f'MODEL={model} SOURCE=photos sh recipes/stable-diffusion-2.sh'])


def shell_lines(command: str) -> str:
    """Return a shell command in lines of at most WIDTH characters, none of which ends between quotes."""
    whole = re.sub(QUOTED, lambda quoted: quoted[0].replace(' ', '\0'), command)
    lines = textwrap.wrap(whole, WIDTH - 2, initial_indent=4 * ' ', subsequent_indent=8 * ' ', break_on_hyphens=False,
                          break_long_words=False)
    return ' \\\n'.join(lines).replace('\0', ' ')
