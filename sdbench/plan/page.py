"""Write the answer of plan.py as one HTML sheet for somebody who decides. It opens without a network.

sheet.html is the template. The page forbids all requests.
"""
import shlex
from pathlib import Path

from sdbench.errors import UserError
from sdbench.plan.answer import Answer
from sdbench.plan.picture import draw_intervals
from sdbench.plan.verdict import OUTSIDE, standing
from sdbench.report.page import fill_template
from sdbench.report.pictures import svg_of

MOST_PLANS = 10  # in the picture, the cheapest first


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
