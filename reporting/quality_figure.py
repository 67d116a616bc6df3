"""The picture of evaluations: FID against CLIP score over guidance, and both against the images of the training."""
import pandas as pd

from reporting.figures import COLORS, STYLE, save
from reporting.quality import MLPERF_CLIP_SCORE, MLPERF_FID

INCHES = 4.6  # of a panel, on each side
LINE_OF_MLPERF = {'color': '0.45', 'linestyle': '--', 'linewidth': 1}


def draw_quality(path: str, rows: pd.DataFrame, dollars_per_gpu_hour: float) -> None:
    """Writes the picture of the rows of `read_evaluations`: a panel for each pair of figures that they know.

    Raises ValueError if there is nothing to draw or the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('--quality needs matplotlib: pip install matplotlib') from None
    panels = [key for key in ('fid', 'clip_score') if (rows[key].notna() & rows['images_seen'].notna()).any()]
    has_curve = bool((rows['fid'].notna() & rows['clip_score'].notna()).any())
    number = len(panels) + has_curve
    if not number:
        raise ValueError(f'--quality {path}: no record with both scores, or with the images of its training; add '
                         'those of evaluate.py')
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(INCHES * number, INCHES), layout='constrained')
        axes = list(figure.subplots(1, number, squeeze=False)[0])
        if has_curve:
            draw_curve(axes.pop(0), rows[rows['fid'].notna() & rows['clip_score'].notna()])
        for axis, key in zip(axes, panels, strict=True):
            draw_course(axis, rows[rows[key].notna() & rows['images_seen'].notna()], key, dollars_per_gpu_hour)
        figure.suptitle(f'Scores of {"; ".join(rows["judges"].unique()[:2])}', x=0.01, ha='left', fontsize=11)
        save(figure, path, '--quality')


def draw_curve(axes, rows: pd.DataFrame) -> None:
    """FID against CLIP score, a line for each evaluation, whose points are named by their guidance."""
    for color, (_, points) in zip(COLORS * len(rows), rows.groupby('curve', sort=False), strict=False):
        points = points.sort_values('guidance')
        first = points.iloc[0]
        label = first['model']
        if first['trained_batches']:
            label += f', batch {first["trained_batches"]}'
        axes.plot(points['clip_score'], points['fid'], marker='o', markersize=4, color=color, label=label)
        for _, point in points.iterrows():
            axes.annotate(f'{point["guidance"]:g}', (point['clip_score'], point['fid']), xytext=(4, 4),
                          textcoords='offset points', fontsize=8, color=color)
    if rows['by_inception'].all():
        axes.axhline(MLPERF_FID, **LINE_OF_MLPERF)
    axes.axvline(MLPERF_CLIP_SCORE, **LINE_OF_MLPERF, label='MLPerf')
    axes.set_xlabel('CLIP score')
    axes.set_ylabel('FID')
    axes.set_title('over guidance', fontsize=10, loc='left')
    axes.legend(fontsize=8)


def draw_course(axes, rows: pd.DataFrame, key: str, dollars_per_gpu_hour: float) -> None:
    """A score against the images seen, a line for each training and guidance; on top, GPU-hours and dollars, where
    one speed says them for all."""
    from matplotlib.ticker import EngFormatter
    names = rows['model'].nunique() > 1
    for color, ((_, guidance), points) in zip(COLORS * len(rows), rows.groupby(['training', 'guidance'], sort=False),
                                              strict=False):
        points = points.sort_values('images_seen')
        label = f'guidance {guidance:g}'
        if names:
            label = f'{points["model"].iloc[0]}, {label}'
        axes.plot(points['images_seen'], points[key], marker='o', markersize=4, color=color, label=label)
    line, title = (MLPERF_FID, 'FID') if key == 'fid' else (MLPERF_CLIP_SCORE, 'CLIP score')
    if rows['by_inception'].all():
        axes.axhline(line, **LINE_OF_MLPERF, label='MLPerf')
    axes.set_xlabel('images seen')
    axes.set_ylabel(title)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.locator_params(axis='x', nbins=4)
    axes.legend(fontsize=8)
    hours = (rows['gpu_hours'] / rows['images_seen']).round(15).unique()  # of an image
    if len(hours) == 1 and hours[0] > 0:
        top = axes.secondary_xaxis('top', functions=(lambda images: images * hours[0], lambda time: time / hours[0]))
        top.set_xlabel('GPU-hours and dollars', fontsize=9)
        top.xaxis.set_major_formatter(lambda time, _: f'{time:,g}\n${time * dollars_per_gpu_hour:,g}')
        top.locator_params(axis='x', nbins=4)
