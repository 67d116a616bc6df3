"""Random trainings against a computation of their lines, from docs/measuring.md alone: nothing of sdbench is in it."""
import json
import random

import numpy as np
import pytest

from tests.test_report import drawn, printed  # noqa: F401


def training(rng: random.Random, folder: str) -> tuple[list[dict], list[list[float]], list[float]]:
    """Return the records of a training in one to three parts, the points of its line, and their GPU-hours."""
    records, losses = [], {}
    images_at, hours_at = [0.0], [0.0]
    first, hours = 0, 0.0
    for part in range(rng.choice([1, 2, 3])):
        last = first + rng.randrange(20, 60)
        hours += (last - first) * rng.uniform(0.5, 1.5)
        evaluations = [[batch * 64, rng.choice([None, rng.random()])] for batch in range(first + 5, last, 7)]
        records.append({
            'device': 'NVIDIA H200', 'num_devices': rng.choice([8, 16.0]), 'image_size': 512, 'batch_size': 64,
            'images_per_sec': 9.0, 'learning_rate': rng.choice([1e-4, 1e-4]), 'save_folder': folder,
            'date': f'2026-01-0{part + 1}T0{rng.randrange(9)}:00:00+02:00', 'first_batch': first,
            'trained_batches': last, 'gpu_hours': hours, 'evaluations': evaluations})
        losses |= dict(evaluations)

        # from a checkpoint on, what came after it is trained again
        at_checkpoint = np.interp(first * 64, images_at, hours_at)
        before = [pair for pair in zip(images_at, hours_at, strict=True) if pair[0] < first * 64]
        points = [*before, (first * 64, at_checkpoint), (last * 64, hours)]
        images_at, hours_at = map(list, zip(*points, strict=True))
        first = last - rng.choice([0, 3])
    line = [[images, loss] for images, loss in sorted(losses.items()) if loss is not None]
    return records, line, [np.interp(images, images_at, hours_at) for images, _ in line]


@pytest.mark.parametrize('seed', range(4))
def test_each_training_is_one_line_over_images_and_dollars(drawn, tmp_path, seed):  # noqa: F811
    rng = random.Random(seed)
    trainings = [training(rng, f'runs/{number}') for number in range(3)]
    records = [record for parts, _, _ in trainings for record in parts]
    rng.shuffle(records)
    paths = [tmp_path / 'one.jsonl', tmp_path / 'other.jsonl']
    for number, path in enumerate(paths):
        path.write_text(''.join(json.dumps(record) + '\n' for record in records[number::2]))
    images, dollars = drawn(*paths, '--learned', 'learned.png', '--dollars_per_gpu_hour', 3).axes
    assert sorted(line.get_xydata().tolist() for line in images.lines) == sorted(line for _, line, _ in trainings)
    found = sorted(line.get_xdata().tolist() for line in dollars.lines)
    for mine, expected in zip(found, sorted([3 * hour for hour in hours] for _, _, hours in trainings), strict=True):
        assert mine == pytest.approx(expected)
