"""Draw the days and the dollars of plans as intervals, with lines at the limits."""
import math
from collections.abc import Sequence
from typing import Any

from sdbench.errors import UserError
from sdbench.plan.parts import Plan
from sdbench.plan.verdict import Limit, with_range
from sdbench.report.pictures import set_tooltips

MOST_PLANS = 14  # in the picture, the cheapest first
WIDTH_INCHES = 5.0  # a telephone shows it at its own size, so the text stays readable
COLOR, LIMIT_COLOR = '#1f6fb4', '#c03a2b'
HEADINGS = {'days': 'days', 'dollars': 'dollars, with storage'}


def draw_intervals(plans: Sequence[Plan], limits: Sequence[Limit]) -> Any:
    """Draw a panel for days, and one for dollars if a plan has a price. Raises UserError if there is no plan."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    plans = list(plans[:MOST_PLANS])
    if not plans:
        raise UserError('no plan is possible, so there is nothing to draw')
    figures = ['days']
    if any(plan.price for plan in plans):
        figures.append('dollars')
    figure = Figure(figsize=(WIDTH_INCHES, len(figures) * (0.75 + 0.27 * len(plans))), layout='constrained')
    panels = figure.subplots(len(figures), squeeze=False)[:, 0]
    for axes, name in zip(panels, figures, strict=True):
        for position, plan in enumerate(plans):
            value = getattr(plan, name)
            if not math.isfinite(value.likely):
                axes.annotate('no price', (0.02, position), xycoords=('axes fraction', 'data'), va='center', fontsize=9)
                continue
            if value.most > 0:
                line, = axes.plot([value.least, value.most], [position] * 2, color=COLOR, linewidth=5, alpha=0.45,
                                  solid_capstyle='round')
                point, = axes.plot([value.likely], [position], 'o', color=COLOR)
                set_tooltips(point, [f'{plan.name}\n{with_range(plan, name)}'])
        for limit in limits:
            if limit.figure == name:
                axes.axvline(limit.most, color=LIMIT_COLOR, linewidth=1.5)
                axes.annotate(limit.name, (limit.most, 1), (0, 2), xycoords=('data', 'axes fraction'), ha='center',
                              textcoords='offset points', color=LIMIT_COLOR, fontsize=9)
        axes.set_xscale('log')
        axes.xaxis.set_major_formatter(StrMethodFormatter('{x:,.0f}'))
        axes.xaxis.set_minor_formatter(NullFormatter())
        set_round_ticks(axes)
        axes.set_yticks(range(len(plans)), [plan.name for plan in plans])
        axes.set_ylim(len(plans) - 0.4, -0.6)  # the first plan is at the top
        axes.set_xlabel(HEADINGS[name])
        axes.grid(axis='x', alpha=0.3)
        axes.spines[['top', 'right']].set_visible(False)
    return figure


def set_round_ticks(axes: Any) -> None:
    """Put ticks at 1, 2 and 5 times powers of ten within the range of a logarithmic axis, but not too many."""
    low, high = axes.get_xlim()
    ticks = [step * 10 ** power for power in range(-2, 8) for step in (1, 2, 5) if low <= step * 10 ** power <= high]
    axes.set_xticks(ticks if len(ticks) <= 6 else ticks[::2])
