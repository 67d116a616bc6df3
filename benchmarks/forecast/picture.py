"""Draw the published speeds and their forecasts."""
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.forecast.fit import runs_of, speeds_of
from sdbench.forecast.speed import Constants

MICROBATCHES = [1, 2, 4, 8, 16, 32, 64]
SPEEDS = [5, 10, 20, 40, 80, 160, 320]


def draw(points: pd.DataFrame, constants: Constants, path: str) -> None:
    """Write a picture with the speed over the microbatch on the left and forecast over measured speeds on the right.

    `points` have the predictions of `judge`.
    """
    # Each card has a color, and each program has a marker and a line style.
    devices = sorted(points['device'].unique())
    colors = dict(zip(devices, ('C0', 'C1', 'C2', 'C3', 'C4', 'C5'), strict=True))
    markers = dict(zip(points['program'].unique(), 'os^Dv', strict=True))
    styles = dict(zip(points['program'].unique(), ('-', '--', '-.', ':', (0, (6, 1))), strict=True))

    # On the left, draw a line of forecasts and the points of comparable runs for each program and card. On the right,
    # draw all of its points.
    figure = Figure(figsize=(11, 6.4), layout='constrained')
    over_microbatch, unseen = figure.subplots(1, 2)
    handles = []
    for (program, device), runs in points.groupby(['program', 'device'], sort=False):
        comparable = comparable_runs(runs)
        [line] = over_microbatch.plot(*speeds_over_microbatch(comparable[:1], constants),
                                      color=colors[device], linestyle=styles[program], linewidth=1.2)
        [dots] = over_microbatch.plot(comparable['device_train_microbatch_size'], comparable['measured'],
                                      markers[program], color=colors[device])
        compiled = ', compiled' if runs['compile'].iloc[0] else ''
        handles.append(((line, dots), f'{device}, {program}{compiled}'))
        unseen.plot(runs['measured'], runs['unseen'], markers[program], color=colors[device])

    # Set up the axes and the legend.
    over_microbatch.set(xscale='log', yscale='log', xlabel='microbatch', ylabel='images/s per GPU',
                        title='Measured (points) and forecast (lines)')
    worst = points['unseen_error'].abs().max()
    limits = np.array([SPEEDS[0] * 0.8, SPEEDS[-1] * 1.1])
    unseen.plot(limits, limits, color='black', linewidth=1)
    unseen.fill_between(limits, limits / (1 + worst), limits * (1 + worst), color='black', alpha=0.08)
    unseen.set(xscale='log', yscale='log', xlim=limits, ylim=limits, xlabel='measured images/s per GPU',
               ylabel='forecast, fitted without its source',
               title=f'Each source left out in turn; the band is {worst:.0%}')
    ticks = {over_microbatch.xaxis: MICROBATCHES, over_microbatch.yaxis: SPEEDS, unseen.xaxis: SPEEDS,
             unseen.yaxis: SPEEDS}
    for axis, values in ticks.items():
        axis.set_ticks(values, [str(value) for value in values])
    for axes in (over_microbatch, unseen):
        axes.minorticks_off()
        axes.spines[['top', 'right']].set_visible(False)
    pairs, labels = zip(*handles, strict=True)
    figure.legend(pairs, labels, loc='outside lower center', ncols=3, frameon=False, fontsize=8, handlelength=4)
    figure.savefig(path, dpi=140)


def comparable_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that fit on one line: the most frequent image size and GPU count, and with EMA or without."""
    for key in ('image_size', 'num_devices'):
        runs = runs[runs[key] == runs[key].mode().iloc[0]]
    return runs[runs['use_ema'] == runs['use_ema'].iloc[0]]


def speeds_over_microbatch(point: pd.DataFrame, constants: Constants) -> tuple[np.ndarray, np.ndarray]:
    """Return microbatch sizes, and the forecast images/s per GPU of the run of one point with each of them."""
    [(card, work, layout, mode)] = runs_of(point)
    microbatches = 16 if layout.microbatches > 1 else 1
    sizes = np.geomspace(MICROBATCHES[0], MICROBATCHES[-1], 25)
    layouts = [layout._replace(microbatch=size, images=size * microbatches) for size in sizes]
    return sizes, speeds_of([(card, work, each, mode) for each in layouts], constants)
