"""Draw the pictures of a report: days over GPUs, GPU-hours of plans, what was learned, and scores of evaluations.

matplotlib is imported only when there is something to draw.
"""
import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from sdbench.costs import Prices, days_to_train, price_of
from sdbench.gpus import short_name
from sdbench.records.figures import cell
from sdbench.records.keys import FORECAST
from sdbench.records.read import EVALUATED, EXTRAPOLATED, MEASURED, OF_LOSSES, SCORES, SETTINGS, VERSIONS
from sdbench.report.markdown import differing, names_of_lines, settings_in_words
from sdbench.report.plans import CORRECTED, told_apart_by
from sdbench.report.speeds import one_point_each

COLORS = ('#1f3b73', '#d9730d', '#2a9d8f', '#9b2d5e', '#8fb339', '#7f7f7f', '#6aa8e0', '#f2b84b', '#c0392b')
LINE_INCHES = 0.2  # of text
CAPTION_CHARACTERS = 130
TITLES = {'fid': 'FID', 'clip_score': 'CLIP score', 'images_seen': 'images seen', 'loss': 'eval loss',
          'dollars': 'dollars'}
PANEL_INCHES = 4.8
BAR_INCHES = 0.75
BAR_CHARACTERS = 40  # of a line beside a bar
BIG_TEXT = 14  # points, in a picture that is shown at half its size
HATCHES = {FORECAST: '///', CORRECTED: 'xxx', MEASURED: None}  # of a part of a plan
PANEL_CHARACTERS = 60  # of a line of text above or below a panel


def draw_days(path: str, rows: pd.DataFrame, training_images: int) -> None:
    """Write a picture of days over the number of GPUs, both logarithmic, with a line for each setting.

    Points that were measured are filled. Those that were extrapolated or forecast are hollow, a forecast with its
    range where it is known. A dashed line shows what each setting would reach if its speed grew as its GPUs do.

    Args:
        path: of the picture, whose suffix is its format.
        rows: the table of trainings; those without days are left out.
        training_images: images of a training, which the days are for.

    Raises ValueError if no row has days.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    # a line has one setting, and one point at each number of GPUs: another on more machines, or extrapolated where it
    # was measured, is of another line
    rows = rows[rows['days'].notna()]
    if rows.empty:
        raise ValueError(f'--figure {path}: no training in these records has days; of the model tiny, '
                         '--training_images asks for them')
    rows = one_point_each(rows, ['setting', 'status', 'num_devices', 'num_nodes'])
    rows = rows.assign(days=days_to_train(rows['images_per_sec'], training_images),
                       is_forecast=rows['status'] == FORECAST, is_extrapolated=rows['status'] == EXTRAPOLATED,
                       nodes=pd.to_numeric(rows['num_nodes']))
    rows = rows.sort_values(['num_devices', 'is_extrapolated', 'nodes'], kind='stable')
    rows['line'] = rows.groupby(['setting', 'is_forecast', 'num_devices']).cumcount()
    lines = [points for _, points in rows.groupby(['is_forecast', 'setting', 'line'], sort=False)]

    # a figure with a caption
    same = [key for key in SETTINGS if rows[key].nunique() == 1 and rows[key].iloc[0] != 'no']
    same = [key for key in same if key not in ('stage', *VERSIONS)]
    caption = wrapped(f'All: {settings_in_words(rows.iloc[0], same)}', CAPTION_CHARACTERS)
    height = PANEL_INCHES + LINE_INCHES * (caption.count('\n') + 1)
    figure = Figure(figsize=(10, height), layout='constrained')
    figure.supxlabel(caption, x=0.01, ha='left', fontsize=9)
    axes = figure.subplots()

    # the lines, and what their marks mean: filled if measured, else hollow. Days are in inverse proportion to the speed
    firsts = pd.DataFrame([points.iloc[0] for points in lines])
    what = np.select([firsts['is_forecast'], firsts['is_extrapolated'] & (firsts['line'] > 0)],
                     [', forecast', ', extrapolated'], '')
    firsts.loc[firsts['line'] == 0, 'num_nodes'] = ''  # only where there are others
    firsts['line_of'] = firsts['device'].map(short_name) + what
    keys = [key for key in SETTINGS if key not in ('stage', 'device')]
    names = names_of_lines(firsts, keys, ['num_nodes', 'device'], ['line_of'])
    for points, name, line_of, color in zip(lines, names, firsts['line_of'], colors_of(len(lines)), strict=True):
        first = points.iloc[0]
        gpus, days, speeds = points['num_devices'], points['days'], points['images_per_sec']
        ideal = first['days'] * first['num_devices'] / gpus
        axes.plot(gpus, ideal, '--', color=color, linewidth=0.8, alpha=0.6)
        is_measured = points['status'] == MEASURED
        face = color if is_measured.any() else 'white'
        axes.plot(gpus, days, 'o-', color=color, markerfacecolor=face, linewidth=1.2,
                  label=', '.join(filter(None, [line_of, name])))
        axes.plot(gpus[~is_measured], days[~is_measured], 'o', color=color, markerfacecolor='white')
        axes.vlines(gpus, days * speeds / points['images_per_sec_most'],
                    days * speeds / points['images_per_sec_least'], color=color, linewidth=1.2, zorder=1)
    axes.plot([], [], 'o', color='black', label='measured')
    hollow = 'extrapolated, or forecast'
    if rows['images_per_sec_least'].notna().any():
        hollow += ' with its range'
    axes.plot([], [], 'o', color='black', markerfacecolor='white', label=hollow)
    axes.plot([], [], '--', color='black', linewidth=0.8, label='ideal: twice the GPUs, half the days')

    # both axes logarithmic, with a tick for each number of GPUs
    counts = sorted(rows['num_devices'].unique())
    axes.set(xscale='log', yscale='log', xlabel='GPUs', ylabel=f'days for {training_images:,} images')
    axes.set_xticks(counts, counts)
    axes.minorticks_off()
    least, most = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if most > 10 * least else MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda days, _: f'{days:g}'))
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc='center left', bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=160)


def draw_plan(path: str, plans: pd.DataFrame, title: str) -> None:
    """Write a picture of plans: a bar of GPU-hours for each, in its parts, with the dollars at its end.

    What was forecast is hatched, crosswise where a measurement corrected it, and what was measured is full.

    Args:
        path: of the picture.
        plans: the table of plans.
        title: what is planned.

    Raises ValueError if no plan is of GPUs.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # the first plan stands at the top
    plans = plans[plans['total_gpu_hours'].notna()]
    if plans.empty:
        raise ValueError(f'--figure {path}: a plan on CPUs has no GPU-hours')
    named = told_apart_by(plans)
    names = []
    for _, plan in plans.iterrows():
        how = wrapped(settings_in_words(plan, named), BAR_CHARACTERS)
        names.append(f'{plan["num_devices"]} x {short_name(plan["device"])}\n{how}'.strip())
    figure = Figure(figsize=(10, 2.2 + BAR_INCHES * len(plans)), layout='constrained')
    axes = figure.subplots()

    # its parts, one behind the other
    colors = {}  # by name and size of a part
    for position, plan in enumerate(plans.itertuples()):
        start = 0.0
        for part in plan.parts:
            color = colors.setdefault(f'{part.name} {part.size} px', COLORS[len(colors) % len(COLORS)])
            hours = part.days * 24 * plan.num_devices
            hatch = HATCHES[part.status]
            face = 'white' if hatch else color
            axes.barh(position, hours, left=start, height=0.6, color=face, edgecolor=color, hatch=hatch, linewidth=1.5)
            start += hours
        cost = cell('cost_usd', plan.cost_usd)
        axes.annotate(f' {cost or "no price"}', (start, position), va='center', fontsize=BIG_TEXT)

    # axes and legend, in letters that can be read at half the size
    axes.set_yticks(range(len(plans)), names, fontsize=BIG_TEXT)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel('GPU-hours', fontsize=BIG_TEXT)
    axes.xaxis.set_major_formatter('{x:,.0f}')
    axes.tick_params(axis='x', labelsize=BIG_TEXT)
    axes.spines[['top', 'right']].set_visible(False)
    marks = [Patch(facecolor=color, label=name) for name, color in colors.items()]
    statuses = {part.status for plan in plans.itertuples() for part in plan.parts}
    for status, hatch in HATCHES.items():
        if status in statuses:
            marks.append(Patch(facecolor='white' if hatch else 'black', edgecolor='black', hatch=hatch, label=status))
    figure.legend(handles=marks, loc='outside upper left', ncols=4, frameon=False, fontsize=BIG_TEXT)
    figure.supxlabel(wrapped(title, CAPTION_CHARACTERS * 9 // BIG_TEXT), x=0.01, ha='left', fontsize=BIG_TEXT)
    figure.savefig(path, dpi=160)


def draw_learned(path: str, records: pd.DataFrame, prices: Prices) -> None:
    """Write a picture of the loss on --eval_remote over images seen, and over dollars where these are known.

    A training is one line, with the runs that resumed one another. Those whose losses cannot be compared are in panels
    of their own.

    Args:
        path: of the picture.
        records: the rows of all records.
        prices: of GPUs, instead of those of the records.

    Raises ValueError if no training has evaluations.
    """
    # a row for each evaluation
    rows = []
    for _, training in records[records['stage'] == 'train'].drop_duplicates('training').iterrows():
        images_at, dollars_at = dollars_of_training(training['parts'], prices)
        for images, loss in training['evaluations']:
            dollars = np.interp(images, images_at, dollars_at)
            rows.append(training.to_dict() | {'images_seen': images, 'loss': loss, 'dollars': dollars,
                                              'save_folder': str(training['record'].get('save_folder', ''))})
    if not rows:
        raise ValueError(f'--learned {path}: no training in these records was evaluated; --eval_remote does it')
    rows = pd.DataFrame(rows)
    panels = []
    for _, comparable in rows.groupby(OF_LOSSES, sort=False):
        title = settings_in_words(comparable.iloc[0], differing(rows, OF_LOSSES))
        for across in ('images_seen', 'dollars'):
            if comparable[across].notna().any():
                panels.append(Panel(comparable, across, 'loss', SETTINGS, title, ['save_folder', 'training']))
    draw_panels(path, panels, '')


def dollars_of_training(parts: list[dict], prices: Prices) -> tuple[list[float], list[float]]:
    """Return how many images a training had seen at some moments, and the dollars that it had cost by then.

    Between the end of a run and that of the one that resumed it, dollars grow as images do. They are NaN where a
    record has no GPU-hours, or none of GPUs.

    Args:
        parts: the rows of its runs, in the order of time.
        prices: of GPUs; without any, the records' own.
    """
    images_at = [0.0]
    dollars_at = [0.0]
    hours_before = 0.0
    for part in parts:
        # what it cost
        record = part['record']
        if part['on_cpu'] or not {'gpu_hours', 'batch_size', 'trained_batches'} <= record.keys():
            return [0.0], [math.nan]
        hours = record['gpu_hours'] - hours_before
        hours_before = record['gpu_hours']
        dollars = dollars_at[-1] + hours * price_of(part['device'], prices or part['prices'])
        if not prices:
            dollars = record.get('dollars', dollars)

        # what was trained behind the checkpoint from which it went on was in vain
        first, last = (record.get(key, 0) * record['batch_size'] for key in ('first_batch', 'trained_batches'))
        if first <= images_at[-1]:
            at_checkpoint = float(np.interp(first, images_at, dollars_at))
            kept = sum(images < first for images in images_at)
            images_at[kept:] = [first]
            dollars_at[kept:] = [at_checkpoint]
        images_at.append(last)
        dollars_at.append(dollars)
    return images_at, dollars_at


def draw_quality(path: str, rows: pd.DataFrame, caption: str) -> None:
    """Write a picture of a table of scores.

    One panel shows FID against CLIP score, a line for each checkpoint over its guidance scales. Two show FID and CLIP
    score against the images of the training, a line for each model and guidance scale. Scores that differ in one of
    their settings in EVALUATED are never on one line. The notes of the scores stand below.

    Args:
        path: of the picture.
        rows: the table.
        caption: text below the panels.

    Raises ValueError if there is nothing to draw.
    """
    panels = [Panel(rows, 'clip_score', 'fid', [*EVALUATED, 'trained_batches'])]
    for score in SCORES:
        alike = [key for key, scores in EVALUATED.items() if score in scores]
        panels.append(Panel(rows, 'images_seen', score, [*alike, 'guidance']))
    panels = [panel for panel in panels if len(rows.dropna(subset=[panel.across, panel.up]))]
    if not panels:
        raise ValueError(f'--quality {path}: no evaluation has both scores, or the images of its training')
    draw_panels(path, panels, '\n'.join([caption, *filter(None, rows['notes'].unique())]))


class Panel(NamedTuple):
    """A panel of lines.

    Attributes:
        rows: the points.
        across: the column across.
        up: the column up.
        line_keys: the columns that a line agrees in.
        title: text above it.
        more_keys: more such columns, which name lines only where these are alike without them.
    """
    rows: pd.DataFrame
    across: str
    up: str
    line_keys: list[str]
    title: str = ''
    more_keys: Sequence[str] = ()


def draw_panels(path: str, panels: list[Panel], caption: str) -> None:
    """Write a picture of panels, with a caption below them."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(layout='constrained')
    figure.supxlabel(wrapped(caption, PANEL_CHARACTERS * len(panels)), x=0.01, ha='left', fontsize=9)
    most_lines = 0  # of a legend
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows, across, up, line_keys, title, more_keys = panel
        # lines, named by what distinguishes them
        groups = rows.dropna(subset=[across, up]).groupby([*line_keys, *more_keys], dropna=False)
        lines = [points for _, points in groups]
        names = names_of_lines(pd.DataFrame([points.iloc[0] for points in lines]), line_keys, more_keys)
        for points, name, color in zip(lines, names, colors_of(len(lines)), strict=True):
            label = [name]
            if across == 'clip_score':
                label.append('guidance ' + ', '.join(f'{scale:g}' for scale in points['guidance']))
            axes.plot(points[across], points[up], marker='o', markersize=4, color=color,
                      label=wrapped(', '.join(filter(None, label)), PANEL_CHARACTERS))

        # axes, and the legend below them
        axes.set_title(wrapped(title, PANEL_CHARACTERS), fontsize=9)
        axes.locator_params(axis='x', nbins=5)  # more may overlap
        axes.set_xlabel(TITLES[across])
        axes.set_ylabel(TITLES[up])
        if across == 'images_seen':
            axes.xaxis.set_major_formatter(EngFormatter())
        labels = axes.get_legend_handles_labels()[1]
        if labels:
            axes.legend(loc='upper left', bbox_to_anchor=(0, -0.15), frameon=False, fontsize=8)
            most_lines = max(most_lines, '\n'.join(labels).count('\n') + 1)
        axes.spines[['top', 'right']].set_visible(False)
    figure.set_size_inches(PANEL_INCHES * max(1.4, len(panels)), PANEL_INCHES + LINE_INCHES * most_lines)
    figure.savefig(path, dpi=160)


def colors_of(lines: int) -> Sequence:
    """Return a color for each line; those of more lines than COLORS has are all of a rainbow."""
    if lines <= len(COLORS):
        return COLORS[:lines]
    from matplotlib import colormaps
    return colormaps['turbo'](np.linspace(0.05, 0.95, lines))


def wrapped(text: str, characters: int) -> str:
    return '\n'.join(textwrap.fill(line, characters) for line in text.splitlines())
