"""Run one check of the proof on this machine: its devices, a resumed training, or the data loader.

    python -m benchmarks.proof.checks machine
    python -m benchmarks.proof.checks resume --batch_size 8 --model_name tiny --image_size 64
    python -m benchmarks.proof.checks loader --results records.jsonl --batch_size 8 --model_name tiny --image_size 64

The flags go to the trainings that the check starts. The last line of the output is the result. A check that fails ends
with exit status 1.
"""
import json
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.ema_update import medians_in_turn
from benchmarks.loader import write_photographs
from benchmarks.proof.steps import ROOT, launch
from sdbench.gpus import GIB
from sdbench.process import cpu_cores

# Losses are about 1. After a resume the last one may differ by this much, as GPU kernels may add in another order.
LOSS_TOLERANCE = 1e-3
GPU_PROPERTIES = ('name,driver_version,memory.total,power.limit,clocks.sm,clocks.max.sm,clocks.mem,'
                  'clocks_event_reasons.active')


def train(*flags: str) -> None:
    """Run benchmark.py on all GPUs. Its output is this check's output, and so is its failure."""
    command = launch(torch.cuda.device_count(), 'benchmark.py', *flags)
    status = subprocess.run(command, cwd=ROOT, stderr=subprocess.STDOUT).returncode
    if status:
        sys.exit(status)


def machine() -> bool:
    """Print the driver, the clocks and the libraries, and measure the matrix products and copies of each device."""
    gpus = torch.cuda.device_count()
    if gpus and shutil.which('nvidia-smi'):
        subprocess.run(['nvidia-smi', f'--query-gpu={GPU_PROPERTIES}', '--format=csv'], timeout=60)
    print(f'CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {cpu_cores()} CPU cores')
    for name in [f'cuda:{number}' for number in range(gpus)] or ['cpu']:
        if gpus:
            torch.cuda.set_device(name)  # `medians_in_turn` waits for the kernels of the current device
        side, nbytes = (8192, GIB) if gpus else (1024, GIB // 16)
        factor = torch.randn(side, side, device=name, dtype=torch.bfloat16)
        source = torch.empty(nbytes, dtype=torch.uint8, device=name)
        target = torch.empty_like(source)
        product_seconds, copy_seconds = medians_in_turn(partial(torch.mm, factor, factor),
                                                        partial(target.copy_, source), runs=20)
        teraflops = 2 * side ** 3 / product_seconds / 1e12
        gigabytes = 2 * nbytes / copy_seconds / 1e9  # read and written per second
        print(f'{name}: {teraflops:.4g} TFLOP/s in a bf16 matrix product, {gigabytes:.4g} GB/s in a copy')
    return True


def resume(*flags: str) -> bool:
    """Tell whether a training of 12 batches and one that ends after 6 and is resumed end with the same loss."""
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for number, lengths in enumerate(([12], [6, 12])):
            results = Path(folder, f'{number}.jsonl')
            for batches in lengths:
                train('--use_synth_data', '--use_ema', *flags, '--max_duration', f'{batches}ba', '--save_folder',
                      f'{folder}/{number}', '--autoresume', '--results', str(results))
            record = json.loads(results.read_text().splitlines()[-1])
            losses.append(record['loss'])
    print(f'resumed after batch {record["first_batch"]}, the last loss is {losses[1]:.6f}, and {losses[0]:.6f} '
          'without an interruption')
    return record['first_batch'] == 6 and abs(losses[1] - losses[0]) < LOSS_TOLERANCE


def loader(_: str, results: str, *flags: str) -> bool:
    """Measure the loader alone and in a training, without the compiler, on JPEGs on the local disk."""
    batch_size = int(flags[flags.index('--batch_size') + 1])
    fast = ['@recipes/fastest.txt', '--no-compile'] if torch.cuda.is_available() else []
    with tempfile.TemporaryDirectory() as shards:
        write_photographs(shards, 100 * batch_size)
        data = ['--remote', shards, '--results', results, *flags]
        train(*data, '--loader_only')
        train(*data, *fast, '--use_ema')
    alone, trained = (json.loads(line) for line in Path(results).read_text().splitlines()[-2:])
    print(f'loader alone {alone["loader_images_per_sec"]:.3g} images/s with {alone["num_workers"]} workers per device, '
          f'training {trained["images_per_sec"]:.3g} images/s; waiting for data takes '
          f'{trained["data_wait_fraction"]:.1%} of its time')
    return True


if __name__ == '__main__':
    name, *flags = sys.argv[1:]
    check = {'machine': machine, 'resume': resume, 'loader': loader}[name]
    sys.exit(0 if check(*flags) else 1)
