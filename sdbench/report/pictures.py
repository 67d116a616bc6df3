"""Draw the figures of a report: days over GPUs, eval losses of trainings, and evaluation scores.

matplotlib is imported only when there is something to draw. A function that finds nothing to draw raises UserError.
"""
import io
import itertools
import json
import math
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sdbench.costs import TRAINING_IMAGES, Prices, cost_of
from sdbench.errors import UserError
from sdbench.flags.commands import Report
from sdbench.gpus import short_name
from sdbench.records.metrics import COLUMNS, format_metric
from sdbench.records.read import EXTRAPOLATED, WITH_SPEED, Row
from sdbench.records.settings import EVAL_DATA, EVALUATION_SETTINGS, LOSS_SETTINGS, SETTINGS
from sdbench.report.speeds import add_days, gpu_count, one_row_per_gpu_count
from sdbench.report.tables import Table, describe_differences, describe_gpus, line_labels, shared_settings
from sdbench.report.trainings import grouped

COLORS = ('#1f3b73', '#d9730d', '#2a9d8f', '#9b2d5e', '#8fb339', '#7f7f7f', '#6aa8e0', '#f2b84b', '#c0392b')
MARKERS = 'os^Dv<>ph*P'
PANEL_INCHES = 4.8
LINE_INCHES = 0.2  # height of a line of text
PANEL_CHARACTERS = 60  # in a line of text above or below a panel
AXES = {'num_devices': 'GPUs', 'cost_usd': 'dollars'}  # titles of axes that are not headings of tables
SVG = 'http://www.w3.org/2000/svg'


class Point(NamedTuple):
    """A point of a line, with the text that a page shows over it. A point that was not measured is hollow."""
    x: float
    y: float
    tooltip: str
    is_measured: bool = True


class Line(NamedTuple):
    """A line of a panel. Lines with the same color have different markers."""
    label: str
    points: list[Point]
    color: str


class Panel(NamedTuple):
    """A panel.

    Attributes:
        title: text above it.
        across: the metric of its horizontal axis, a key of COLUMNS.
        up: the metric of its vertical axis.
        lines: its lines. With GPU counts across, both axes are logarithmic, and a dashed line begins at the first point
            of each line and halves for twice the GPUs.
        crosses: points that get a red cross.
    """
    title: str
    across: str
    up: str
    lines: list[Line]
    crosses: Sequence[Point] = ()


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
    """Set a tooltip for each point of a line, as the id of the line's SVG group. `svg_of` turns it into tooltips."""
    artist.set_gid(json.dumps([*texts]))


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
            for point, text in zip(group.iter(f'{{{SVG}}}use'), json.loads(name), strict=True):
                ElementTree.SubElement(point, f'{{{SVG}}}title').text = text
    return ElementTree.tostring(root, encoding='unicode')


def lines_of(groups: Sequence[Sequence[Row]], names: Sequence[str], across: str, up: str,
             told: Sequence[str] = ()) -> list[Line]:
    """Return a line over two metrics for each group of rows. Its tooltips also have the metrics `told`."""
    lines = []
    for rows, name in zip(groups, names, strict=True):
        points = [Point(row.metrics[across], row.metrics[up], tooltip(row, name, (across, up, *told)),
                        row.status != EXTRAPOLATED) for row in rows]
        lines.append(Line(name, points, rows[0].device if across == 'num_devices' else name))
    return lines


def tooltip(row: Row, name: str, keys: Sequence[str]) -> str:
    """Return the GPUs of a run or the evaluated model, the name of its line, metrics, status, notes and date."""
    source = describe_gpus(row) if 'num_devices' in row.metrics else str(row.settings['model'])
    metrics = [f'{AXES.get(key, COLUMNS[key].heading)} {format_metric(key, row.metrics[key])}' for key in keys
               if key in row.metrics and key != 'num_devices']
    return '\n'.join(filter(None, [source, name, *metrics, row.status, row.notes, row.date[:10]]))


def draw_days(table: Table, settings: Report) -> Any:
    """Draw days over GPU counts, with a line for each setting and a color for each GPU model.

    Extrapolated points are hollow. A red cross marks a GPU count on which a run of the line failed or was not reliable.
    Raises UserError if no row of the table of speeds has days.
    """
    rows = [row for row in table.rows if 'days' in row.metrics]
    if not rows:
        raise UserError('no training in these records has days; for the tiny model, --training_images adds them')
    groups = [one_row_per_gpu_count(runs) for runs in grouped((row.setting, row) for row in rows).values()]
    for row in itertools.chain(*groups):
        add_days(row, settings)  # of the median speed
    firsts = [runs[0] for runs in groups]
    names = [', '.join(filter(None, [short_name(first.device), difference])) for first, difference
             in zip(firsts, describe_differences(firsts, SETTINGS, ['device']), strict=True)]
    lines = lines_of(groups, names, 'num_devices', 'days', ('images_per_sec', 'cost_usd'))
    lines.sort(key=lambda line: -line.points[0].y)  # as the lines are in the figure

    # Mark bad news, also where a prediction is in the place of a run.
    days_at = {(row.setting, gpu_count(row)): row.metrics['days'] for row in itertools.chain(*groups)}
    crosses = [Point(gpu_count(row), days_at[row.setting, gpu_count(row)], tooltip(row, '', ()))
               for row in table.rows if row.status not in WITH_SPEED and (row.setting, gpu_count(row)) in days_at]
    note = (f'Days for training on {settings.training_images or TRAINING_IMAGES:,} images. Filled: measured. Hollow: '
            'extrapolated. Dashed: twice the GPUs, half the days.')
    return draw_panels([Panel('', 'num_devices', 'days', lines, crosses)], [note, *shared_settings(firsts, SETTINGS)])


def draw_learned(rows: Sequence[Row], prices: Prices) -> Any:
    """Draw the loss on --eval_remote, with a line per training: over images seen and, if all have a cost, over dollars.

    A resumed training is one line. Its dollars grow in proportion to its images. Trainings whose losses cannot be
    compared are in different panels.

    Args:
        rows: the rows of all trainings.
        prices: the prices of --dollars_per_gpu_hour, which replace the prices in the records.

    Raises UserError if no training has evaluations.
    """
    # Make a row for each loss.
    losses = {}
    for row in rows:
        dollars = dollars_per_image(row, prices)
        evaluations = []
        for images, loss in row.evaluations:
            if loss is not None:
                cost = {} if dollars is None else {'cost_usd': images * dollars}
                metrics = {'num_devices': gpu_count(row), 'images_seen': images, 'eval_loss': loss} | cost
                evaluations.append(replace(row, metrics=metrics, status='', notes=''))
        if evaluations:
            losses.setdefault((row.training, *(row.settings[key] for key in EVAL_DATA)), evaluations)
    if not losses:
        raise UserError('no training in these records was evaluated; --eval_remote evaluates one')

    # Losses that can be compared are in a panel over images and, if all have a cost, in one over dollars.
    comparable = grouped((tuple(curve[0].settings[key] for key in LOSS_SETTINGS), curve) for curve in losses.values())
    titles = line_labels([curves[0][0] for curves in comparable.values()], LOSS_SETTINGS)
    panels = []
    for curves, title in zip(comparable.values(), titles, strict=True):
        for across, told in (('images_seen', ['cost_usd']), ('cost_usd', ['images_seen'])):
            # Omit the panel over dollars if a training has no cost, because the panel would seem to show all trainings.
            if all(across in curve[0].metrics for curve in curves):
                names = line_labels([curve[0] for curve in curves], [*SETTINGS, 'save_folder'])
                panels.append(Panel(title, across, 'eval_loss', lines_of(curves, names, across, 'eval_loss', told)))
    return draw_panels(panels)


def dollars_per_image(row: Row, prices: Prices) -> float | None:
    """Return the dollars that a training has cost so far, divided by the images it has seen; None if not known.

    Args:
        row: a row of the training.
        prices: the prices of --dollars_per_gpu_hour; without any, the prices in the record count.
    """
    record = row.record
    if row.on_cpu or not record.get('trained_batches') or not {'gpu_hours', 'batch_size'} <= record.keys():
        return None
    dollars = cost_of(record, prices or row.prices)
    if not prices:
        dollars = record.get('dollars', dollars)
    return None if math.isnan(dollars) else dollars / (record['trained_batches'] * record['batch_size'])


def draw_quality(table: Table) -> Any:
    """Draw a table of scores: FID against CLIP score with a line for each checkpoint, and both over images seen.

    Scores that differ in a setting of EVALUATION_SETTINGS are never on one line. Raises UserError if there is nothing
    to draw.
    """
    panels = []
    for across, up, key in (('clip_score', 'fid', 'trained_batches'), ('images_seen', 'fid', 'guidance'),
                            ('images_seen', 'clip_score', 'guidance')):
        keys = [*EVALUATION_SETTINGS, key]
        scored = [row for row in table.rows if {across, up} <= row.metrics.keys()]
        groups = [*grouped((tuple(row.settings[key] for key in keys), row) for row in scored).values()]
        names = line_labels([rows[0] for rows in groups], keys)
        if key == 'trained_batches':
            for number, rows in enumerate(groups):
                scales = ', '.join(f'{row.settings["guidance"]:g}' for row in rows)
                names[number] = ', '.join(filter(None, [names[number], f'guidance {scales}']))
        if groups:
            panels.append(Panel('', across, up, lines_of(groups, names, across, up, ['guidance'])))
    if not panels:
        raise UserError('no evaluation has both scores, or the number of images of its training')
    notes = {row.notes: None for row in table.rows if row.notes}
    return draw_panels(panels, [*table.sentences, *notes])


def draw_panels(panels: Sequence[Panel], caption: Sequence[str] = ()) -> Any:
    """Draw panels side by side, with their legends and a caption below them."""
    from matplotlib.figure import Figure

    figure = Figure(layout='constrained')
    panels_wide = max(2, len(panels))
    figure.supxlabel(wrapped('\n'.join(caption), PANEL_CHARACTERS * panels_wide), x=0.01, ha='left', fontsize=9)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_panel(axes, panel)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc='upper left', bbox_to_anchor=(0, -0.15), frameon=False, fontsize=8)
    longest_legend = max(sum(line.label.count('\n') + 1 for line in panel.lines) for panel in panels)
    figure.set_size_inches(PANEL_INCHES * panels_wide, PANEL_INCHES + LINE_INCHES * longest_legend)
    return figure


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw the lines of a panel, with a label and tooltips for each, and its axes."""
    from matplotlib import colormaps
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

    names = [*dict.fromkeys(line.color for line in panel.lines)]
    colors = COLORS if len(names) <= len(COLORS) else colormaps['turbo'](np.linspace(0.05, 0.95, len(names)))
    markers = {name: iter(itertools.cycle(MARKERS)) for name in names}
    is_scaling = panel.across == 'num_devices'
    for line in panel.lines:
        color = colors[names.index(line.color)]
        marker = next(markers[line.color])
        if is_scaling:
            first, last = line.points[0], line.points[-1]
            axes.plot([first.x, last.x], [first.y, first.y * first.x / last.x], '--', color=color, linewidth=0.8)

        # Draw filled points, and draw hollow points over the points that were not measured.
        hollow = [point for point in line.points if not point.is_measured]
        face = 'white' if len(hollow) == len(line.points) else color
        draw_points(axes, line.points, f'{marker}-', color, face, wrapped(line.label, PANEL_CHARACTERS))
        draw_points(axes, hollow, marker, color, 'white')
    draw_points(axes, panel.crosses, 'x', 'red', label='a run here failed or was not reliable')

    axes.set_title(wrapped(panel.title, PANEL_CHARACTERS), fontsize=9)
    axes.set_xlabel(AXES.get(panel.across, COLUMNS[panel.across].heading))
    axes.set_ylabel(COLUMNS[panel.up].heading)
    axes.spines[['top', 'right']].set_visible(False)
    if is_scaling:
        counts = sorted({point.x for line in panel.lines for point in line.points})
        axes.set(xscale='log', yscale='log')
        axes.set_xticks(counts, counts)
        axes.minorticks_off()
        least, most = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if most > 10 * least else MaxNLocator(6))
        axes.yaxis.set_major_formatter('{x:g}')
        axes.grid(alpha=0.3)
    else:
        axes.locator_params(axis='x', nbins=5)  # more ticks may overlap
        axes.xaxis.set_major_formatter('${x:,.10g}' if panel.across == 'cost_usd' else EngFormatter())


def draw_points(axes: Any, points: Sequence[Point], style: str, color: Any, face: Any = None,
                label: str = '_') -> None:
    """Draw points with their tooltips. A label that begins with an underscore is not in the legend."""
    if not points:
        return
    [artist] = axes.plot([point.x for point in points], [point.y for point in points], style, color=color,
                         markerfacecolor=face, linewidth=1.2, label=label)
    set_tooltips(artist, [point.tooltip for point in points])


def wrapped(text: str, characters: int) -> str:
    """Return a text with its lines broken at a number of characters."""
    return '\n'.join(textwrap.fill(line, characters) for line in text.splitlines())
