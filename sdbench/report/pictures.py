"""Draw the figures of a report: days over GPUs, GPU-hours of plans, what was learned, and scores of evaluations.

matplotlib is imported only when there is something to draw. A function that finds nothing to draw raises UserError.
"""
import io
import json
import math
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sdbench.costs import SECONDS_PER_DAY, Prices, days_to_train, price_of
from sdbench.errors import UserError
from sdbench.gpus import short_name
from sdbench.records.figures import cell, days_in_words, rounded
from sdbench.records.read import EVALUATION_SETTINGS, EXTRAPOLATED, LOSS_SETTINGS, MEASURED, WITH_FIGURES
from sdbench.records.setup import SETTINGS, VERSIONS
from sdbench.records.status import FORECAST
from sdbench.report.markdown import differing, names_of_lines, settings_in_words, settings_of_recipes
from sdbench.report.plans import CORRECTED, PartOfPlan, gpus_of
from sdbench.report.speeds import one_of_each_number

COLORS = ('#1f3b73', '#d9730d', '#2a9d8f', '#9b2d5e', '#8fb339', '#7f7f7f', '#6aa8e0', '#f2b84b', '#c0392b')
MARKERS = 'os^Dv<>ph*P'
LINE_INCHES = 0.2  # of text
CAPTION_CHARACTERS = 130
TITLES = {'fid': 'FID', 'clip_score': 'CLIP score', 'images_seen': 'images seen', 'loss': 'eval loss',
          'dollars': 'dollars', 'guidance': 'guidance'}
DECIMALS = {'fid': 2, 'clip_score': 2, 'images_seen': 0, 'loss': 4, 'dollars': 2, 'guidance': 1}
PANEL_INCHES = 4.8
BIG_TEXT = 14  # points, in a picture that is shown at half its size
HATCHES = {FORECAST: '///', CORRECTED: 'xxx', MEASURED: None}  # of a part of a plan
PANEL_CHARACTERS = 60  # of a line of text above or below a panel
SVG = 'http://www.w3.org/2000/svg'


def save(figure: Any, path: str) -> None:
    """Write a figure to a file, whose suffix is its format."""
    keep_dollars(figure)
    if path.lower().endswith('.svg'):
        Path(path).write_text(svg_of(figure))
    else:
        figure.savefig(path, dpi=160)


def keep_dollars(figure: Any) -> None:
    """Keep matplotlib from reading what stands between two dollar signs as TeX, which a name in a record may have."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)


def set_hover(artist: Any, texts: Iterable[str]) -> None:
    """Set the texts that the points of a line, or a bar, show on hover in an SVG file. `svg_of` reads them."""
    texts = list(texts)
    if texts:  # a line without points has none
        artist.set_gid(json.dumps(texts))


def svg_of(figure: Any) -> str:
    """Return a figure as SVG, in which text stays text and points have the texts that `set_hover` gave them."""
    from matplotlib import rc_context

    keep_dollars(figure)
    file = io.StringIO()
    fonts = ['DejaVu Sans', 'Verdana', 'Arial']  # a reader's machine has one of them
    with rc_context({'svg.fonttype': 'none', 'font.sans-serif': fonts}):
        figure.savefig(file, format='svg', metadata={'Date': None})
    ElementTree.register_namespace('', SVG)
    ElementTree.register_namespace('xlink', 'http://www.w3.org/1999/xlink')
    root = ElementTree.fromstring(file.getvalue())
    for group in list(root.iter(f'{{{SVG}}}g')):
        name = group.attrib.pop('id', '')  # nothing refers to a group, and a page may have several figures
        if name.startswith('['):
            points = list(group.iter(f'{{{SVG}}}use')) or [group]  # each point of a line, or the bar
            for point, text in zip(points, json.loads(name), strict=True):
                ElementTree.SubElement(point, f'{{{SVG}}}title').text = text
    return ElementTree.tostring(root, encoding='unicode')


def words_of_point(row: pd.Series, name: str) -> str:
    """Return what a point of days or a part of a plan is: GPUs, speed, days, dollars, status and date."""
    speed = f'{rounded(row["images_per_sec"], 1)} images/s'
    if pd.notna(row['images_per_sec_least']):
        speed += f' ({rounded(row["images_per_sec_least"], 1)} to {rounded(row["images_per_sec_most"], 1)})'
    days = days_in_words(row['days'], ' days') if pd.notna(row['days']) else ''
    words = [gpus_of(row), name, speed, days, cell('cost_usd', row['cost_usd']), row['status'], row['date'][:10]]
    return '\n'.join(filter(None, words))


def draw_days(rows: pd.DataFrame, training_images: int) -> Any:
    """Draw days over the number of GPUs, both logarithmic, with a line for each setting.

    Each GPU model has one color. Points that were measured are filled. Those that were extrapolated or forecast are
    hollow, a forecast with its range where it is known. A cross marks GPUs on which a run failed or was not reliable. A
    dashed line shows what each setting would reach if its speed grew as its GPUs do.

    Args:
        rows: the table of trainings; those without days are only marked.
        training_images: images of a training, which the days are for.

    Raises UserError if no row has days.
    """
    from matplotlib.figure import Figure

    # a line has one setting, of which a forecast has a line of its own
    doubtful = rows[~rows['status'].isin(WITH_FIGURES)]
    rows = rows[rows['days'].notna()]
    if rows.empty:
        raise UserError('no training in these records has days; of the model tiny, --training_images asks for them')
    rows = rows.assign(is_forecast=rows['status'] == FORECAST, is_extrapolated=rows['status'] == EXTRAPOLATED)
    rows = one_of_each_number(rows.sort_values('is_extrapolated', kind='stable'), ['is_forecast', 'setting'])
    days = days_to_train(rows['images_per_sec'], training_images)
    rows = rows.assign(days=days, cost_usd=rows['cost_usd'] * days / rows['days'])
    lines = [points for _, points in rows.groupby(['is_forecast', 'setting'], sort=False)]
    lines.sort(key=lambda points: -points['days'].iloc[0])  # the legend stands in the order of the lines

    # a figure with a caption
    same = [key for key in SETTINGS if rows[key].nunique() == 1 and rows[key].iloc[0] != 'no']
    same = [key for key in same if key not in ('stage', *VERSIONS)]
    caption = wrapped(f'All: {settings_in_words(rows.iloc[0], same)}', CAPTION_CHARACTERS)
    height = PANEL_INCHES + LINE_INCHES * (caption.count('\n') + 1)
    figure = Figure(figsize=(10, height), layout='constrained')
    figure.supxlabel(caption, x=0.01, ha='left', fontsize=9)
    axes = figure.subplots()

    # the lines, and what their marks mean
    devices = list(dict.fromkeys(short_name(points['device'].iloc[0]) for points in lines))
    color_of = dict(zip(devices, colors_of(len(devices)), strict=True))
    drawn = Counter()  # lines of each GPU, which differ in their markers
    for points, name in zip(lines, names_of_days(lines), strict=True):
        device = short_name(points['device'].iloc[0])
        draw_line_of_days(axes, points, name, color_of[device], MARKERS[drawn[device] % len(MARKERS)])
        drawn[device] += 1
        mark_doubtful(axes, points, doubtful, training_images)
    axes.plot([], [], 'o', color='black', label='measured')
    hollow = 'extrapolated, or forecast'
    if rows['images_per_sec_least'].notna().any():
        hollow += ' with its range'
    axes.plot([], [], 'o', color='black', markerfacecolor='white', label=hollow)
    if doubtful['setting'].isin(rows['setting']).any():
        axes.plot([], [], 'x', color='red', label='a run here failed or was not reliable')
    axes.plot([], [], '--', color='black', linewidth=0.8, label='ideal: twice the GPUs, half the days')
    set_axes_of_days(axes, rows, training_images)
    return figure


def names_of_days(lines: list[pd.DataFrame]) -> list[str]:
    """Return a name for each line of days: the GPU, its program or recipe, settings, and whether it is a forecast.

    Settings are those in which lines differ that state them, or where two lines would have the same name, all in which
    lines differ. What all lines share is in no name.
    """
    firsts = pd.DataFrame([points.iloc[0] for points in lines])
    differ = [key for key in differing(firsts, SETTINGS) if key not in ('stage', 'device')]
    recipe_keys = {key for settings in settings_of_recipes().values() for key in settings}
    stated = [key for key in differ if key in ('program', *recipe_keys)
              or firsts[key].replace('', None).nunique() > 1]
    names = []
    for keys, with_defaults in ((stated, False), (differ, True)):
        names = []
        for _, first in firsts.iterrows():
            parts = [short_name(first['device']), settings_in_words(first, keys, with_defaults)]
            if first['is_forecast'] and not firsts['is_forecast'].all():
                parts.append('forecast')
            names.append(', '.join(filter(None, parts)))
        if len(set(names)) == len(names):
            break
    return names


def mark_doubtful(axes: Any, points: pd.DataFrame, doubtful: pd.DataFrame, training_images: int) -> None:
    """Mark on a line of measurements the GPU counts of runs that failed or were not reliable.

    A count without a point gets one at the speed that was not reliable; one that failed without a speed has no place.
    """
    if points['is_forecast'].iloc[0]:
        return
    days_at = dict(zip(points['num_devices'], points['days'], strict=True))
    for _, run in doubtful[doubtful['setting'] == points['setting'].iloc[0]].iterrows():
        days = days_at.get(run['num_devices'])
        if days is None and run['images_per_sec'] > 0:
            days = days_to_train(run['images_per_sec'], training_images)
        if days is not None:
            [cross] = axes.plot([run['num_devices']], [days], 'x', color='red', markersize=9, markeredgewidth=2,
                                zorder=3)
            set_hover(cross, [f'{gpus_of(run)}\n{run["notes"]}\n{run["date"][:10]}'.strip()])


def set_axes_of_days(axes: Any, rows: pd.DataFrame, training_images: int) -> None:
    """Make both axes logarithmic, with a tick for each GPU count, and put the legend beside them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

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


def draw_line_of_days(axes: Any, points: pd.DataFrame, label: str, color: str, marker: str) -> None:
    """Draw the days of one setting with their ranges, and what they would be if the speed grew as the GPUs do."""
    gpus, days, speeds = points['num_devices'], points['days'], points['images_per_sec']
    ideal = days.iloc[0] * gpus.iloc[0] / gpus
    axes.plot(gpus, ideal, '--', color=color, linewidth=0.8, alpha=0.6)

    # filled if measured, else hollow
    is_measured = points['status'] == MEASURED
    face = color if is_measured.any() else 'white'
    words = pd.Series([words_of_point(point, label) for _, point in points.iterrows()], points.index)
    [line] = axes.plot(gpus, days, f'{marker}-', color=color, markerfacecolor=face, linewidth=1.2, label=label)
    set_hover(line, words)
    [hollow] = axes.plot(gpus[~is_measured], days[~is_measured], marker, color=color, markerfacecolor='white')
    set_hover(hollow, words[~is_measured])

    # days are in inverse proportion to the speed
    axes.vlines(gpus, days * speeds / points['images_per_sec_most'],
                days * speeds / points['images_per_sec_least'], color=color, linewidth=1.2, zorder=1)


def draw_plan(plans: pd.DataFrame, apart: list[str], title: str) -> Any:
    """Draw plans: a bar of GPU-hours for each, in its parts, with the dollars at its end.

    What was forecast is hatched, crosswise where a measurement corrected it, and what was measured is full.

    Args:
        plans: the table of plans.
        apart: the settings by which they are told apart.
        title: what is planned.

    Raises UserError if no plan is of GPUs.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # the first plan stands at the top
    plans = plans[plans['total_gpu_hours'].notna()]
    if plans.empty:
        raise UserError('a plan on CPUs has no GPU-hours')
    names = []
    for _, plan in plans.iterrows():
        how = wrapped(settings_in_words(plan, apart), 40)
        names.append(f'{plan["num_devices"]} x {short_name(plan["device"])}\n{how}'.strip())
    figure = Figure(figsize=(10, 2.2 + 0.75 * len(plans)), layout='constrained')
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
            bar = axes.barh(position, hours, left=start, height=0.6, color=face, edgecolor=color, hatch=hatch,
                            linewidth=1.5)
            set_hover(bar[0], [words_of_part(plan, part)])
            start += hours
        cost = cell('cost_usd', plan.cost_usd)
        axes.annotate(cost or 'no price', (start, position), (5, 0), textcoords='offset points', va='center',
                      fontsize=BIG_TEXT)

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
    return figure


def words_of_part(plan: Any, part: PartOfPlan) -> str:
    """Return what a bar of a plan is: GPUs, part, speed, days with their range, dollars, status and date."""
    speeds = [part.images / days / SECONDS_PER_DAY for days in (part.days, part.most, part.least)]
    figures = dict(zip(('images_per_sec', 'images_per_sec_least', 'images_per_sec_most'), speeds, strict=True))
    if part.most == part.least:
        figures['images_per_sec_least'] = math.nan  # measured or corrected: it has no range
    row = pd.Series({'device': plan.device, 'num_devices': plan.num_devices, 'input': plan.input, 'days': part.days,
                     'cost_usd': part.days * 24 * plan.num_devices * plan.price, 'status': part.status,
                     'date': part.date} | figures)
    return words_of_point(row, f'{part.name} {part.size} px')


def draw_learned(records: pd.DataFrame, prices: Prices) -> Any:
    """Draw the loss on --eval_remote over images seen, and over dollars where these are known.

    A training is one line, with the runs that resumed one another, and its dollars grow as its images do. Those whose
    losses cannot be compared are in panels of their own.

    Args:
        records: the rows of all records.
        prices: of GPUs, instead of those of the records.

    Raises UserError if no training has evaluations.
    """
    # a row for each evaluation
    rows = []
    for _, training in records[records['stage'] == 'train'].drop_duplicates('training').iterrows():
        dollars = dollars_an_image(training, prices)
        for images, loss in training['evaluations']:
            rows.append(training.to_dict() | {'images_seen': images, 'loss': loss, 'dollars': images * dollars,
                                              'save_folder': str(training['record'].get('save_folder', ''))})
    if not rows:
        raise UserError('no training in these records was evaluated; --eval_remote does it')
    rows = pd.DataFrame(rows)
    panels = []
    for _, comparable in rows.groupby(LOSS_SETTINGS, sort=False):
        title = settings_in_words(comparable.iloc[0], differing(rows, LOSS_SETTINGS))
        for across in ('images_seen', 'dollars'):
            if comparable[across].notna().any():
                panels.append(Panel(comparable, across, 'loss', [*SETTINGS, 'save_folder', 'training'], title))
    return draw_panels(panels, 'No panel of dollars: no run was on a GPU.' if rows['on_cpu'].all() else '')


def dollars_an_image(training: pd.Series, prices: Prices) -> float:
    """Return what a training has cost up to its end, over the images that it has seen; NaN where it does not say.

    Args:
        training: its row.
        prices: of GPUs; without any, the record's own.
    """
    record = training['record']
    if training['on_cpu'] or not record.get('trained_batches') or not {'gpu_hours', 'batch_size'} <= record.keys():
        return math.nan
    dollars = record['gpu_hours'] * price_of(training['device'], prices or training['prices'])
    if not prices:
        dollars = record.get('dollars', dollars)
    return dollars / (record['trained_batches'] * record['batch_size'])


def draw_quality(rows: pd.DataFrame, caption: str) -> Any:
    """Draw a table of scores.

    One panel shows FID against CLIP score, a line for each checkpoint over its guidance scales. Two show FID and CLIP
    score against the images of the training, a line for each model and guidance scale. Scores that differ in one of
    their settings in EVALUATION_SETTINGS are never on one line. The notes of the scores stand below.

    Args:
        rows: the table.
        caption: text below the panels.

    Raises UserError if there is nothing to draw.
    """
    panels = [Panel(rows, 'clip_score', 'fid', [*EVALUATION_SETTINGS, 'trained_batches'])]
    for score in ('fid', 'clip_score'):
        panels.append(Panel(rows, 'images_seen', score, [*EVALUATION_SETTINGS, 'guidance']))
    panels = [panel for panel in panels if len(rows.dropna(subset=[panel.across, panel.up]))]
    if not panels:
        raise UserError('no evaluation has both scores, or the images of its training')
    return draw_panels(panels, '\n'.join([caption, *filter(None, rows['notes'].unique())]))


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


def draw_panels(panels: list[Panel], caption: str) -> Any:
    """Draw panels side by side, with a caption below them."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(layout='constrained')
    figure.supxlabel(wrapped(caption, PANEL_CHARACTERS * len(panels)), x=0.01, ha='left', fontsize=9)
    most_lines = 0  # of a legend
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows, across, up, line_keys, title = panel
        # lines, named by what distinguishes them
        groups = rows.dropna(subset=[across, up]).groupby(line_keys, dropna=False)
        lines = [points for _, points in groups]
        names = names_of_lines(pd.DataFrame([points.iloc[0] for points in lines]), line_keys)
        for points, name, color in zip(lines, names, colors_of(len(lines)), strict=True):
            label = [name]
            if across == 'clip_score':
                label.append('guidance ' + ', '.join(f'{scale:g}' for scale in points['guidance']))
            [line] = axes.plot(points[across], points[up], marker='o', markersize=4, color=color,
                               label=wrapped(', '.join(filter(None, label)), PANEL_CHARACTERS))
            set_hover(line, [words_of_result(point, name, (across, up)) for _, point in points.iterrows()])

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
    return figure


def words_of_result(row: pd.Series, name: str, keys: Sequence[str]) -> str:
    """Return what a point of a panel is: GPUs, the name of its line, its figures, and the date of its record."""
    gpus = gpus_of(row) if 'num_devices' in row else row['model']  # of a training, or of an evaluation
    figures = [f'{TITLES[key]} {rounded(row[key], DECIMALS[key])}' for key in keys]
    for key in ('guidance', 'dollars'):
        if key not in keys and pd.notna(row.get(key)):
            figures.append(f'{TITLES[key]} {rounded(row[key], DECIMALS[key])}')
    return '\n'.join(filter(None, [gpus, name, *figures, str(row['record'].get('date', ''))[:10]]))


def colors_of(lines: int) -> Sequence:
    """Return a color for each line; those of more lines than COLORS has are all of a rainbow."""
    if lines <= len(COLORS):
        return COLORS[:lines]
    from matplotlib import colormaps
    return colormaps['turbo'](np.linspace(0.05, 0.95, lines))


def wrapped(text: str, characters: int) -> str:
    return '\n'.join(textwrap.fill(line, characters) for line in text.splitlines())
