"""The picture of evaluations: FID against CLIP score over guidance, and both against the images of the training."""
import pandas as pd

from reporting.figures import COLORS, STYLE, save, shortened, wrapped
from reporting.quality import MLPERF_CLIP_SCORE, MLPERF_FID

INCHES = 4.6  # of a panel, on each side
TITLE_CHARACTERS = 45  # above each panel, in a line
NAME_CHARACTERS = 60  # of a model or a judge
MOST_JUDGES = 3  # in the title
MOST_IN_LEGEND = 8  # lines that a legend names, beside MLPerf's
SPAN_OF_LINEAR = 30  # more between the lowest and the highest score is drawn on a logarithmic axis
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
    has_both = rows['fid'].notna() & rows['clip_score'].notna()
    has_course = rows['images_seen'].notna() & (rows['fid'].notna() | rows['clip_score'].notna())
    panels = [key for key in ('fid', 'clip_score') if rows.loc[has_course, key].notna().any()]
    number = len(panels) + has_both.any()
    if not number:
        raise ValueError(f'--quality {path}: no record with both scores, or with the images of its training; add '
                         'those of evaluate.py')
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(INCHES * number, INCHES), layout='constrained')
        axes = list(figure.subplots(1, number, squeeze=False)[0])
        if has_both.any():
            draw_curve(axes.pop(0), rows[has_both])
        for axis, key in zip(axes, panels, strict=True):
            draw_course(axis, rows[has_course & rows[key].notna()], key, dollars_per_gpu_hour)
        figure.suptitle(wrapped(title_of(rows[has_both | has_course]), TITLE_CHARACTERS * number), x=0.01, ha='left',
                        fontsize=11)
        save(figure, path, '--quality')


def title_of(drawn: pd.DataFrame) -> str:
    """What all scores that are drawn are of, and why some can be compared with few others."""
    judges = drawn['judges'].unique()
    named = []
    for words in judges[:MOST_JUDGES]:
        named.append(', '.join(shortened(word, NAME_CHARACTERS) for word in words.split(', ')))
    if len(judges) > MOST_JUDGES:
        named.append(f'and {len(judges) - MOST_JUDGES} more')
    title = f'Scores of {"; ".join(named)}'
    notes = sorted({note for notes in drawn['notes'] for note in notes.split(', ') if note})
    if notes:
        title += f' ({", ".join(notes)})'
    return title


def legend_label(number: int, label: str) -> str:
    """The label of the line with this number, from 0, of a panel."""
    if number >= MOST_IN_LEGEND:
        return '_nolegend_'
    if label.startswith('_'):
        return f' {label}'  # else matplotlib leaves it out of the legend
    return label


def draw_curve(axes, rows: pd.DataFrame) -> None:
    """FID against CLIP score, a line for each evaluation, whose points are named by their guidance."""
    for number, (_, points) in enumerate(rows.groupby('curve', sort=False)):
        color = COLORS[number % len(COLORS)]
        points = points.sort_values('guidance')
        first = points.iloc[0]
        label = shortened(first['model'], NAME_CHARACTERS)
        if first['trained_batches']:
            label += f', batch {first["trained_batches"]}'
        axes.plot(points['clip_score'], points['fid'], marker='o', markersize=4, color=color,
                  label=legend_label(number, label))
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
    """A score against the images seen, a line for each training, model and guidance; on top, GPU-hours and dollars,
    where one speed says them for all."""
    from matplotlib.ticker import EngFormatter
    names = rows['model'].nunique() > 1
    lines = rows.groupby(['training', 'model', 'guidance'], sort=False)
    for number, ((_, model, guidance), points) in enumerate(lines):
        points = points.sort_values('images_seen')
        label = f'guidance {guidance:g}'
        if names:
            label = f'{shortened(model, NAME_CHARACTERS)}, {label}'
        axes.plot(points['images_seen'], points[key], marker='o', markersize=4,
                  color=COLORS[number % len(COLORS)], label=legend_label(number, label))
    line, title = (MLPERF_FID, 'FID') if key == 'fid' else (MLPERF_CLIP_SCORE, 'CLIP score')
    if rows['by_inception'].all():
        axes.axhline(line, **LINE_OF_MLPERF, label='MLPerf')
    axes.set_xlabel('images seen')
    axes.set_ylabel(title)
    lowest = rows[key][rows[key] > 0].min()
    if rows[key].max() > SPAN_OF_LINEAR * lowest:
        axes.set_yscale('log')
        axes.yaxis.set_major_formatter('{x:,g}')
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    for drawn in axes.lines:
        drawn.set_clip_on(False)  # a dot on an axis is whole
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.locator_params(axis='x', nbins=4)
    axes.legend(fontsize=8)
    hours = (rows['gpu_hours'] / rows['images_seen']).round(15).unique()  # of an image
    if len(hours) == 1 and hours[0] > 0:
        top = axes.secondary_xaxis('top', functions=(lambda images: images * hours[0], lambda time: time / hours[0]))
        top.set_xlabel('GPU-hours and dollars', fontsize=9)
        top.xaxis.set_major_formatter(lambda time, _: f'{time:,g}\n${time * dollars_per_gpu_hour:,g}')
        top.locator_params(axis='x', nbins=4)
