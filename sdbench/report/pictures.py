"""Draw the pictures of a report: days over GPUs, GPU-hours of plans, what was learned, and scores of evaluations.

matplotlib is imported only when there is something to draw.
"""
import textwrap
from typing import NamedTuple

import pandas as pd

from sdbench.costs import Prices, gpu_hours, price_of
from sdbench.gpus import short_name
from sdbench.records.figures import cell
from sdbench.records.keys import FORECAST
from sdbench.records.read import COMPARABLE, CONDITIONS, MEASURED, NETWORKS, SETTINGS, VERSIONS
from sdbench.report.markdown import differing, settings_in_words
from sdbench.report.plans import CORRECTED

COLORS = ('#1f3b73', '#d9730d', '#2a9d8f', '#9b2d5e', '#8fb339', '#7f7f7f', '#6aa8e0', '#f2b84b', '#c0392b')
LINE_INCHES = 0.2  # of text
CAPTION_CHARACTERS = 130
TITLES = {'fid': 'FID', 'clip_score': 'CLIP score', 'images_seen': 'images seen', 'loss': 'eval loss',
          'dollars': 'dollars'}
PANEL_INCHES = 4.8
BAR_INCHES = 0.75
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
    from matplotlib.ticker import FuncFormatter, LogLocator

    # a line has one setting and one value at each number of GPUs. A forecast takes the largest microbatch, which gets
    # smaller with more GPUs: its lines have any, unless there are several at one number of GPUs
    rows = rows[rows['days'].notna()].sort_values('num_devices', kind='stable')
    if rows.empty:
        raise ValueError(f'--figure {path}: no training in these records has days; of the model tiny, '
                         '--training_images asks for them')
    microbatch = 'device_train_microbatch_size'
    others = [key for key in SETTINGS if key != microbatch]
    is_one_line = (rows['status'] == FORECAST) & ~rows.duplicated(['status', *others, 'num_devices'], keep=False)
    rows[microbatch] = rows[microbatch].mask(is_one_line, '')
    rows['is_forecast'] = rows['status'] == FORECAST
    lines = rows.groupby(['is_forecast', *SETTINGS], sort=False)

    # a figure with a caption
    same = [key for key in SETTINGS if rows[key].nunique() == 1 and rows[key].iloc[0] != 'no']
    same = [key for key in same if key not in ('stage', *VERSIONS)]
    caption = wrapped(f'All: {settings_in_words(rows.iloc[0], same)}', CAPTION_CHARACTERS)
    height = PANEL_INCHES + LINE_INCHES * (caption.count('\n') + 1)
    figure = Figure(figsize=(10, height), layout='constrained')
    figure.supxlabel(caption, x=0.01, ha='left', fontsize=9)
    axes = figure.subplots()

    # the lines, and what their marks mean: filled if measured, else hollow. Days are in inverse proportion to the speed
    keys = [key for key in differing(rows, SETTINGS, unstated=False) if key not in ('stage', 'device')]
    for number, (_, points) in enumerate(lines):
        first = points.iloc[0]
        words = [short_name(first['device']), settings_in_words(first, keys)]
        if first['is_forecast']:
            words.append('forecast')
        color = COLORS[number % len(COLORS)]
        gpus, days, speeds = points['num_devices'], points['days'], points['images_per_sec']
        ideal = first['days'] * first['num_devices'] / gpus
        axes.plot(gpus, ideal, '--', color=color, linewidth=0.8, alpha=0.6)
        is_measured = points['status'] == MEASURED
        face = color if is_measured.any() else 'white'
        axes.plot(gpus, days, 'o-', color=color, markerfacecolor=face, linewidth=1.2,
                  label=', '.join(filter(None, words)))
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
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
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
    named = [key for key in differing(plans, SETTINGS) if key in ('input', 'compile')]
    names = []
    for _, plan in plans.iterrows():
        names.append(f'{plan["num_devices"]} x {short_name(plan["device"])}\n{settings_in_words(plan, named)}'.strip())
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

    Runs that resumed one another are one line. Those whose losses cannot be compared are in panels of their own.
    Dollars follow from the images and a speed that may be relied on.

    Args:
        path: of the picture.
        records: the rows of all records.
        prices: of GPUs.

    Raises ValueError if no training has evaluations.
    """
    # a row for each evaluation; of a batch that was evaluated again, the last counts
    rows = []
    for _, runs in records[records['stage'] == 'train'].groupby(SETTINGS, sort=False):
        speed = runs.loc[(runs['status'] == MEASURED) & ~runs['on_cpu'], 'images_per_sec'].median()  # NaN of none
        for _, run in runs.iterrows():
            for images, loss in run['record'].get('evaluations', ()):
                dollars = gpu_hours(speed, run['num_devices'], images) * price_of(run['device'], prices)
                rows.append(run.to_dict() | {'images_seen': images, 'loss': loss, 'dollars': dollars})
    if not rows:
        raise ValueError(f'--learned {path}: no training in these records was evaluated; --eval_remote does it')
    rows = pd.DataFrame(rows).drop_duplicates([*SETTINGS, 'images_seen'], keep='last').sort_values('images_seen')
    panels = []
    for _, comparable in rows.groupby(COMPARABLE, sort=False):
        title = settings_in_words(comparable.iloc[0], differing(rows, COMPARABLE))
        for across in ('images_seen', 'dollars'):
            if comparable[across].notna().any():
                panels.append(Panel(comparable, across, 'loss', SETTINGS, title))
    draw_panels(path, panels, '')


def draw_quality(path: str, rows: pd.DataFrame, caption: str) -> None:
    """Write a picture of a table of scores.

    One panel shows FID against CLIP score, a line for each checkpoint over its guidance scales. Two show FID and CLIP
    score against the images of the training, a line for each model and guidance scale. Scores that differ in one of
    CONDITIONS, or in the columns of their NETWORKS, are never on one line. The notes of the scores stand below.

    Args:
        path: of the picture.
        rows: the table.
        caption: text below the panels.

    Raises ValueError if there is nothing to draw.
    """
    networks = [*NETWORKS['fid'], *NETWORKS['clip_score']]
    panels = [Panel(rows, 'clip_score', 'fid', [*CONDITIONS, *networks, 'trained_batches']),
              Panel(rows, 'images_seen', 'fid', [*CONDITIONS, *NETWORKS['fid'], 'guidance']),
              Panel(rows, 'images_seen', 'clip_score', [*CONDITIONS, *NETWORKS['clip_score'], 'guidance'])]
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
    """
    rows: pd.DataFrame
    across: str
    up: str
    line_keys: list[str]
    title: str = ''


def draw_panels(path: str, panels: list[Panel], caption: str) -> None:
    """Write a picture of panels, with a caption below them."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(layout='constrained')
    figure.supxlabel(wrapped(caption, PANEL_CHARACTERS * len(panels)), x=0.01, ha='left', fontsize=9)
    most_lines = 0  # of a legend
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows, across, up, line_keys, title = panel
        # lines, named by what distinguishes them
        named = differing(rows, line_keys, unstated=False)
        for number, (_, points) in enumerate(rows.dropna(subset=[across, up]).groupby(line_keys, dropna=False)):
            label = [settings_in_words(points.iloc[0], named)]
            if across == 'clip_score':
                label.append('guidance ' + ', '.join(f'{scale:g}' for scale in points['guidance']))
            axes.plot(points[across], points[up], marker='o', markersize=4, color=COLORS[number % len(COLORS)],
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


def wrapped(text: str, characters: int) -> str:
    return '\n'.join(textwrap.fill(line, characters) for line in text.splitlines())
