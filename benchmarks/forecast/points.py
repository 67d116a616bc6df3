"""Read the published speeds: the run of each source, who measured it, and whether it is fitted."""
from pathlib import Path

import pandas as pd

from sdbench.forecast.speed import IN_GRAPHS

ROOT = Path(__file__).parents[2]
# Settings of the original's program that published.csv does not state, because the program had no such flags
ORIGINAL = {'precision': 'amp_fp16', 'encoder_precision': 'fp32', 'half_precision_norms': 'no', 'compile': 'no'}
UNSTATED_DEVICES = 4  # GPU count of milabench's runs on several GPUs, inferred from their speed compared with one GPU
# Microbatch of mosaicml/diffusion at 256 px on 8 to 64 GPUs. The run file says 16, but that is the whole batch per GPU
# on 128 GPUs, where a GPU trains on 90.6 images/s. On fewer GPUs it trains on 127.5 to 137.5 images/s.
UNSTATED_MICROBATCH = 32
# The points in judged_speeds.csv, on several machines, were published after the fit.
JUDGED = 'they test constants that were fitted without them'
NO_DEVICES = f'the GPU count is not stated, and assumed to be {UNSTATED_DEVICES}'
NO_MICROBATCH = f'the microbatch is not stated, and assumed to be {UNSTATED_MICROBATCH}'


def read_points() -> pd.DataFrame:
    """Read the published points, one row each, with the columns of published_speeds.csv and four more.

    `by` is who measured, `program` is what ran, `measured` is images/s per GPU, and `left_out` is why the point is not
    fitted ('' if it is). `compile` is the mode of --compile.
    """
    published = pd.read_csv(ROOT / 'published.csv').assign(**ORIGINAL)
    published = published[published['extrapolated'] == 'no']
    others = pd.read_csv(ROOT / 'benchmarks/forecast/published_speeds.csv')
    judged = pd.read_csv(ROOT / 'benchmarks/forecast/judged_speeds.csv').assign(left_out=JUDGED)
    points = pd.concat([published, others, judged], ignore_index=True)
    points = points.fillna({'left_out': '', 'encoder_precision': 'bf16'})  # a run without encoders states no precision
    points['by'] = [who_measured(source) for source in points['source']]
    points['program'] = points['by'].str.split(',').str[0]  # MLPerf's submitters ran the same one
    # All published compiled steps ran in CUDA graphs.
    points['compile'] = [False if compile == 'no' else IN_GRAPHS for compile in points['compile']]

    # Fill in what a source does not state. In runs without a GPU count, each GPU has one microbatch per step.
    unstated = points['num_devices'].isna()
    points.loc[unstated, 'left_out'] = NO_DEVICES
    points.loc[unstated, 'num_devices'] = UNSTATED_DEVICES
    points.loc[unstated, 'batch_size'] = UNSTATED_DEVICES * points['device_train_microbatch_size']
    unstated = points['device_train_microbatch_size'].isna()
    points.loc[unstated, 'left_out'] = NO_MICROBATCH
    points.loc[unstated, 'device_train_microbatch_size'] = UNSTATED_MICROBATCH
    points['measured'] = points['images_per_sec'] / points['num_devices']
    return points


def who_measured(source: str) -> str:
    """Return who measured: the repository of a source, or the submitter of a result of MLPerf."""
    repository, name, *_ = source.split()
    return f'MLPerf, {name}' if repository.startswith('mlcommons') else repository


def tested_layouts(points: pd.DataFrame) -> dict[bool | str, dict[tuple[str, int, bool], list[tuple[int, int]]]]:
    """Return TESTED of forecast/speed.py: GPU count and images per GPU of the points that no other point covers.

    A point covers another one if it has at least as many GPUs and at most as many images per GPU. Points are used if
    their source states how they ran, whether they are fitted or only test the fit.
    """
    points = points[points['left_out'].isin(['', JUDGED])]
    tested = {False: {}, IN_GRAPHS: {}}
    keys = ['compile', 'device', 'image_size', 'encoders']
    for (mode, device, image_size, encoders), runs in points.groupby(keys):
        images = (runs['batch_size'] / runs['num_devices']).astype(int)
        layouts = sorted(set(zip(runs['num_devices'].astype(int), images, strict=True)))
        edges = []
        for devices, fewest in layouts:
            covering = [other for other in layouts
                        if other != (devices, fewest) and other[0] >= devices and other[1] <= fewest]
            if not covering:
                edges.append((devices, fewest))
        tested[mode][f'NVIDIA {device}', image_size, encoders != 'in_loop'] = edges
    return tested
