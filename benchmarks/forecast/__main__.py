"""Fit the constants of the forecast to published speeds, and show its errors on speeds that were not used to fit it.

    python -m benchmarks.forecast [PICTURE]     # such as docs/forecast.png; a minute or two, no GPU

It traces a step of Stable Diffusion 2 as each source ran it, and fits the constants in sdbench/forecast/speed.py to
eager and compiled steps together. Then it excludes each source in turn, fits the constants to all other sources, and
predicts the speeds of the excluded source. It prints every point with both predictions, and whether the constants agree
with the code.

The points that are fitted are in published.csv (the original's program) and published_speeds.csv (the same at more
microbatches, and other programs for the same work). The points in judged_speeds.csv only test the result.
"""
import argparse
from dataclasses import replace

import pandas as pd

from benchmarks.forecast.fit import judge, predict
from benchmarks.forecast.points import read_points, tested_layouts
from sdbench.forecast.speed import CONSTANTS, TESTED


def table(points: pd.DataFrame) -> str:
    """Return points as a table of text with their sources, GPUs, measured speeds and forecasts."""
    columns = {'by': 'source', 'device': 'GPU', 'num_devices': 'GPUs', 'device_train_microbatch_size': 'microbatch',
               'use_ema': 'EMA', 'compile': 'compiled', 'measured': 'images/s per GPU', 'predicted': 'forecast',
               'error': 'error', 'unseen': 'without source', 'unseen_error': 'its error'}
    formats = {'num_devices': '{:.0f}', 'device_train_microbatch_size': '{:.0f}', 'measured': '{:.2f}',
               'predicted': '{:.2f}', 'unseen': '{:.2f}', 'error': '{:+.1%}', 'unseen_error': '{:+.1%}'}
    cells = points[[key for key in columns if key in points]].copy()
    cells['compile'] = ['yes' if compile else 'no' for compile in cells['compile']]
    for key, template in formats.items():
        if key in cells:
            cells[key] = [template.format(value) for value in cells[key]]
    return cells.rename(columns=columns).to_string(index=False)


def errors_in_words(errors: pd.Series) -> str:
    """Return the mean and the largest of relative errors as text."""
    return f'mean error {errors.abs().mean():.1%}, worst {errors.abs().max():.1%}'


def main() -> None:
    parser = argparse.ArgumentParser('python -m benchmarks.forecast', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('picture', metavar='PICTURE', nargs='?', help='file for a plot of the points (default: none)')
    picture = parser.parse_args().picture
    points = read_points()
    judged, fitted = judge(points)

    # Print the points that are fitted, and their errors.
    print(table(judged))
    is_compiled = judged['compile'].astype(bool)
    compiled = judged[is_compiled]
    for kind, some in (('eager', judged[~is_compiled]), ('compiled', compiled)):
        print(f'{len(some)} {kind} points of {some["device"].nunique()} GPUs')
        print(f'  fitted to all: {errors_in_words(some["error"])}')
        print(f'  fitted without their source: {errors_in_words(some["unseen_error"])}')
    all_launched = replace(CONSTANTS, seconds_in_a_graph=CONSTANTS.seconds_a_kernel)
    errors = predict(compiled, all_launched) / compiled['measured'] - 1
    print(f'  if each kernel were launched as in an eager step: {errors_in_words(errors)}')

    # Print the points that are not fitted, with the reason.
    for reason, others in points[points['left_out'] != ''].groupby('left_out'):
        others = others.assign(predicted=predict(others, fitted))
        others['error'] = others['predicted'] / others['measured'] - 1
        print(f'\n{len(others)} points are not fitted: {reason}; {errors_in_words(others["error"])}')
        print(table(others))

    # Compare the constants with the code, because a fit does not change the code.
    print()
    for name, found, in_code in (('CONSTANTS', fitted, CONSTANTS), ('TESTED', tested_layouts(points), TESTED)):
        print(f'{name} {found}: {"as in the code" if found == in_code else f"the code has {in_code}"}')
    if picture:
        from benchmarks.forecast.picture import draw
        draw(judged, fitted, picture)


if __name__ == '__main__':
    main()
