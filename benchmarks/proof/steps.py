"""The machine that a proof measures, and the steps of the proof for it."""
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from sdbench.flags.train import SD2_BASE

ROOT = Path(__file__).parents[2]
IMAGES_PER_GPU = 64  # batch size of the two recipes
ORIGINAL_GIB = 30    # memory of the smallest GPU that runs both recipes unchanged: a microbatch of 4 takes 24 GiB
# Several GPUs with 24 GB have room for a microbatch of 1, and no room for the EMA weights.
SMALLEST = ['--device_train_microbatch_size', '1', '--no-use_ema']
TINY = ['--model_name', 'tiny', '--image_size', '64']
CHECK = ('-m', 'benchmarks.proof.checks')
# This runs in another process, because a process that has asked CUDA for its devices holds GPU memory.
PROBE = """
import json, torch
gpus = torch.cuda.device_count()
properties = torch.cuda.get_device_properties(0) if gpus else None
print(json.dumps([gpus, properties.name if gpus else 'CPU', properties.total_memory / 2 ** 30 if gpus else 0]))
"""
# Switches that are each compared with the defaults
SWITCHES = ('--channels_last', '--half_precision_norms', '--compile --no-compile_blocks', '--compile --compile_blocks',
            '--attention cudnn', '--attention xformers', '--cudnn_benchmark', '--encoder_precision fp32',
            '--no-fused_optimizer')


class Machine(NamedTuple):
    """The machine that is measured."""
    gpus: int  # 0 on a CPU, which trains the tiny model instead of Stable Diffusion 2
    device: str  # name of the first GPU, or CPU
    gib: float  # memory of the first GPU

    def batch_flags(self, images_per_gpu: int) -> list[str]:
        """Return the flags for a batch with this many images per GPU, or with 4 of the tiny model on a CPU."""
        if self.gpus == 0:
            return [*TINY, '--batch_size', '4']
        return ['--batch_size', str(images_per_gpu * self.gpus)]


def find_machine() -> Machine:
    answer = subprocess.run([sys.executable, '-c', PROBE], check=True, capture_output=True, text=True).stdout
    return Machine(*json.loads(answer.splitlines()[-1]))


def launch(gpus: int, *program: str) -> list[str]:
    """Return the command that runs a script of this repository on this many GPUs.

    A single device needs no launcher, whose start would import every library a second time.
    """
    launcher = ['-m', 'composer.cli.launcher', '-n', str(gpus)] if gpus > 1 else []
    return [sys.executable, *launcher, *program]


class Step(NamedTuple):
    """A command with the line that its output must show."""
    program: tuple[str, ...]  # a script of this repository, or `-m` and a module, and its flags
    shows: str  # regular expression that a line of its output must match; the result quotes the last such line
    fails: bool = False  # whether the command must end with an error instead of exit status 0

    @property
    def is_measurement(self) -> bool:
        """Tell whether the step measures a training, whose record belongs into the results."""
        return self.program[0] == 'benchmark.py' and not self.fails


def measuring(*flags: str) -> Step:
    """Return a step that measures a training on synthetic data, with EMA unless the flags turn it off."""
    data = () if '--use_synth_latents' in flags else ('--use_synth_data',)
    return Step(('benchmark.py', *data, '--use_ema', *flags), r'^images/s ')


def refusing(reason: str, *flags: str) -> Step:
    """Return a step whose training must end with one line that says the reason."""
    program = ('benchmark.py', '--use_synth_data', *flags, '--results', os.devnull)
    return Step(program, f'^benchmark.py: error: .*{reason}', fails=True)


def first_steps(machine: Machine) -> dict[str, Step]:
    """Return the steps that always run: the two recipes, or on a CPU a measurement of the tiny model."""
    flags = machine.batch_flags(IMAGES_PER_GPU)
    if machine.gpus == 0:
        return {'tiny model': measuring(*flags)}
    if machine.gib < ORIGINAL_GIB:
        flags += SMALLEST
    return {name: measuring(f'@recipes/{name}.txt', *flags) for name in ('original', 'fastest')}


def all_steps(machine: Machine, results: str) -> dict[str, Step]:
    """Return the steps of a proof by name, the most informative ones first. `results` is the file for records."""
    steps = first_steps(machine)
    steps['machine'] = Step((*CHECK, 'machine'), 'TFLOP/s')

    # Checks. Most train the tiny model, because they are about the program and not about its size.
    tiny = [*TINY, '--batch_size', str(4 * max(1, machine.gpus))]
    steps['exactness'] = Step(('-m', 'benchmarks.proof.exactness'), '^differences from float32')
    steps['resume'] = Step((*CHECK, 'resume', *tiny), '^resumed after')
    steps['NaN'] = refusing('not finite', *tiny, '--learning_rate', '1e38')
    if machine.gpus:
        too_large = ['--batch_size', str(512 * machine.gpus), '--device_train_microbatch_size', '512']
        steps['out of memory'] = refusing('out of memory', *too_large, '--use_ema')
    microbatch = '4' if machine.gib < ORIGINAL_GIB else '16'
    steps['loader'] = Step((*CHECK, 'loader', '--results', results, *machine.batch_flags(32),
                            '--device_train_microbatch_size', microbatch), '^loader alone')
    ema_update = ('-m', 'benchmarks.ema_update', SD2_BASE if machine.gpus else 'tiny')
    steps['EMA update'] = Step(ema_update, r'^update ratio [1-9]')  # faster than Composer's update

    # Speeds
    if machine.gpus:
        return steps | speed_steps(machine)
    flags = machine.batch_flags(4)
    steps['latents'] = measuring(*flags, '--use_synth_latents')
    steps['microbatch of 2'] = measuring(*flags, '--device_train_microbatch_size', '2')
    return steps


def speed_steps(machine: Machine) -> dict[str, Step]:
    """Return the steps that measure both recipes at each microbatch, and each speed switch alone at one microbatch."""
    sizes, small = [4, 8, 16, 32], []
    common = 8 if machine.gib < 60 else 16  # the microbatch for comparing switches
    if machine.gib < ORIGINAL_GIB:
        sizes, common, small = [1, 2], 1, ['--no-use_ema']

    # Both recipes at each microbatch, the fastest without its compiler, which takes minutes for each microbatch
    flags = [*machine.batch_flags(32), *small, '--device_train_microbatch_size']
    large_batch = [*machine.batch_flags(128), *small, '--device_train_microbatch_size', 'auto']
    eager = ['@recipes/fastest.txt', '--no-compile']
    steps = {'eager, largest': measuring(*eager, *large_batch),
             'latents, eager, largest': measuring(*eager, *large_batch, '--use_synth_latents')}
    for size in sizes:
        steps[f'eager, {size}'] = measuring(*eager, *flags, str(size))
    for size in sizes[1:]:
        steps[f'original, {size}'] = measuring('@recipes/original.txt', *flags, str(size))
    steps['original, largest'] = measuring('@recipes/original.txt', *large_batch)

    # Each switch alone
    several = ['--allreduce_precision bf16'] if machine.gpus > 1 else []
    for switch in ('', *SWITCHES, *several):
        steps[f'defaults {switch}'.strip()] = measuring(*flags, str(common), *switch.split())
    return steps
