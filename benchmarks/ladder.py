"""The ladder on the GPUs of this machine: what each switch of speed gives, all into one file of records.

    python benchmarks/ladder.py results/ladder.jsonl        # all rungs
    python benchmarks/ladder.py results/ladder.jsonl 10     # what fits into 10 minutes; the same command goes on later

Stable Diffusion 2 base at 512 pixels with EMA and synthetic data: the defaults, the best switches together, the same on
latents, the best without the compiler, the original's recipe, and then each switch alone on the defaults. A rung whose
record is in the file is not run again. The microbatch of the defaults is what the program finds by its own search;
other rungs take the same, so that a switch is compared at one size, and the best ones search for their own.

A rung is measured for 40 batches of 128 images a GPU: where a GPU makes 40 images/s that is two minutes, and less is
too short, since clocks drop as the card warms. What is expected of each was written down before any was measured.
"""
import argparse
import json
import math
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS_FOR_REPORT = 60
SECONDS_TO_END = 30  # for a run that is told to
PROBE = ('import torch; print(torch.cuda.device_count(), '
         'torch.cuda.get_device_name() if torch.cuda.is_available() else "")')

IMAGES = ['--use_synth_data', '--use_ema']
LATENTS = ['--use_synth_latents', '--use_ema']
PLAIN = ['--precision', 'amp_bf16', '--encoder_precision', 'bf16', '--channels_last', '--fused_optimizer',
         '--no-compile']
EAGER = [*PLAIN, '--half_precision_norms', '--cudnn_benchmark', '--cast_weights_once']
BEST = [*PLAIN, '--compile', '--half_precision_norms', '--cudnn_benchmark']
ORIGINAL = ['--precision', 'amp_fp16', '--encoder_precision', 'fp32', '--no-channels_last', '--no-fused_optimizer',
            '--no-compile']
BF16 = ['--precision', 'amp_bf16', '--no-channels_last', '--no-compile', '--encoder_precision']


@dataclass(frozen=True)
class Rung:
    """One run.

    Attributes:
        expectation: of its speed, written down before it was measured.
        flags: of benchmark.py, beside those of the batch.
        microbatch: None: that of the first rung; 'search': what fits; 'batch': the batch is one microbatch; a number:
            at most that.
    """
    expectation: str
    flags: list[str]
    microbatch: int | str | None = None

    @property
    def seconds(self) -> int:
        """A guess: the start, the search for the microbatch, the compiler, and 45 batches."""
        if 'max-autotune-no-cudagraphs' in self.flags:
            return 900
        return 340 if '--compile' in self.flags else 160


# The most telling first; then each switch alone on the defaults, those that take long at the end; then what the
# defaults changed, one after the other, from the recipe of the original.
RUNGS = [
    Rung('the defaults, which other rungs are compared with', [*IMAGES, *PLAIN], 'search'),
    Rung('20 to 60 % over the defaults', [*IMAGES, *BEST], 'search'),
    Rung('1.3 to 1.5 times as fast as the same on images, by arithmetic without the VAE', [*LATENTS, *BEST], 'search'),
    Rung('most of what the compiler gives, without its minutes', [*IMAGES, *EAGER]),
    Rung('the recipe of the published 16 images/s on an A100', [*IMAGES, *ORIGINAL], 4),
    Rung('-10 to +10 %: the group norm of torch 2.7 answers in channels first on a GPU, and the next convolution '
         'copies back: 4,918 launches for a microbatch with channels_last, 4,651 without',
         [*IMAGES, *PLAIN, '--no-channels_last']),
    Rung('2 to 5 %', [*IMAGES, *PLAIN, '--attention', 'cudnn']),
    Rung('the same as the defaults on an A100, where flash comes first', [*IMAGES, *PLAIN, '--attention', 'flash']),
    Rung('2 to 5 %, where FlashAttention 3 is built', [*IMAGES, *PLAIN, '--attention', 'xformers']),
    Rung('5 to 15 %, and a quarter less memory for activations', [*IMAGES, *PLAIN, '--half_precision_norms']),
    Rung('1 to 4 % at a microbatch of 4: 5 GB less to read and write for each',
         [*IMAGES, *PLAIN, '--cast_weights_once']),
    Rung('1 to 5 %', [*IMAGES, *PLAIN, '--cudnn_benchmark']),
    Rung('0 to 1 % within a node; 2 to 4 % at 128 GPUs', [*IMAGES, *PLAIN, '--allreduce_precision', 'bf16']),
    Rung('15 to 30 %: NVIDIA saw 6 % of inductor after 23 % of channels_last',
         [*IMAGES, *PLAIN, '--compile', '--no-compile_blocks']),
    Rung('the speed of --compile within 5 %, with a start several times as short',
         [*IMAGES, *PLAIN, '--compile', '--compile_blocks']),
    Rung('0 to 2 % over --compile; it may not run',
         [*IMAGES, *PLAIN, '--compile', 'reduce-overhead', '--no-compile_blocks'], 'batch'),
    Rung('0 to 5 % over --compile',
         [*IMAGES, *PLAIN, '--compile', 'max-autotune-no-cudagraphs', '--no-compile_blocks']),
    Rung('within 5 % of the original: both use flash attention', [*IMAGES, *ORIGINAL, '--attention', 'xformers'], 4),
    Rung('0 to 1 % over the original: an optimizer step is short beside 32 microbatches',
         [*IMAGES, *ORIGINAL, '--fused_optimizer'], 4),
    Rung('the speed of the original', [*IMAGES, *BF16, 'fp32'], 4),
    Rung('3 to 8 %: the weights of the encoders are never cast, and their norms are in half precision',
         [*IMAGES, *BF16, 'bf16'], 4),
    Rung("the closest to MLPerf's 149.6 images/s on an H200", ['--use_synth_latents', *BEST], 'search'),
]


@dataclass(frozen=True)
class Machine:
    """What the rungs run on."""
    gpus: int
    device: str


def rungs(machine: Machine) -> list[Rung]:
    """Those that do something here."""
    return [rung for rung in RUNGS if machine.gpus > 1 or '--allreduce_precision' not in rung.flags]


def flags_of(rung: Rung, args: argparse.Namespace, machine: Machine, plain_microbatch: int | None) -> list[str]:
    """Its flags of benchmark.py. Where the plain rung has no record, each searches for its own microbatch."""
    batch = args.batch
    microbatch = plain_microbatch
    if rung.microbatch == 'search':
        microbatch = None
    elif rung.microbatch == 'batch':
        batch = microbatch = plain_microbatch or 1
    elif rung.microbatch is not None:
        microbatch = min(rung.microbatch, plain_microbatch or rung.microbatch)
    flags = [*rung.flags, '--batch_size', str(batch * machine.gpus), '--measure_batches', str(args.measure_batches),
             '--warmup_batches', '5']
    if microbatch:
        flags += ['--device_train_microbatch_size', str(microbatch)]
    return flags


def recorded(path: Path, machine: Machine) -> dict[tuple[str, ...], dict]:
    """The records of earlier rungs on such a machine by their flags; those that were interrupted are left out."""
    found = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        record = json.loads(line)
        is_ours = (record.get('num_devices'), record.get('device')) == (machine.gpus, machine.device)
        if is_ours and 'command' in record and record.get('status') != 'interrupted':
            flags = shlex.split(record['command'])[1:]
            if '--results' in flags:
                position = flags.index('--results')
                del flags[position:position + 2]
            found[tuple(flags)] = record
    return found


def microbatch_of(rung: Rung, args: argparse.Namespace, machine: Machine) -> int | None:
    """What the search of a rung found, which is in its record; None without one."""
    record = recorded(args.results, machine).get(tuple(flags_of(rung, args, machine, None)), {})
    size = record.get('device_train_microbatch_size')
    return size if isinstance(size, int) else None


def climb(args: argparse.Namespace, machine: Machine) -> None:
    """Run the rungs that have no record, as far as each is expected to end in time."""
    end = time.monotonic() + args.minutes * 60 - SECONDS_FOR_REPORT
    plain, *_ = rungs(machine)
    for rung in rungs(machine):
        flags = flags_of(rung, args, machine, microbatch_of(plain, args, machine))
        if tuple(flags) in recorded(args.results, machine):
            continue
        if time.monotonic() + rung.seconds > end:
            say(f'no time left for: {shlex.join(flags)}')
            continue
        say(f'{shlex.join(flags)}; expected: {rung.expectation}')
        # a rung that does not fit or build leaves the others to run
        if run([*launcher(machine), *flags, '--results', str(args.results)], end - time.monotonic()) != 0:
            say(f'failed: {shlex.join(flags)}')


def launcher(machine: Machine) -> list[str]:
    """How benchmark.py starts: one GPU needs no launcher, and Composer's may be installed without its command."""
    program = str(ROOT / 'benchmark.py')
    if machine.gpus == 1:
        return [sys.executable, program]
    return [sys.executable, '-m', 'composer.cli.launcher', '-n', str(machine.gpus), program]


def run(command: list[str], seconds: float) -> int:
    """Its exit status; after so many seconds it is told to end, and a while later it has to."""
    process = subprocess.Popen(command)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def say(text: str) -> None:
    print(f'ladder.py: {text}', file=sys.stderr)


def this_machine() -> Machine:
    """Asked for in a process of its own, since one that has asked holds memory of the GPU."""
    answer = subprocess.run([sys.executable, '-c', PROBE], check=True, capture_output=True, text=True).stdout
    gpus, device = answer.strip('\n').split(' ', 1)
    return Machine(int(gpus), device)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser('ladder.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('results', type=Path, help='file that the records are appended to')
    parser.add_argument('minutes', type=float, nargs='?', default=math.inf, help='to end in (default: no limit)')
    parser.add_argument('--batch', type=int, default=128, help='images of a step on each GPU (default: 128)')
    parser.add_argument('--measure_batches', type=int, default=40, help='batches that are measured (default: 40)')
    args = parser.parse_args(argv)
    machine = this_machine()
    if not machine.gpus:
        parser.error('this machine has no GPU; make smoke measures a tiny model on its CPU')
    args.results.parent.mkdir(parents=True, exist_ok=True)
    climb(args, machine)
    if args.results.exists():
        run([sys.executable, str(ROOT / 'report.py'), str(args.results), '--compare', '--figure',
             str(args.results.with_suffix('.png'))], SECONDS_FOR_REPORT)


if __name__ == '__main__':
    main()
