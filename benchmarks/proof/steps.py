"""Run a step of `python -m benchmarks.proof`, as `python -m benchmarks.proof.steps WORK OUT FLAGS...`.

A step appends its results to the file OUT as lines of JSON; those that are no record of a speed have the stage proof.
"""
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from composer import Callback

import benchmark
from sdbench.flags.complete import complete
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.measuring.clock import Measurement
from sdbench.models.loading import SD2_BASE, find_model
from sdbench.records.versions import git_commit, package_versions
from sdbench.training.microbatch import sizes_to_try

ROOT = Path(__file__).parents[2]
GIB = 2 ** 30
BATCHES = 12  # of a training in the step `life`
KILLED_AT, STOPPED_AT, SAVED_EVERY = 6, 9, 4  # batches
GPU_SAYS = 'name,driver_version,memory.total,power.limit,clocks.sm,clocks.max.sm,clocks.mem,clocks_event_reasons.active'
EAGER = ('@recipes/fastest.txt', '--no-compile')


class Witness(Callback):
    """Notes what a record leaves out: the seconds of each measured batch on this rank, and each batch's loss.

    Args:
        losses: file to which the number and the loss of each batch are appended; None: nowhere.
        signal_at: after this batch the process sends itself `number`; 0: never.
    """

    def __init__(self, losses: str | None = None, signal_at: int = 0, number: int = signal.SIGKILL):
        self.batch_seconds: list[float] = []
        self.losses = losses
        self.signal_at = signal_at
        self.number = number

    def batch_end(self, state, logger) -> None:
        batch = state.timestamp.batch.value
        if self.losses and is_first_rank():
            with open(self.losses, 'a') as file:
                print(batch, float(state.total_loss_dict['loss/train/total']), file=file)
            if batch == self.signal_at:
                os.kill(os.getpid(), self.number)

    def fit_end(self, state, logger) -> None:
        for callback in state.callbacks:
            if isinstance(callback, Measurement):
                self.batch_seconds = [round(seconds, 5) for seconds in callback.window.batch_seconds]


def is_first_rank() -> bool:
    """Tell whether this process is the first rank of a run, or its only one."""
    return os.environ.get('RANK', '0') == '0'


def proof(**result) -> dict:
    """Return a result that no report counts."""
    return {'stage': 'proof', 'status': 'complete', **result}


def measure(*flags: str) -> list[dict]:
    """Run benchmark.py; return its record, with the seconds of its batches."""
    sys.argv = ['benchmark.py', *flags]  # which the record has as its command
    witness = Witness()
    record = benchmark.main([*flags, '--results', os.devnull], [witness])
    return [record | {'batch_seconds': witness.batch_seconds}]


def identity() -> list[dict]:
    """Say what the machine is, and measure what its devices reach in a product and a copy."""
    gpus = torch.cuda.device_count()
    told = []
    if gpus:
        command = ['nvidia-smi', f'--query-gpu={GPU_SAYS}', '--format=csv,noheader']
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip().splitlines()
        except OSError:
            told = ['no nvidia-smi']
    rates = []
    for device in [f'cuda:{number}' for number in range(gpus)] or ['cpu']:
        rates.append({'device': device, **rates_of(torch.device(device))})
    return [proof(gpu_says=told, rates=rates, git_commit=git_commit(), versions=package_versions(),
                  python=sys.version.split()[0], cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(),
                  cpu_cores=len(os.sched_getaffinity(0)))]


def rates_of(device: torch.device) -> dict[str, float]:
    """Measure TFLOP/s of a product in bf16, and GB/s, read and written, of a copy."""
    side, nbytes = (8192, GIB) if device.type == 'cuda' else (1024, GIB // 16)
    one = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = seconds_of(lambda: one @ one, device)
    copy = seconds_of(lambda: target.copy_(source), device)
    return {'tflops_per_sec': 2 * side ** 3 / product / 1e12, 'gigabytes_per_sec': 2 * nbytes / copy / 1e9}


def seconds_of(work: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Time one call, after a few to warm up."""
    for repeats in (3, times):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / times


def forecast(devices: str, device: str, runs: str) -> list[dict]:
    """Forecast each run by microbatch, as --dry_run does: GiB, and images/s where the GPU is known.

    Args:
        devices: how many.
        device: name of the GPU.
        runs: flags of benchmark.py by the name of a step, as JSON.
    """
    from sdbench.forecast.speed import can_forecast
    from sdbench.forecast.trace import Estimate
    from sdbench.gpus import CARDS
    by_step = {}
    for step, flags in json.loads(runs).items():
        argv = [*flags, '--dry_run', devices]
        if device == 'CPU':
            argv += ['--precision', 'fp32', '--no-channels_last']
        settings = complete(parse(Train, '', argv, 'benchmark.py'), None)

        # what it says of this run
        found = Estimate.of(settings, benchmark.build_model)
        gib, speeds = {}, {}
        for size in sizes_to_try(settings.device_batch_size):
            gib[size] = sum(found.needed(size).values()) / GIB
            if device in CARDS and can_forecast(CARDS[device], settings.precision):
                speeds[size] = found.speed_on(CARDS[device], size)
        by_step[step] = {'gib': gib, 'images_per_sec': speeds}
        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory / GIB
            by_step[step]['largest_microbatch'] = found.largest_microbatch(memory)
    return [proof(by_step=by_step)]


def exactness() -> list[dict]:
    """Compare this device with the CPU, and each switch with eager float32."""
    from benchmarks.proof.exactness import compare_devices, compare_switches
    return [proof(**compare_devices(), switches=compare_switches())]


def child(*words: str) -> subprocess.CompletedProcess:
    """Run another step of this module, on all devices; what it prints is kept, and passed on for the log."""
    gpus = torch.cuda.device_count()
    launcher = ['-m', 'composer.cli.launcher', '-n', str(gpus)] if gpus > 1 else []
    command = [sys.executable, *launcher, '-m', 'benchmarks.proof.steps', *words]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(done.stdout)
    return done


def train(losses: str, signal_at: str, number: str, *flags: str) -> list[dict]:
    """Train and note the losses; after batch `signal_at` the training sends itself a signal."""
    record = benchmark.main([*flags, '--results', os.devnull], [Witness(losses, int(signal_at), int(number))])
    return [proof(trained_batches=record['trained_batches'])]


def life(*flags: str) -> list[dict]:
    """Compare a training that was killed, resumed, stopped by SIGTERM and resumed with one that was not."""
    with tempfile.TemporaryDirectory() as name:
        # one training that is left alone, and one that is killed and stopped
        folder = Path(name)
        for run, signals in (('whole', [(0, 0)]),
                             ('broken', [(KILLED_AT, signal.SIGKILL), (STOPPED_AT, signal.SIGTERM), (0, 0)])):
            argv = ['--use_synth_data', '--use_ema', *flags, '--max_duration', f'{BATCHES}ba', '--save_interval',
                    f'{SAVED_EVERY}ba', '--save_folder', str(folder / run), '--autoresume']
            statuses = []
            for signal_at, number in signals:
                out = child('train', str(folder / 'out'), str(folder / f'{run}.txt'), str(signal_at), str(int(number)),
                            *argv)
                statuses.append(out.returncode)
        whole = read_losses(folder / 'whole.txt')
        broken = read_losses(folder / 'broken.txt')

    # what they trained
    trained_twice = range(KILLED_AT - KILLED_AT % SAVED_EVERY + 1, KILLED_AT + 1)  # lost by the kill, not by SIGTERM
    expected = sorted([*range(1, BATCHES + 1), *trained_twice])
    of_whole = dict(whole)
    differences = [abs(loss - of_whole[batch]) for batch, loss in broken]
    return [proof(exit_statuses=statuses, batches=[batch for batch, _ in broken],
                  went_on_where_it_was=sorted(batch for batch, _ in broken) == expected,
                  largest_difference=max(differences), losses=whole)]


def read_losses(path: Path) -> list[tuple[int, float]]:
    """Read batch and loss of each line."""
    pairs = [line.split() for line in path.read_text().splitlines()]
    return [(int(batch), float(loss)) for batch, loss in pairs]


def answer_of(*flags: str) -> tuple[int, str]:
    """Run benchmark.py; return its exit status and its own line of an error."""
    done = child('measure', os.devnull, *flags)
    lines = [line for line in done.stdout.splitlines() if line.startswith('benchmark.py: error:')]
    return done.returncode, ' / '.join(lines)


def not_a_number(*flags: str) -> list[dict]:
    """See whether a run whose weights become infinite ends, and says why in one line."""
    status, said = answer_of('--use_synth_data', *flags, '--learning_rate', '1e38')
    return [proof(exit_status=status, said=said, holds=status != 0 and 'not finite' in said)]


def out_of_memory(*flags: str) -> list[dict]:
    """See whether a batch that no GPU holds is answered in one line."""
    status, said = answer_of('--use_synth_data', '--use_ema', *flags)
    return [proof(exit_status=status, said=said, holds=status != 0 and said.count('out of memory') == 1)]


def loader(*flags: str) -> list[dict]:
    """Measure the loader alone, and with the fastest model that needs no compiler, on JPEGs of this disk."""
    from benchmarks.loader import write_photographs
    batch_size = int(flags[flags.index('--batch_size') + 1])
    microbatch = flags.index('--device_train_microbatch_size')
    with tempfile.TemporaryDirectory() as name:
        shards, out = f'{name}/shards', Path(name, 'out')
        write_photographs(shards, 100 * batch_size)
        data = ('--remote', shards)
        child('measure', str(out), *data, *flags[:microbatch], '--loader_only')
        fast = EAGER if torch.cuda.is_available() else ()
        child('measure', str(out), *data, '--use_ema', *fast, *flags)
        return [json.loads(line) for line in out.read_text().splitlines()]


def average(model_name: str) -> list[dict]:
    """Time an update of the average, Composer's and this repository's in turn."""
    from composer.algorithms.ema import ema as composers
    from diffusers import UNet2DConditionModel

    from ema import ShadowModel, compute_ema
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    with device:
        unet = UNet2DConditionModel.from_config(find_model(model_name or SD2_BASE).configs['unet'])
    ours, theirs = ShadowModel(unet), composers.EMAParameters(unet)
    seconds = {'composer': [], 'here': []}
    with torch.no_grad():
        for _ in range(5):
            seconds['composer'].append(seconds_of(lambda: composers.compute_ema(unet, theirs, 0.999), device, 3))
            seconds['here'].append(seconds_of(lambda: compute_ema(unet, ours, 0.999), device, 3))
    return [proof(seconds=seconds, ratio=statistics.median(seconds['composer']) / statistics.median(seconds['here']))]


WORK = {work.__name__: work for work in (measure, identity, forecast, exactness, train, life, not_a_number,
                                         out_of_memory, loader, average)}


def main() -> None:
    name, out, *flags = sys.argv[1:]
    records = WORK[name](*flags)
    if is_first_rank():
        with open(out, 'a') as file:
            for record in records:
                print(json.dumps(record), file=file)


if __name__ == '__main__':
    main()
    if torch.distributed.is_initialized():
        benchmark.leave_ranks()
