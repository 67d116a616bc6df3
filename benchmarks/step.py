"""Compare the time of a full SD2-base training step with the original's, on the CPU at 64 px, batch 4, microbatch 2.

    python -m benchmarks.step [ROUNDS]     # needs 22 GB; about 3 minutes per round

Both recipes train in fp32 with EMA. The original's recipe has AdamW over all parameters, not fused, and Composer's own
EMA. The two recipes take turns in separate processes, because two full models do not fit into memory. The ratio comes
last.

docs/speed.md has the ratio from 2026-11-20, on two cores of an Intel Xeon with torch 2.7.0.
"""
import json
import statistics
import subprocess
import sys

FLAGS = ['--use_synth_data', '--use_ema', '--image_size', '64', '--batch_size', '4', '--device_train_microbatch_size',
         '2', '--precision', 'fp32', '--warmup_batches', '1', '--measure_batches', '3', '--results', '-']


def run(recipe: str, flags: list[str]) -> None:
    """Train with a recipe in this process. It prints the record."""
    import composer.algorithms
    import torch

    import benchmark
    if recipe == 'original':
        def optimizer(model, *_):
            return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.001)
        benchmark.build_optimizer, benchmark.EMA = optimizer, composer.algorithms.EMA
    benchmark.main(flags)


def measure(recipe: str) -> dict:
    """Train with a recipe in a separate process; return the record."""
    command = [sys.executable, '-m', 'benchmarks.step', recipe, *FLAGS]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        sys.exit(child.stderr)
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    # Measure both recipes in turn, because the speed of a machine can drift.
    records = {recipe: [] for recipe in ('original', 'here')}
    for _ in range(rounds):
        for recipe in records:
            records[recipe].append(measure(recipe))

    # Print the medians and their ratio.
    medians = {}
    for recipe, found in records.items():
        medians[recipe] = statistics.median(record['batch_seconds_median'] for record in found)
        peak = max(record['peak_memory_gib'] for record in found)
        print(f'{recipe:<9} {medians[recipe]:6.2f} s per step, peak memory {peak:5.2f} GiB')
    print(f'step ratio {medians["original"] / medians["here"]:.2f}')


if __name__ == '__main__':
    if sys.argv[1:2] in (['original'], ['here']):
        run(sys.argv[1], sys.argv[2:])
    else:
        main()
