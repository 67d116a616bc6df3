"""Write the answer of plan.py as one HTML sheet for somebody who decides, and draw its intervals.

sheet.html is the template. The sheet opens without a network, and forbids all requests.
"""
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.errors import UserError
from sdbench.plan.answer import Answer
from sdbench.plan.parts import Plan
from sdbench.plan.verdict import OUTSIDE, Limit, standing
from sdbench.report.page import fill_template
from sdbench.report.pictures import set_tooltips, svg_of

MOST_PLANS = 10  # in the picture of the sheet, the cheapest first
WIDTH_INCHES = 5.0  # a telephone shows it at its own size, so the text stays readable
FONT_SIZE = 9
NAME_CHARACTERS = 20  # in a line of the name of a plan
COLOR, LIMIT_COLOR = '#1f6fb4', '#c03a2b'
HEADINGS = {'days': 'days', 'dollars': 'dollars, with storage'}


def write_sheet(answer: Answer, path: str) -> None:
    """Write the sheet: verdict, intervals, table, what to do first, and notes."""
    try:
        picture = svg_of(draw_intervals(answer.plans[:MOST_PLANS], answer.limits))
    except UserError:  # no plan is possible
        picture = ''
    # The table has the plans with a price, or all of them if none has one. The others are a line.
    in_table = [plan for plan in answer.plans if plan.price] or answer.plans
    rows = [(answer.cells(plan), standing(plan, answer.limits) == OUTSIDE, plan in answer.verdict.best)
            for plan in in_table]
    unpriced = [answer.cells(plan) for plan in answer.plans if plan not in in_table]
    fill_template(Path(__file__).with_name('sheet.html'), path,
                  shlex.join(['python', 'plan.py', *answer.records, *answer.command]), verdict=answer.verdict.sentences,
                  title=answer.title, picture=picture, rows=rows, unpriced=unpriced, not_within=answer.not_within,
                  first_steps=answer.first_steps, details=answer.details,
                  omitted=max(0, len(answer.plans) - MOST_PLANS))


def draw_intervals(plans: Sequence[Plan], limits: Sequence[Limit]) -> Any:
    """Draw a panel for days, and one for dollars if a plan has a price. Raises UserError if there is no plan."""
    from matplotlib.figure import Figure

    if not plans:
        raise UserError('no plan is possible, so there is nothing to draw')
    panels = {'days': list(plans)}
    priced = [plan for plan in plans if plan.dollars.likely > 0]
    if priced:
        panels['dollars'] = priced
    heights = [2.5 + len(shown) for shown in panels.values()]  # in rows, with the axis and the limit
    figure = Figure(figsize=(WIDTH_INCHES, 0.27 * sum(heights)), layout='constrained')
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for (name, shown), panel in zip(panels.items(), axes, strict=True):
        draw_panel(panel, name, shown, [limit for limit in limits if limit.metric == name])
    return figure


def draw_panel(axes: Any, metric: str, plans: Sequence[Plan], limits: Sequence[Limit]) -> None:
    """Draw the days or dollars of plans, the first at the top, and a line for the limit."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for position, plan in enumerate(plans):
        value = getattr(plan, metric)
        axes.plot([value.least, value.most], [position] * 2, color=COLOR, linewidth=5, alpha=0.45,
                  solid_capstyle='round')
        point, = axes.plot([value.likely], [position], 'o', color=COLOR)
        set_tooltips(point, [f'{plan.name}\n{plan.text_of(metric)}'])
    for limit in limits:
        axes.axvline(limit.most, color=LIMIT_COLOR, linewidth=1.5)
        axes.annotate(limit.name, (limit.most, 1), (0, 2), xycoords=('data', 'axes fraction'), ha='center',
                      textcoords='offset points', color=LIMIT_COLOR, fontsize=FONT_SIZE)

    # Plans differ by factors, so the axis is logarithmic, with ticks at 1, 2 and 5 times powers of ten.
    axes.set_xscale('log')
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.xaxis.set_major_formatter(StrMethodFormatter('{x:,.0f}'))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=FONT_SIZE)
    axes.set_yticks(range(len(plans)), [textwrap.fill(plan.name, NAME_CHARACTERS) for plan in plans])
    axes.set_ylim(len(plans) - 0.4, -0.6)
    axes.set_xlabel(HEADINGS[metric], fontsize=FONT_SIZE)
    axes.grid(axis='x', alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
