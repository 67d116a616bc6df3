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
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from settings.flags import Parser, count, positive
from settings.switch_table import SWITCHES, switch_of

ROOT = Path(__file__).parent.parent
SECONDS_FOR_REPORT = 60
SECONDS_TO_END = 30  # for a run that is told to
# Guesses, until a rung of the kind has run: the start, the search for the microbatch, the compiler, and 45 batches.
SECONDS = {'eager': 160, 'compiled': 340, 'autotuned': 900}
PROBE = ('import torch; print(torch.cuda.device_count(), torch.backends.cudnn.version() or 0, '
         'torch.cuda.get_device_name() if torch.cuda.is_available() else "")')

PLAIN = ['--precision', 'amp_bf16', '--encoder_precision', 'bf16', '--channels_last', '--fused_optimizer',
         '--no-compile']
EAGER = [*PLAIN, '--half_precision_norms', '--cudnn_benchmark', '--cast_weights_once']
BEST = [*PLAIN, '--compile', '--half_precision_norms', '--cudnn_benchmark']
ORIGINAL = ['--precision', 'amp_fp16', '--encoder_precision', 'fp32', '--no-channels_last', '--no-fused_optimizer',
            '--no-compile']


@dataclass(frozen=True)
class Rung:
    """One run.

    Attributes:
        expectation: of its speed, written down before.
        switches: flags of benchmark.py.
        microbatch: None: that of the plain rung; 'search': what fits; a number: at most that.
        data: where the images come from.
        ema: whether it keeps an average.
        whole: the batch is one microbatch, as CUDA graphs need it.
    """
    expectation: str
    switches: list[str]
    microbatch: int | str | None = None
    data: str = '--use_synth_data'
    ema: bool = True
    whole: bool = False

    @property
    def kind(self) -> str:
        """What decides how long it takes."""
        if 'max-autotune-no-cudagraphs' in self.switches:
            return 'autotuned'
        return 'compiled' if '--compile' in self.switches else 'eager'


@dataclass(frozen=True)
class Machine:
    """What the rungs run on."""
    gpus: int
    cudnn: int
    device: str


def rungs(machine: Machine) -> list[Rung]:
    """All of them, the most telling first."""
    latents = '--use_synth_latents'
    found = [
        Rung('the defaults, which other rungs are compared with', PLAIN, 'search'),
        Rung('20 to 60 % over the defaults', BEST, 'search'),
        Rung('1.3 to 1.5 times as fast as the same on images, by arithmetic without the VAE', BEST, 'search', latents),
        Rung('most of what the compiler gives, without its minutes', EAGER),
        Rung('the recipe of the published 16 images/s on an A100', ORIGINAL, 4),
    ]
    found += sorted(rungs_of_switches(machine), key=lambda rung: SECONDS[rung.kind])  # what takes long comes later
    bf16 = ['--precision', 'amp_bf16', '--no-channels_last', '--no-compile', '--encoder_precision']
    return found + [
        # what the defaults changed, one after the other, from the recipe of the original
        Rung('within 5 % of the original: both use flash attention', [*ORIGINAL, '--attention', 'xformers'], 4),
        Rung('0 to 1 % over the original: an optimizer step is short beside 32 microbatches',
             [*ORIGINAL, '--fused_optimizer'], 4),
        Rung('the speed of the original', [*bf16, 'fp32'], 4),
        Rung('3 to 8 %: the weights of the encoders are never cast, and their norms are in half precision',
             [*bf16, 'bf16'], 4),
        Rung("the closest to MLPerf's 149.6 images/s on an H200", BEST, 'search', latents, ema=False),
    ]


def rungs_of_switches(machine: Machine) -> list[Rung]:
    """Each switch alone, on the defaults, at each of its values that has an expectation and can run here."""
    found = []
    for switch in SWITCHES:
        for value in switch.values:
            if value.expectation is None:
                continue
            if value.cudnn is not None and machine.cudnn < value.cudnn:
                continue
            if value.several_devices and machine.gpus == 1:
                continue
            needed = switch_of(switch.needs).as_flags(True) if switch.needs else []
            flags = [*PLAIN, *needed, *switch.as_flags(value.value)]
            if switch.flag == 'compile':
                flags.append('--no-compile_blocks')  # on several GPUs, too: blocks have a rung of their own
            found.append(Rung(value.expectation, flags, whole=value.whole_batch is not None))
    return found


def flags_of(rung: Rung, args: argparse.Namespace, machine: Machine, plain_microbatch: int | None) -> list[str]:
    """Its flags of benchmark.py. Where the plain rung has no record, each searches for its own microbatch."""
    microbatch = plain_microbatch
    if isinstance(rung.microbatch, int):
        microbatch = min(rung.microbatch, plain_microbatch or rung.microbatch)
    elif rung.microbatch == 'search':
        microbatch = None
    batch = args.batch
    if rung.whole:
        batch = microbatch = plain_microbatch or 1
    flags = [rung.data, '--batch_size', str(batch * machine.gpus), '--measure_batches', str(args.measure_batches),
             '--warmup_batches', '5', *rung.switches]
    if rung.ema:
        flags.append('--use_ema')
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
    longest = {}  # seconds, of each kind
    plain, *_ = rungs(machine)
    for rung in rungs(machine):
        flags = flags_of(rung, args, machine, microbatch_of(plain, args, machine))
        if tuple(flags) in recorded(args.results, machine):
            continue
        start = time.monotonic()
        if start + longest.get(rung.kind, SECONDS[rung.kind]) > end:
            say(f'no time left for: {shlex.join(flags)}')
            continue
        say(f'{shlex.join(flags)}; expected: {rung.expectation}')
        # a rung that does not fit or build leaves the others to run
        if run([*launcher(machine), *flags, '--results', str(args.results)], end - start) != 0:
            say(f'failed: {shlex.join(flags)}')
        longest[rung.kind] = max(longest.get(rung.kind, 0), time.monotonic() - start)


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
    gpus, cudnn, device = answer.strip('\n').split(' ', 2)
    return Machine(int(gpus), int(cudnn), device)


def main(argv: list[str] | None = None) -> None:
    parser = Parser('ladder.py', __doc__)
    parser.add_argument('results', type=Path, help='file that the records are appended to')
    parser.add_argument('minutes', type=positive, nargs='?', default=float('inf'), help='to end in (default: no limit)')
    parser.add_argument('--batch', type=count, default=128, help='images of a step on each GPU (default: 128)')
    parser.add_argument('--measure_batches', type=count, default=40, help='batches that are measured (default: 40)')
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
