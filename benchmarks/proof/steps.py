"""Run a step of `python -m benchmarks.proof`, as `python -m benchmarks.proof.steps WORK FLAGS... OUT`.

A step appends its results to the file OUT as lines of JSON. A check has `holds`, whether what it shows is so, and
`seen`, what it saw in a sentence; its `rows` become a table of the page. No report counts these.
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from composer import Callback
from composer.algorithms.ema import ema as composer_ema
from diffusers import UNet2DConditionModel

import benchmark
from benchmarks.ema_update import medians_in_turn
from benchmarks.loader import write_photographs
from benchmarks.proof.exactness import DEVICE, STEPS_TOLERANCE, compare_devices, compare_switches
from ema import ShadowModel, compute_ema
from sdbench.models.loading import find_model
from sdbench.process import cpu_cores

ROOT = Path(__file__).parents[2]
GIB = 2 ** 30
LOSS_TOLERANCE = 1e-3  # of losses, which are about 1, after a resume; kernels of a GPU may add in another order
BATCHES = 12  # of a training in the step `life`
KILLED_AT, STOPPED_AT, SAVED_EVERY = 6, 9, 4  # batches
GPU_SAYS = 'name,driver_version,memory.total,power.limit,clocks.sm,clocks.max.sm,clocks.mem,clocks_event_reasons.active'
EAGER = ('@recipes/fastest.txt', '--no-compile')


class Witness(Callback):
    """Writes down each batch's loss, and sends the process a signal.

    Args:
        losses: file to which the number and the loss of each batch are appended.
        signal_at: after this batch the process sends itself `number`; 0: never.
    """

    def __init__(self, losses: str, signal_at: int, number: int):
        self.losses = losses
        self.signal_at = signal_at
        self.number = number

    def batch_end(self, state, logger) -> None:
        batch = state.timestamp.batch.value
        if is_first_rank():
            with open(self.losses, 'a') as file:
                print(batch, float(state.total_loss_dict['loss/train/total']), file=file)
            if batch == self.signal_at:
                os.kill(os.getpid(), self.number)


def is_first_rank() -> bool:
    """Tell whether this process is the first rank of a run, or its only one."""
    return os.environ.get('RANK', '0') == '0'


def checked(holds: bool, seen: str, **details) -> list[dict]:
    """Return the result of a check, with what it says in detail."""
    return [{'stage': 'proof', 'status': 'complete', 'holds': holds, 'seen': seen, **details}]


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
    told.append(f'CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}')
    told.append(f'{cpu_cores()} CPU cores')
    return checked(True, '; '.join(told), rows=rates)


def rates_of(device: torch.device) -> dict[str, float]:
    """Measure TFLOP/s of a product in bf16, and GB/s, read and written, of a copy."""
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # whose kernels are waited for
    side, nbytes = (8192, GIB) if device.type == 'cuda' else (1024, GIB // 16)
    one = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product, copy = medians_in_turn(lambda: one @ one, lambda: target.copy_(source), runs=20)
    return {'tflops_per_sec': 2 * side ** 3 / product / 1e12, 'gigabytes_per_sec': 2 * nbytes / copy / 1e9}


def exactness() -> list[dict]:
    """Compare this device with the CPU, and each switch with eager float32."""
    # TF32 would keep 10 bits of a product's factors
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    largest, of_average = compare_devices()
    switches = compare_switches()
    is_near = largest < STEPS_TOLERANCE and of_average < STEPS_TOLERANCE
    holds = is_near and all(switch['holds'] is not False for switch in switches)
    return checked(holds, f'thirty steps in float32 on {DEVICE} and on the CPU differ by {largest:.1e} of a loss or a '
                   f'gradient norm, and by {of_average:.1e} of the average', rows=switches)


def child(*program: str) -> subprocess.CompletedProcess:
    """Run a program on all devices; what it prints is kept, and passed on for the log."""
    gpus = torch.cuda.device_count()
    launcher = ['-m', 'composer.cli.launcher', '-n', str(gpus)] if gpus > 1 else []
    done = subprocess.run([sys.executable, *launcher, *program], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    print(done.stdout)
    return done


def train(losses: str, signal_at: str, number: str, *flags: str) -> list[dict]:
    """Train and write down the losses; after batch `signal_at` the training sends itself a signal."""
    benchmark.main([*flags, '--results', os.devnull], [Witness(losses, int(signal_at), int(number))])
    return []


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
                done = child('-m', 'benchmarks.proof.steps', 'train', str(folder / f'{run}.txt'), str(signal_at),
                             str(int(number)), *argv, os.devnull)
                statuses.append(done.returncode)
        whole = read_losses(folder / 'whole.txt')
        broken = read_losses(folder / 'broken.txt')

    # what they trained
    trained_twice = range(KILLED_AT - KILLED_AT % SAVED_EVERY + 1, KILLED_AT + 1)  # lost by the kill, not by SIGTERM
    expected = sorted([*range(1, BATCHES + 1), *trained_twice])
    of_whole = dict(whole)
    differences = [abs(loss - of_whole[batch]) for batch, loss in broken]
    went_on = sorted(batch for batch, _ in broken) == expected
    killed, stopped, ended = statuses
    holds = went_on and killed != 0 and stopped != 0 and ended == 0 and max(differences) < LOSS_TOLERANCE
    return checked(holds, f'killed, stopped and resumed it trained the batches {[batch for batch, _ in broken]}, with '
                   f'exit statuses {statuses} and losses that differ by {max(differences):.1e}', losses=whole)


def read_losses(path: Path) -> list[tuple[int, float]]:
    """Read batch and loss of each line."""
    pairs = [line.split() for line in path.read_text().splitlines()]
    return [(int(batch), float(loss)) for batch, loss in pairs]


def not_a_number(*flags: str) -> list[dict]:
    """See whether a run whose weights become infinite ends, and says why in one line."""
    return refused('not finite', *flags, '--learning_rate', '1e38')


def out_of_memory(*flags: str) -> list[dict]:
    """See whether a batch that no GPU holds is answered in one line."""
    return refused('out of memory', *flags, '--use_ema')


def refused(reason: str, *flags: str) -> list[dict]:
    """See whether benchmark.py ends, and says the reason in one line."""
    done = child('benchmark.py', '--use_synth_data', *flags, '--results', os.devnull)
    lines = [line for line in done.stdout.splitlines() if line.startswith('benchmark.py: error:')]
    said = ' / '.join(lines)
    return checked(done.returncode != 0 and said.count(reason) == 1, said)


def loader(*flags: str) -> list[dict]:
    """Measure the loader alone, and with the fastest model that needs no compiler, on JPEGs of this disk."""
    batch_size = int(flags[flags.index('--batch_size') + 1])
    microbatch = flags.index('--device_train_microbatch_size')
    with tempfile.TemporaryDirectory() as name:
        shards, out = f'{name}/shards', Path(name, 'records.jsonl')
        write_photographs(shards, 100 * batch_size)
        data = ('benchmark.py', '--remote', shards, '--results', str(out))
        child(*data, *flags[:microbatch], '--loader_only')
        fast = EAGER if torch.cuda.is_available() else ()
        child(*data, '--use_ema', *fast, *flags)
        alone, trained = (json.loads(line) for line in out.read_text().splitlines())
    seen = (f'alone {alone["loader_images_per_sec"]:.3g} images/s with {alone["num_workers"]} processes a device; with '
            f'the model {trained["images_per_sec"]:.3g} images/s, and {trained["data_wait_fraction"]:.1%} of its time '
            'waits for data')
    return [alone, trained, *checked(True, seen)]


def average(model_name: str) -> list[dict]:
    """Time an update of the average, Composer's and this repository's in turn."""
    with torch.device(DEVICE):
        unet = UNet2DConditionModel.from_config(find_model(model_name).configs['unet'])
    ours, theirs = ShadowModel(unet), composer_ema.EMAParameters(unet)
    with torch.no_grad():
        composer, here = medians_in_turn(lambda: composer_ema.compute_ema(unet, theirs, 0.999),
                                         lambda: compute_ema(unet, ours, 0.999))
    return checked(here < composer, f'an update takes {here * 1000:.3g} ms, and {composer * 1000:.3g} ms in Composer')


WORK = {work.__name__: work for work in (identity, exactness, train, life, not_a_number, out_of_memory, loader,
                                         average)}


def main() -> None:
    name, *flags, out = sys.argv[1:]
    records = WORK[name](*flags)
    if is_first_rank():
        with open(out, 'a') as file:
            for record in records:
                print(json.dumps(record), file=file)


if __name__ == '__main__':
    main()
    if torch.distributed.is_initialized():
        benchmark.destroy_nccl_group()
