"""Draw the figures of a report: days over GPUs, eval losses of trainings, and evaluation scores.

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

from sdbench.costs import Prices, days_to_train, price_of
from sdbench.errors import UserError
from sdbench.flags.train import SD2_BASE
from sdbench.forecast.forecast import forecast
from sdbench.gpus import CARDS, short_name
from sdbench.records.expected import NO_FORECAST
from sdbench.records.metrics import format_days, format_metric, rounded
from sdbench.records.read import (
    EVALUATION_SETTINGS,
    EXTRAPOLATED,
    LOSS_SETTINGS,
    MEASURED,
    WITH_FIGURES,
    speed_row,
)
from sdbench.records.settings import EVAL_DATA, SETTINGS, VERSIONS
from sdbench.records.status import COMPLETE, FORECAST
from sdbench.report.markdown import (
    describe_gpus,
    describe_settings,
    differing_settings,
    line_labels,
    recipe_flags,
    recipe_settings,
)
from sdbench.report.speeds import one_row_per_gpu_count
from sdbench.setup import setup_of_record

COLORS = ('#1f3b73', '#d9730d', '#2a9d8f', '#9b2d5e', '#8fb339', '#7f7f7f', '#6aa8e0', '#f2b84b', '#c0392b')
MARKERS = 'os^Dv<>ph*P'
LINE_INCHES = 0.2  # height of a line of text
CAPTION_CHARACTERS = 130  # in a line of the caption of a wide figure
TITLES = {'fid': 'FID', 'clip_score': 'CLIP score', 'images_seen': 'images seen', 'loss': 'eval loss',
          'dollars': 'dollars', 'guidance': 'guidance'}
DECIMALS = {'fid': 2, 'clip_score': 2, 'images_seen': 0, 'loss': 4, 'dollars': 2, 'guidance': 1}
PANEL_INCHES = 4.8
PANEL_CHARACTERS = 60  # in a line of text above or below a panel
SVG = 'http://www.w3.org/2000/svg'
FORECAST_GPUS = ('NVIDIA A100-SXM4-80GB', 'NVIDIA H100 80GB HBM3', 'NVIDIA H200', 'NVIDIA B200')


def save(figure: Any, path: str) -> None:
    """Write a figure to a file, whose suffix gives the format."""
    disable_math_text(figure)
    if path.lower().endswith('.svg'):
        Path(path).write_text(svg_of(figure))
    else:
        figure.savefig(path, dpi=160)


def disable_math_text(figure: Any) -> None:
    """Keep matplotlib from reading text between two dollar signs as TeX: prices and names in records may have them."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)


def set_tooltips(artist: Any, texts: Iterable[str]) -> None:
    """Set a tooltip for each point of a line, or for a bar.

    The tooltips are stored as the id of the artist's SVG group. `svg_of` turns the id into tooltips.
    """
    texts = list(texts)
    if texts:  # a line without points has no group
        artist.set_gid(json.dumps(texts))


def svg_of(figure: Any) -> str:
    """Return a figure as SVG, with text instead of outlines of letters, and with the tooltips of `set_tooltips`."""
    from matplotlib import rc_context

    disable_math_text(figure)
    file = io.StringIO()
    fonts = ['DejaVu Sans', 'Verdana', 'Arial']  # most systems have one of these
    with rc_context({'svg.fonttype': 'none', 'font.sans-serif': fonts}):
        figure.savefig(file, format='svg', metadata={'Date': None})
    ElementTree.register_namespace('', SVG)
    ElementTree.register_namespace('xlink', 'http://www.w3.org/1999/xlink')
    root = ElementTree.fromstring(file.getvalue())
    for group in list(root.iter(f'{{{SVG}}}g')):
        name = group.attrib.pop('id', '')  # ids would clash on a page with several figures, and nothing refers to them
        if name.startswith('['):  # JSON from `set_tooltips`
            points = list(group.iter(f'{{{SVG}}}use')) or [group]  # the points of a line, or a bar
            for point, text in zip(points, json.loads(name), strict=True):
                ElementTree.SubElement(point, f'{{{SVG}}}title').text = text
    return ElementTree.tostring(root, encoding='unicode')


def point_tooltip(row: pd.Series, name: str) -> str:
    """Return a tooltip with the GPUs, `name`, the speed with its range, days, dollars, status and date of a row."""
    speed = f'{rounded(row["images_per_sec"], 1)} images/s'
    if pd.notna(row.get('images_per_sec_least')):
        speed += f' ({rounded(row["images_per_sec_least"], 1)} to {rounded(row["images_per_sec_most"], 1)})'
    days = format_days(row['days'], ' days') if pd.notna(row['days']) else ''
    cost = format_metric('cost_usd', row['cost_usd'])
    lines = [describe_gpus(row), name, speed, days, cost, row['status'], row['date'][:10]]
    return '\n'.join(filter(None, lines))


def draw_days(rows: pd.DataFrame, training_images: int) -> Any:
    """Draw days over GPU counts on logarithmic axes, with a line for each setting.

    Each GPU model has one color. Measured points are filled, extrapolated points are hollow, and so are forecasts for
    recipes/fastest.txt on FORECAST_GPUS. A vertical line shows the range of a forecast. A red cross marks GPU counts on
    which a run failed or was not reliable. A dashed line shows ideal scaling: twice the GPUs, half the days.

    Args:
        rows: the table of trainings. Rows without days only get a cross.
        training_images: images of the training that the days are for.

    Raises UserError if no row has days.
    """
    from matplotlib.figure import Figure

    doubtful = rows[~rows['status'].isin(WITH_FIGURES)]
    rows = rows[rows['days'].notna()]
    if rows.empty:
        raise UserError('no training in these records has days; for the tiny model, --training_images adds them')
    rows = pd.concat([rows, forecast_rows(rows, training_images)])
    lines = lines_of_days(rows, training_images)
    rows = pd.concat(lines)

    # The caption below the figure has the settings that all lines share, without switches that are off.
    named = [key for key in SETTINGS if key not in ('stage', *VERSIONS)]
    shared = [key for key in named if rows[key].nunique() == 1 and rows[key].iloc[0] != 'no']
    caption = wrapped(f'All: {describe_settings(rows.iloc[0], shared)}', CAPTION_CHARACTERS)
    height = PANEL_INCHES + LINE_INCHES * (caption.count('\n') + 1)
    figure = Figure(figsize=(10, height), layout='constrained')
    figure.supxlabel(caption, x=0.01, ha='left', fontsize=9)
    axes = figure.subplots()

    # Lines of one GPU model have one color and differ in their markers.
    devices = list(dict.fromkeys(short_name(points['device'].iloc[0]) for points in lines))
    color_of = dict(zip(devices, line_colors(len(devices)), strict=True))
    lines_of_device = Counter()
    for points, label in zip(lines, days_line_labels(lines), strict=True):
        device = short_name(points['device'].iloc[0])
        draw_line_of_days(axes, points, label, color_of[device], MARKERS[lines_of_device[device] % len(MARKERS)])
        lines_of_device[device] += 1
        mark_doubtful(axes, points, doubtful, training_images)
    explain_marks(axes, rows, doubtful)
    set_axes_of_days(axes, rows, training_images)
    return figure


def forecast_rows(rows: pd.DataFrame, training_images: int) -> pd.DataFrame:
    """Return rows with forecasts for recipes/fastest.txt, on FORECAST_GPUS and on the GPU counts of the rows.

    Image size, batch, input and EMA are those of the first row, whose prices count. There are no rows if it does not
    state its batch, or if it is not of Stable Diffusion 2.
    """
    first = rows.iloc[0]
    own = {key: first['record'][key] for key in ('image_size', 'batch_size', 'use_ema', 'encoders')
           if key in first['record']}
    found = []
    is_sd2 = 'batch_size' in own and first['model_name'] in ('', SD2_BASE)
    for device in FORECAST_GPUS if is_sd2 else ():
        for count in sorted(rows['num_devices'].unique()):
            record = recipe_flags('fastest.txt') | own | {
                'stage': 'train', 'status': COMPLETE, 'extrapolated': False, 'command': 'benchmark.py',
                'device': device, 'num_devices': int(count)}
            if count > own['batch_size']:
                continue
            try:
                expected = forecast(setup_of_record(record), CARDS[device])
            except NO_FORECAST:
                continue
            least, most = expected.images_per_sec_range or (math.nan, math.nan)
            days = days_to_train(expected.images_per_sec, training_images)
            price = price_of(device, first['prices'])
            found.append(speed_row(record | {'images_per_sec': expected.images_per_sec}) | {
                'status': FORECAST, 'setting': device, 'days': days, 'images_per_sec_least': least,
                'images_per_sec_most': most, 'cost_usd': days * 24 * count * price})
    return pd.DataFrame(found, columns=None if found else ['images_per_sec_least', 'images_per_sec_most'])


def lines_of_days(rows: pd.DataFrame, training_images: int) -> list[pd.DataFrame]:
    """Return the points of each line of days. The line that starts with the most days is first, as in the legend.

    Measurements and forecasts of the same setting are two lines. On each GPU count a line has one point, which is
    extrapolated only if none was measured.
    """
    # Sorting puts extrapolated rows last, so `one_row_per_gpu_count` takes them only where there is no other row.
    rows = rows.assign(is_forecast=rows['status'] == FORECAST, is_extrapolated=rows['status'] == EXTRAPOLATED)
    rows = one_row_per_gpu_count(rows.sort_values('is_extrapolated', kind='stable'), ['is_forecast', 'setting'])
    days = days_to_train(rows['images_per_sec'], training_images)  # of the median speed
    rows = rows.assign(days=days, cost_usd=rows['cost_usd'] * days / rows['days'])
    lines = [points for _, points in rows.groupby(['is_forecast', 'setting'], sort=False)]
    return sorted(lines, key=lambda points: -points['days'].iloc[0])


def explain_marks(axes: Any, rows: pd.DataFrame, doubtful: pd.DataFrame) -> None:
    """Add entries to the legend that explain filled, hollow and crossed points and the dashed lines."""
    axes.plot([], [], 'o', color='black', label='measured')
    with_range = ' with its range' if rows['images_per_sec_least'].notna().any() else ''
    axes.plot([], [], 'o', color='black', markerfacecolor='white', label=f'extrapolated, or forecast{with_range}')
    if doubtful['setting'].isin(rows['setting']).any():
        axes.plot([], [], 'x', color='red', label='a run here failed or was not reliable')
    axes.plot([], [], '--', color='black', linewidth=0.8, label='ideal: twice the GPUs, half the days')


def days_line_labels(lines: list[pd.DataFrame]) -> list[str]:
    """Return a label for each line of days: its GPU, its settings, and 'forecast' if other lines are measured.

    A label has the settings that differ between lines, not counting lines that do not state the setting. If two lines
    would have the same label, the labels have all settings that differ.
    """
    firsts = pd.DataFrame([points.iloc[0] for points in lines])
    differing = [key for key in differing_settings(firsts, SETTINGS) if key not in ('stage', 'device')]
    recipe_keys = {key for settings in recipe_settings().values() for key in settings}
    stated = [key for key in differing if key in ('program', *recipe_keys)
              or firsts[key].replace('', None).nunique() > 1]
    for keys, with_defaults in ((stated, False), (differing, True)):
        labels = []
        for _, first in firsts.iterrows():
            parts = [short_name(first['device']), describe_settings(first, keys, with_defaults)]
            if first['is_forecast'] and not firsts['is_forecast'].all():
                parts.append('forecast')
            labels.append(', '.join(filter(None, parts)))
        if len(set(labels)) == len(labels):
            break
    return labels


def mark_doubtful(axes: Any, points: pd.DataFrame, doubtful: pd.DataFrame, training_images: int) -> None:
    """Draw a red cross on a line of measurements for each GPU count on which a run failed or was not reliable.

    If the line has no point at this GPU count, the cross is at the unreliable speed, or is omitted without a speed.
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
            set_tooltips(cross, [f'{describe_gpus(run)}\n{run["notes"]}\n{run["date"][:10]}'.strip()])


def set_axes_of_days(axes: Any, rows: pd.DataFrame, training_images: int) -> None:
    """Make both axes logarithmic, with a tick for each GPU count, and put the legend to the right."""
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
    """Draw the days of one setting with their ranges, and a dashed line of ideal scaling."""
    gpus, days, speeds = points['num_devices'], points['days'], points['images_per_sec']
    ideal = days.iloc[0] * gpus.iloc[0] / gpus
    axes.plot(gpus, ideal, '--', color=color, linewidth=0.8, alpha=0.6)

    # Draw filled points, and draw hollow points over the points that were not measured.
    is_measured = points['status'] == MEASURED
    face = color if is_measured.any() else 'white'
    tooltips = pd.Series([point_tooltip(point, label) for _, point in points.iterrows()], points.index)
    [line] = axes.plot(gpus, days, f'{marker}-', color=color, markerfacecolor=face, linewidth=1.2, label=label)
    set_tooltips(line, tooltips)
    [hollow] = axes.plot(gpus[~is_measured], days[~is_measured], marker, color=color, markerfacecolor='white')
    set_tooltips(hollow, tooltips[~is_measured])

    # Draw the ranges of forecasts. Days are inversely proportional to the speed.
    axes.vlines(gpus, days * speeds / points['images_per_sec_most'],
                days * speeds / points['images_per_sec_least'], color=color, linewidth=1.2, zorder=1)


def draw_learned(records: pd.DataFrame, prices: Prices) -> Any:
    """Draw the loss on --eval_remote over images seen, and over dollars if they are known, with a line per training.

    A resumed training is one line. Its dollars grow in proportion to its images. Trainings whose losses cannot be
    compared are in different panels.

    Args:
        records: the rows of all records.
        prices: the prices of --dollars_per_gpu_hour, which replace the prices in the records.

    Raises UserError if no training has evaluations.
    """
    # Make a row for each evaluation. A training that ran in several setups has several rows with the same evaluations.
    rows = []
    trained = records[records['stage'] == 'train'].drop_duplicates(['training', *EVAL_DATA])
    for _, training in trained.iterrows():
        dollars = dollars_per_image(training, prices)
        for images, loss in training['evaluations']:
            rows.append(training.to_dict() | {'images_seen': images, 'loss': loss, 'dollars': images * dollars,
                                              'save_folder': str(training['record'].get('save_folder', ''))})
    if not rows:
        raise UserError('no training in these records was evaluated; --eval_remote evaluates one')
    rows = pd.DataFrame(rows)

    # Make a panel over images, and one over dollars, for each group of losses that can be compared.
    panels = []
    for _, comparable in rows.groupby(LOSS_SETTINGS, sort=False):
        title = describe_settings(comparable.iloc[0], differing_settings(rows, LOSS_SETTINGS))
        for across in ('images_seen', 'dollars'):
            if comparable[across].notna().any():
                panels.append(Panel(comparable, across, 'loss', [*SETTINGS, 'save_folder', 'training'], title))
    return draw_panels(panels, 'No panel of dollars: no run was on a GPU.' if rows['on_cpu'].all() else '')


def dollars_per_image(training: pd.Series, prices: Prices) -> float:
    """Return the dollars that a training has cost so far, divided by the images it has seen; NaN if not known.

    Args:
        training: row of the training.
        prices: the prices of --dollars_per_gpu_hour; without any, the prices in the record count.
    """
    record = training['record']
    if training['on_cpu'] or not record.get('trained_batches') or not {'gpu_hours', 'batch_size'} <= record.keys():
        return math.nan
    dollars = record['gpu_hours'] * price_of(training['device'], prices or training['prices'])
    if not prices:
        dollars = record.get('dollars', dollars)
    return dollars / (record['trained_batches'] * record['batch_size'])


def draw_quality(rows: pd.DataFrame, caption: str) -> Any:
    """Draw a table of scores in up to three panels, with the notes on the scores below the panels.

    One panel shows FID against CLIP score, with a line for each checkpoint and a point for each guidance scale. Two
    panels show FID and CLIP score over images seen, with a line for each model and guidance scale. Scores that
    differ in a setting of EVALUATION_SETTINGS are never on one line.

    Args:
        rows: the table of scores.
        caption: text below the panels.

    Raises UserError if there is nothing to draw.
    """
    panels = [Panel(rows, 'clip_score', 'fid', [*EVALUATION_SETTINGS, 'trained_batches'])]
    for score in ('fid', 'clip_score'):
        panels.append(Panel(rows, 'images_seen', score, [*EVALUATION_SETTINGS, 'guidance']))

    # Omit panels without points.
    panels = [panel for panel in panels if len(rows.dropna(subset=[panel.across, panel.up]))]
    if not panels:
        raise UserError('no evaluation has both scores, or the number of images of its training')
    return draw_panels(panels, '\n'.join([caption, *filter(None, rows['notes'].unique())]))


class Panel(NamedTuple):
    """A panel of lines.

    Attributes:
        rows: the points.
        across: column of the horizontal axis.
        up: column of the vertical axis.
        line_keys: columns whose values are the same for all points of a line.
        title: text above the panel.
    """
    rows: pd.DataFrame
    across: str
    up: str
    line_keys: list[str]
    title: str = ''


def draw_panels(panels: list[Panel], caption: str) -> Any:
    """Draw panels side by side, with a caption below them."""
    from matplotlib.figure import Figure

    figure = Figure(layout='constrained')
    figure.supxlabel(wrapped(caption, PANEL_CHARACTERS * len(panels)), x=0.01, ha='left', fontsize=9)
    most_lines = 0  # lines of text in the longest legend, for which the figure needs room
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_panel(axes, panel)
        labels = axes.get_legend_handles_labels()[1]
        if labels:
            axes.legend(loc='upper left', bbox_to_anchor=(0, -0.15), frameon=False, fontsize=8)
            most_lines = max(most_lines, '\n'.join(labels).count('\n') + 1)
    figure.set_size_inches(PANEL_INCHES * max(1.4, len(panels)), PANEL_INCHES + LINE_INCHES * most_lines)
    return figure


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw the lines of a panel, with a label and tooltips for each, and its axes."""
    from matplotlib.ticker import EngFormatter

    rows, across, up, line_keys, title = panel
    lines = [points for _, points in rows.dropna(subset=[across, up]).groupby(line_keys, dropna=False)]
    names = line_labels(pd.DataFrame([points.iloc[0] for points in lines]), line_keys)
    for points, name, color in zip(lines, names, line_colors(len(lines)), strict=True):
        label = [name]
        if across == 'clip_score':
            label.append('guidance ' + ', '.join(f'{scale:g}' for scale in points['guidance']))
        [line] = axes.plot(points[across], points[up], marker='o', markersize=4, color=color,
                           label=wrapped(', '.join(filter(None, label)), PANEL_CHARACTERS))
        set_tooltips(line, [result_tooltip(point, name, (across, up)) for _, point in points.iterrows()])

    axes.set_title(wrapped(title, PANEL_CHARACTERS), fontsize=9)
    axes.locator_params(axis='x', nbins=5)  # more ticks may overlap
    axes.set_xlabel(TITLES[across])
    axes.set_ylabel(TITLES[up])
    if across == 'images_seen':
        axes.xaxis.set_major_formatter(EngFormatter())
    axes.spines[['top', 'right']].set_visible(False)


def result_tooltip(row: pd.Series, name: str, keys: Sequence[str]) -> str:
    """Return the tooltip of a point: GPUs of the training or the evaluated model, label of the line, figures, date."""
    source = describe_gpus(row) if 'num_devices' in row else row['model']
    figures = [f'{TITLES[key]} {rounded(row[key], DECIMALS[key])}' for key in keys]
    for key in ('guidance', 'dollars'):
        if key not in keys and pd.notna(row.get(key)):
            figures.append(f'{TITLES[key]} {rounded(row[key], DECIMALS[key])}')
    return '\n'.join(filter(None, [source, name, *figures, str(row['record'].get('date', ''))[:10]]))


def line_colors(count: int) -> Sequence:
    """Return `count` colors: the ones in COLORS, or colors of a rainbow if there are not enough."""
    if count <= len(COLORS):
        return COLORS[:count]
    from matplotlib import colormaps
    return colormaps['turbo'](np.linspace(0.05, 0.95, count))


def wrapped(text: str, characters: int) -> str:
    """Return a text with its lines broken at a number of characters."""
    return '\n'.join(textwrap.fill(line, characters) for line in text.splitlines())
