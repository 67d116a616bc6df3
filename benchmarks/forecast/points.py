"""The published speeds: what each source ran, who measured, and which are fitted."""
from pathlib import Path

import pandas as pd

from sdbench.forecast.speed import IN_GRAPHS
from sdbench.gpus import CARDS, Card

ROOT = Path(__file__).parents[2]
# What published.csv does not say of the original's program, since it had no such flags
ORIGINAL = {'precision': 'amp_fp16', 'encoder_precision': 'fp32', 'half_precision_norms': 'no', 'compile': 'no'}
UNSTATED_DEVICES = 4  # of milabench's runs on several GPUs, by their speed over that of one
# Of mosaicml/diffusion at 256 pixels on 8 to 64 GPUs. Its run file has 16, which is all that each of 128 GPUs has in a
# step, and there a GPU trains 90.6 images/s where it trains 127.5 to 137.5 on fewer.
UNSTATED_MICROBATCH = 32
# Points of judged_speeds.csv: those on several machines that came after the constants
JUDGED = 'they judge constants that have not seen them'
NO_DEVICES = f'the number of GPUs is not stated, and taken for {UNSTATED_DEVICES}'
NO_MICROBATCH = f'the microbatch is not stated, and taken for {UNSTATED_MICROBATCH}'


def read_points() -> pd.DataFrame:
    """Read all published points.

    Columns are added: `by`, who measured; `measured`, images/s per GPU; `left_out`, why it is not fitted, or ''.
    """
    published = pd.read_csv(ROOT / 'published.csv').assign(**ORIGINAL)
    published = published[published['extrapolated'] == 'no']
    others = pd.read_csv(ROOT / 'benchmarks/forecast/published_speeds.csv')
    judged = pd.read_csv(ROOT / 'benchmarks/forecast/judged_speeds.csv').assign(left_out=JUDGED)
    points = pd.concat([published, others, judged], ignore_index=True).fillna({'left_out': ''})
    points['by'] = [who_measured(source) for source in points['source']]

    # what a source leaves open. Of several GPUs each of whose steps is one microbatch
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
    """Return the repository of a source; of MLPerf's results, which many submit to, the submitter."""
    repository, name, *_ = source.split()
    return f'MLPerf, {name}' if repository.startswith('mlcommons') else repository


def card_of(point: pd.Series) -> Card:
    """Return the card of a point."""
    return CARDS[f'NVIDIA {point["device"]}']


def tested_layouts(points: pd.DataFrame) -> dict[bool | str, dict[tuple[str, int, bool], list[tuple[int, int]]]]:
    """Return TESTED of forecast/speed.py: GPUs and images a step on each, of the points that no other one covers.

    A point counts whose source says how it ran, whether it is fitted or judges.
    """
    points = points[points['left_out'].isin(['', JUDGED])]
    tested = {False: {}, IN_GRAPHS: {}}  # in which all compiled ones ran
    of_compile = points['compile'].map(lambda compile: False if compile == 'no' else IN_GRAPHS)
    for (mode, device, image_size, encoders), runs in points.groupby([of_compile, 'device', 'image_size', 'encoders']):
        images = (runs['batch_size'] / runs['num_devices']).astype(int)
        layouts = sorted(set(zip(runs['num_devices'].astype(int), images, strict=True)))
        edges = []
        for devices, fewest in layouts:
            covered = [other for other in layouts
                       if other != (devices, fewest) and other[0] >= devices and other[1] <= fewest]
            if not covered:
                edges.append((devices, fewest))
        tested[mode][f'NVIDIA {device}', image_size, encoders != 'in_loop'] = edges
    return tested
