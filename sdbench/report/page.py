"""Write a report as one HTML file that opens without a network: verdict, figures, tables, notes and the command.

page.html is the template. Jinja, which torch depends on, escapes everything that the template inserts, and the
Content-Security-Policy of the page forbids all requests. itables brings DataTables, which sorts and filters the tables.
Readers without JavaScript, such as mail programs, still show the tables.
"""
import datetime
import math
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from sdbench.errors import UserError, redacted
from sdbench.gpus import short_name
from sdbench.records.metrics import COLUMNS, format_days, format_metric, heading_with_unit, rounded
from sdbench.records.read import EVALUATION_SETTINGS, LOSS_SETTINGS, MEASURED, WITH_FIGURES
from sdbench.records.settings import VERSIONS
from sdbench.records.versions import git_commit
from sdbench.report.markdown import describe_gpus, describe_settings, differing_settings, label_columns, usual_value

FIRST_FIGURES = ('num_devices', 'cost_usd', 'days', 'images_per_sec')  # a phone shows these without scrolling
SAME_WORK = ('model_name', 'image_size', 'input')
# Each mark for the best row, the figure in which that row is lowest, and the settings that compared rows must share
MARKS = (('cheapest', 'cost_usd', SAME_WORK), ('fastest', 'days', SAME_WORK),
         ('lowest eval loss', 'eval_loss', LOSS_SETTINGS),
         ('lowest FID', 'fid', [key for key in EVALUATION_SETTINGS if key not in ('model', 'weights')]))


class Table(NamedTuple):
    """A table of the page.

    Attributes:
        caption: heading of the table.
        cells: texts. The headings of numbers include their units.
        numbers: headings of the columns of numbers.
        marks: mark of each row, such as 'cheapest'; '' for none.
        doubtful: whether each row is not reliable.
    """
    caption: str
    cells: pd.DataFrame
    numbers: Sequence[str]
    marks: Sequence[str]
    doubtful: Sequence[bool]


class Figure(NamedTuple):
    """A figure of the page: its caption, and the figure as SVG."""
    caption: str
    svg: str


def require_itables() -> Path:
    """Return the folder of itables that contains DataTables. Raises UserError if itables is not installed."""
    try:
        import itables
    except ImportError:
        raise UserError('an HTML page needs itables, which sorts and filters its tables: pip install itables') from None
    return Path(itables.__file__).parent / 'html'


def write_page(path: Path, verdict: str, answers: Sequence[str], figures: Sequence[Figure], tables: Sequence[Table],
               notes: Sequence[str], command: str) -> None:
    """Write the report as an HTML file.

    Args:
        path: path of the file.
        verdict: the answer in one line, which is the title.
        answers: sentences below the title.
        figures: figures, which come before the tables.
        tables: tables in their order.
        notes: sentences below the tables. A note of several lines contains a command and keeps its lines.
        command: the command that made the page.
    """
    import jinja2

    bundle = require_itables()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name('page.html').read_text())
    library = b64encode((bundle / 'dt_bundle.js').read_bytes()).decode()

    # Fill in the template. The figures, the tables and DataTables are part of the page, which loads nothing.
    page = template.render(
        verdict=verdict, answers=answers, figures=figures, notes=notes, command=redacted(command),
        tables=tables,
        date=datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC'), commit=git_commit(),
        style=(bundle / 'dt_bundle.css').read_text(), library=library)
    # Records may come from strangers, and a terminal that prints the page would obey control characters in them.
    path.write_text(''.join(char if char.isprintable() or char == '\n' else ' ' for char in page), encoding='utf-8')


def html_table(rows: pd.DataFrame, keys: Sequence[str], caption: str) -> Table:
    """Return rows of a report as a table of the page, with the settings in `keys` that differ, figures and notes."""
    labels = label_columns(rows, [key for key in keys if key not in ('input', *VERSIONS)])
    versions = [key for key in differing_settings(rows, keys) if key in VERSIONS]
    devices = 'device' if 'on_cpu' in rows and rows['on_cpu'].any() else 'GPU'
    cells = pd.DataFrame(index=rows.index)
    if 'run' in labels:
        cells['run'] = labels['run']
    cells[devices] = rows['device'].map(short_name)
    if 'input' in rows:
        cells['input'] = rows['input']

    # FIRST_FIGURES come first, then marks, notes and settings, and then all other figures.
    marks = best_marks(rows)
    numbers = []
    for key in dict.fromkeys((*FIRST_FIGURES, *COLUMNS)):
        if key not in FIRST_FIGURES and 'settings' not in cells:
            cells['best'], cells['notes'] = marks, rows['notes']
            cells['settings'] = labels['settings']
        values = rows.get(key, pd.Series(math.nan, rows.index))
        heading = heading_with_unit(key, devices)
        numbers.append(heading)
        unit = 100 if '%' in COLUMNS[key].cell else 1
        cells[heading] = ['' if pd.isna(value) else rounded(unit * value, COLUMNS[key].decimals) for value in values]
    cells['date'] = rows['date'].str[:10] if 'date' in rows else ''
    cells['libraries'] = [describe_settings(row, versions) for _, row in rows.iterrows()]

    # Remove columns that are empty in all rows.
    cells = cells.loc[:, (cells != '').any()]
    doubtful = [status not in WITH_FIGURES for status in rows['status']]
    return Table(caption, cells, numbers, marks, doubtful)


def best_marks(rows: pd.DataFrame) -> list[str]:
    """Return the marks of each row, such as 'cheapest and fastest, 512 pixels'; '' for a row that is best at nothing.

    Only rows that do the same work are compared, such as training at one image size. If the table has rows of different
    work, the mark names the work.
    """
    marks = {row: {} for row in rows.index}  # lists of marks by the description of the work
    for mark, column, keys in MARKS:
        known = rows[rows[column].notna()] if column in rows else rows[:0]
        if len(known) < 2 or (keys == SAME_WORK and (rows['stage'] == 'evaluate').all()):
            continue  # nothing to compare; an evaluated checkpoint is not better because it is earlier and so cheaper

        # A setting that a row does not state has its usual value.
        keys = [key for key in keys if key in known]
        work = pd.DataFrame([{key: row[key] or usual_value(row, key) for key in keys} for _, row in known.iterrows()],
                            known.index)
        differing = [key for key in keys if work[key].nunique() > 1]
        for _, comparable in known.groupby([work[key].fillna('') for key in differing] or (lambda row: 0)):
            best = comparable[column].idxmin()
            description = describe_settings(work.loc[best], differing)
            marks[best].setdefault(description, []).append(mark)
    texts = []
    for marks_of_row in marks.values():
        named = [', '.join(filter(None, [' and '.join(found), work])) for work, found in marks_of_row.items()]
        texts.append('; '.join(named))
    return texts


def verdict_and_answers(rows: pd.DataFrame, table: Table) -> tuple[str, list[str]]:
    """Return one line about the best row, and sentences about other marked rows, certainty and the next step.

    The best row is the first of these that exists: the training with the lowest eval loss, if all losses can be
    compared; the row with the lowest FID, the lowest cost or the fewest days; the row with the highest speed or CLIP
    score.
    """
    # Find the best row.
    keys = ['fid', 'cost_usd', 'days']
    if 'eval_loss' in rows and len(rows[rows['eval_loss'].notna()].drop_duplicates(LOSS_SETTINGS)) == 1:
        keys.insert(0, 'eval_loss')
    highest = 'images_per_sec' if 'images_per_sec' in rows else 'clip_score'
    lowest = next((key for key in keys if key in rows and rows[key].notna().any()), None)
    best = rows.loc[rows[lowest].idxmin()] if lowest else rows.loc[rows[highest].fillna(0).idxmax()]

    # Describe its settings, and the other rows with a mark.
    marks = dict(zip(rows.index, table.marks, strict=True))
    settings = table.cells.get('settings', pd.Series('', rows.index))
    answers = []
    if settings[best.name]:
        answers.append(f'Settings: {settings[best.name]}.')
    for row, mark in marks.items():
        if mark and row != best.name:
            answers.append(', '.join(filter(None, [describe_row(rows.loc[row], mark), settings[row]])) + '.')
    return describe_row(best, marks[best.name]), [*answers, *certainty_and_next_step(best, lowest)]


def certainty_and_next_step(best: pd.Series, key: str | None) -> list[str]:
    """Return sentences that say how certain the figures of the best row are, and what to do first.

    Args:
        best: the best row.
        key: the figure in which it is lowest; None if it has the highest speed or CLIP score.
    """
    if best['stage'] == 'evaluate':
        return [f'How certain: {best["notes"]}.'] if best['notes'] else []
    if key == 'eval_loss':
        return [f'How certain: the loss was evaluated on --eval_remote after batch {best["eval_batch"]:,.0f}. Another '
                'seed may change the order of trainings with similar losses.',
                'What to do first: score images of the best trainings with evaluate.py.']
    if best['status'] == MEASURED:
        on = ' on synthetic data' if best['dataset'] == 'synthetic' else ''
        return [f'How certain: measured{on}.', 'What to do first: check that your own data loads as fast, with '
                'benchmark.py --loader_only --remote DATA.']
    certainty = f'How certain: {best["notes"]}.'
    first = (f'What to do first: run make smoke on a machine with this GPU ({short_name(best["device"])}), which takes '
             'minutes.')
    return [certainty, first]


def describe_row(row: pd.Series, mark: str) -> str:
    """Return a row as text: its mark, then its GPUs or, for an evaluation, its model, and its figures."""
    texts = [describe_gpus(row)] if 'num_devices' in row else [row['model'], f'guidance {row["guidance"]:g}']
    for key, unit in (('eval_loss', ' eval loss'), ('fid', ' FID'), ('clip_score', ' CLIP score'),
                      ('cost_usd', ''), ('days', ' days'), ('images_per_sec', ' images/s')):
        value = row.get(key, math.nan)
        if not math.isnan(value):
            texts.append(format_days(value, unit) if key == 'days' else format_metric(key, value) + unit)
    text = ', '.join(texts)
    return f'{mark[:1].upper()}{mark[1:]}: {text}' if mark else text
