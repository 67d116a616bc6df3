"""What each switch of speed gives on the GPUs of this machine, all into one file of records.

    python benchmarks/ladder.py results/ladder.jsonl

Stable Diffusion 2 base at 512 pixels with EMA and synthetic data: the defaults, the best switches together, the same on
latents, the best without the compiler, the original's recipe, and then each switch alone on the defaults. A run whose
record is in the file is not repeated, so that the same command goes on where it was stopped. The microbatch of the
defaults is what the program finds by its own search; most other runs take the same, so that a switch is compared at one
size, and the best ones search for their own.

A run measures 40 batches of 128 images a GPU: where a GPU makes 40 images/s that is two minutes, and less is too short,
since clocks drop as the card warms. What is expected of each was written down before any was measured.
"""
import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROBE = ('import torch; print(torch.cuda.device_count(), '
         'torch.cuda.get_device_name() if torch.cuda.is_available() else "")')

IMAGES = ['--use_synth_data', '--use_ema']
MOMENTS = ['--use_synth_latents', '--use_ema']
PLAIN = ['--precision', 'amp_bf16', '--encoder_precision', 'bf16', '--channels_last', '--fused_optimizer',
         '--no-compile']
EAGER = [*PLAIN, '--half_precision_norms', '--cudnn_benchmark']
BEST = [*PLAIN, '--compile', '--half_precision_norms', '--cudnn_benchmark']
ORIGINAL = ['--precision', 'amp_fp16', '--encoder_precision', 'fp32', '--no-channels_last', '--no-fused_optimizer',
            '--no-compile']
BF16 = ['--precision', 'amp_bf16', '--no-channels_last', '--no-compile', '--encoder_precision']


@dataclass(frozen=True)
class Run:
    """One run of the ladder.

    Attributes:
        expectation: of its speed, written down before it was measured.
        flags: of benchmark.py, beside those of the batch.
        microbatch: None: that of the first run; 'search': what fits; 'batch': the batch is one microbatch; a number:
            at most that.
    """
    expectation: str
    flags: list[str]
    microbatch: int | str | None = None


# The most telling first; then each switch alone on the defaults, those that take long at the end; then what the
# defaults changed, one after the other, from the recipe of the original.
RUNS = [
    Run('the defaults, which the others are compared with', [*IMAGES, *PLAIN], 'search'),
    Run('20 to 60 % over the defaults', [*IMAGES, *BEST], 'search'),
    Run('1.3 to 1.5 times as fast as the same on images, by arithmetic without the VAE', [*MOMENTS, *BEST], 'search'),
    Run('most of what the compiler gives, without its minutes', [*IMAGES, *EAGER]),
    Run('the recipe of the published 16 images/s on an A100', [*IMAGES, *ORIGINAL], 4),
    Run('-10 to +10 %: the group norm of torch 2.7 answers in channels first on a GPU, and the next convolution '
        'copies back: 4,918 launches for a microbatch with channels_last, 4,651 without',
        [*IMAGES, *PLAIN, '--no-channels_last']),
    Run('2 to 5 %', [*IMAGES, *PLAIN, '--attention', 'cudnn']),
    Run('the same as the defaults on an A100, where flash comes first', [*IMAGES, *PLAIN, '--attention', 'flash']),
    Run('2 to 5 %, where FlashAttention 3 is built', [*IMAGES, *PLAIN, '--attention', 'xformers']),
    Run('5 to 15 %, and a quarter less memory for activations', [*IMAGES, *PLAIN, '--half_precision_norms']),
    Run('1 to 5 %', [*IMAGES, *PLAIN, '--cudnn_benchmark']),
    Run('0 to 1 % within a node; 2 to 4 % at 128 GPUs', [*IMAGES, *PLAIN, '--allreduce_precision', 'bf16']),
    Run('15 to 30 %: NVIDIA saw 6 % of inductor after 23 % of channels_last',
        [*IMAGES, *PLAIN, '--compile', '--no-compile_blocks']),
    Run('the speed of --compile within 5 %, with a start several times as short',
        [*IMAGES, *PLAIN, '--compile', '--compile_blocks']),
    Run('0 to 2 % over --compile; it may not run',
        [*IMAGES, *PLAIN, '--compile', 'reduce-overhead', '--no-compile_blocks'], 'batch'),
    Run('0 to 5 % over --compile',
        [*IMAGES, *PLAIN, '--compile', 'max-autotune-no-cudagraphs', '--no-compile_blocks']),
    Run('within 5 % of the original: both use flash attention', [*IMAGES, *ORIGINAL, '--attention', 'xformers'], 4),
    Run('0 to 1 % over the original: an optimizer step is short beside 32 microbatches',
        [*IMAGES, *ORIGINAL, '--fused_optimizer'], 4),
    Run('the speed of the original', [*IMAGES, *BF16, 'fp32'], 4),
    Run('3 to 8 %: the weights of the encoders are never cast, and their norms are in half precision',
        [*IMAGES, *BF16, 'bf16'], 4),
    Run("the closest to MLPerf's 149.6 images/s on an H200", ['--use_synth_latents', *BEST], 'search'),
]


@dataclass(frozen=True)
class Ladder:
    """Where and how the runs are measured.

    Attributes:
        results: file of the records.
        gpus: of this machine.
        device: their name.
        batch: images of a step on each GPU.
        measure_batches: of each run.
    """
    results: Path
    gpus: int
    device: str
    batch: int = 128
    measure_batches: int = 40

    def climb(self) -> None:
        """Make the runs that have no record. One that does not fit or build leaves the others to run."""
        for run in RUNS:
            if self.gpus == 1 and '--allreduce_precision' in run.flags:
                continue
            flags = self.flags_of(run, self.plain_microbatch())
            if tuple(flags) in self.recorded():
                continue
            say(f'{shlex.join(flags)}; expected: {run.expectation}')
            if subprocess.run([*self.launcher(), *flags, '--results', str(self.results)]).returncode:
                say(f'failed: {shlex.join(flags)}')

    def flags_of(self, run: Run, plain_microbatch: int | None) -> list[str]:
        """Its flags of benchmark.py. Where the first run has no record, each searches for its own microbatch."""
        batch = self.batch
        microbatch = plain_microbatch
        if run.microbatch == 'search':
            microbatch = None
        elif run.microbatch == 'batch':
            batch = microbatch = plain_microbatch or 1
        elif run.microbatch is not None:
            microbatch = min(run.microbatch, plain_microbatch or run.microbatch)
        flags = [*run.flags, '--batch_size', str(batch * self.gpus), '--measure_batches', str(self.measure_batches),
                 '--warmup_batches', '5']
        if microbatch:
            flags += ['--device_train_microbatch_size', str(microbatch)]
        return flags

    def plain_microbatch(self) -> int | None:
        """What the search of the first run found, which is in its record; None without one."""
        record = self.recorded().get(tuple(self.flags_of(RUNS[0], None)), {})
        size = record.get('device_train_microbatch_size')
        return size if isinstance(size, int) else None

    def recorded(self) -> dict[tuple[str, ...], dict]:
        """The records of earlier runs on such a machine by their flags; those that were interrupted are left out."""
        found = {}
        lines = self.results.read_text().splitlines() if self.results.exists() else []
        for line in lines:
            record = json.loads(line)
            is_ours = (record.get('num_devices'), record.get('device')) == (self.gpus, self.device)
            if is_ours and record.get('status') != 'interrupted':
                flags = shlex.split(record.get('command', ''))[1:-2]  # without the program, and --results FILE
                found[tuple(flags)] = record
        return found

    def launcher(self) -> list[str]:
        """How benchmark.py starts: one GPU needs no launcher, and Composer's may be installed without its command."""
        program = str(ROOT / 'benchmark.py')
        if self.gpus == 1:
            return [sys.executable, program]
        return [sys.executable, '-m', 'composer.cli.launcher', '-n', str(self.gpus), program]


def say(text: str) -> None:
    print(f'ladder.py: {text}', file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser('ladder.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('results', type=Path, help='file that the records are appended to')
    parser.add_argument('--batch', type=int, default=128, help='images of a step on each GPU (default: 128)')
    parser.add_argument('--measure_batches', type=int, default=40, help='batches that are measured (default: 40)')
    args = parser.parse_args(argv)
    # in a process of its own, since one that has asked holds memory of the GPU
    answer = subprocess.run([sys.executable, '-c', PROBE], check=True, capture_output=True, text=True).stdout
    gpus, device = answer.strip('\n').split(' ', 1)
    if gpus == '0':
        parser.error('this machine has no GPU; make smoke measures a tiny model on its CPU')
    args.results.parent.mkdir(parents=True, exist_ok=True)
    Ladder(args.results, int(gpus), device, args.batch, args.measure_batches).climb()
    if args.results.exists():
        subprocess.run([sys.executable, str(ROOT / 'report.py'), str(args.results), '--compare', '--figure',
                        str(args.results.with_suffix('.png'))])


if __name__ == '__main__':
    main()
