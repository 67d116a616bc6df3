"""Write the answer of plan.py as one HTML sheet for somebody who decides. It opens without a network.

sheet.html is the template. Jinja escapes everything that it inserts, and the page forbids all requests.
"""
import shlex
from pathlib import Path

from sdbench.errors import UserError, redacted
from sdbench.plan.answer import Answer
from sdbench.plan.picture import MOST_PLANS, draw_intervals
from sdbench.plan.verdict import OUTSIDE, PROBABLY_OUTSIDE, standing
from sdbench.records.versions import git_commit
from sdbench.report.pictures import svg_of


def write_sheet(answer: Answer, path: str) -> None:
    """Write the sheet: verdict, intervals, table, what to do first, and notes."""
    import jinja2

    try:
        picture = svg_of(draw_intervals(answer.plans, answer.limits))
    except UserError:  # no plan is possible
        picture = ''
    # The table has the plans with a price, or all of them if none has one. The others are a line.
    in_table = [plan for plan in answer.plans if plan.price] or answer.plans
    sentences, best = answer.verdict
    rows = [(answer.cells(plan), standing(plan, answer.limits) in (OUTSIDE, PROBABLY_OUTSIDE), plan in best)
            for plan in in_table]
    unpriced = [answer.cells(plan) for plan in answer.plans if plan not in in_table]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name('sheet.html').read_text())
    page = template.render(
        verdict=sentences, title=answer.title, picture=picture, rows=rows, unpriced=unpriced,
        not_within=answer.not_within, first_steps=answer.first_steps, details=answer.details,
        date=answer.today.isoformat(), commit=git_commit(),
        omitted=max(0, len(answer.plans) - MOST_PLANS),
        command=redacted(shlex.join(['python', 'plan.py', *answer.records, *answer.command])))
    Path(path).write_text(page, encoding='utf-8')
