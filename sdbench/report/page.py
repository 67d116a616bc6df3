"""Write a report as one HTML file that opens without a network: verdict, figures, tables, notes, and how it was made.

page.html is its template. Jinja, which torch needs anyway, escapes whatever the template puts into the page, and the
page's Content-Security-Policy forbids every request. itables brings DataTables, which sorts and filters the tables; a
reader without JavaScript, such as a mail program, still shows them.
"""
import datetime
import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from sdbench.errors import UserError, redacted
from sdbench.gpus import short_name
from sdbench.records.figures import COLUMNS, cell, days_in_words, heading_with_unit, rounded
from sdbench.records.read import EVALUATION_SETTINGS, LOSS_SETTINGS, MEASURED, WITH_FIGURES
from sdbench.records.setup import VERSIONS
from sdbench.records.status import FORECAST
from sdbench.records.versions import git_commit
from sdbench.report.markdown import differing, labels_of, settings_in_words, usual_value
from sdbench.report.plans import CORRECTED, FORECAST_ERROR, gpus_of

FIRST_FIGURES = ('num_devices', 'cost_usd', 'days', 'images_per_sec')  # a telephone shows these without scrolling
SAME_WORK = ('model_name', 'image_size', 'input')
# What a row is marked for: its figure is the lowest of all rows that agree in some settings.
MARKS = (('cheapest', 'cost_usd', SAME_WORK), ('fastest', 'days', SAME_WORK),
         ('lowest eval loss', 'eval_loss', LOSS_SETTINGS),
         ('lowest FID', 'fid', [key for key in EVALUATION_SETTINGS if key not in ('model', 'weights')]))


class Table(NamedTuple):
    """A table of the page.

    Attributes:
        caption: what its rows are.
        cells: text, and numbers, whose headings have their units; '' or NaN where there is nothing to show.
        decimals: by heading of a column of numbers, how many a cell has, or three significant digits where these are
            more; None: whole numbers.
        marks: of each row, such as 'cheapest'.
        doubtful: whether a row is not reliable.
    """
    caption: str
    cells: pd.DataFrame
    decimals: dict[str, int | None]
    marks: Sequence[str] = ()
    doubtful: Sequence[bool] = ()


class Figure(NamedTuple):
    """A figure of the page: what it shows, and itself as SVG."""
    caption: str
    svg: str


def require_itables() -> Path:
    """Return the folder of itables with DataTables in it. Raises UserError if it is not installed."""
    try:
        import itables
    except ImportError:
        raise UserError('an HTML page needs itables, which sorts and filters its tables: pip install itables') from None
    return Path(itables.__file__).parent / 'html'


def write_page(path: Path, verdict: str, answers: Sequence[str], figures: Sequence[Figure], tables: Sequence[Table],
               notes: Sequence[str], command: str) -> None:
    """Write the page to a file.

    Args:
        path: of the file.
        verdict: its title, which answers first.
        answers: sentences below the title: how sure that is, and what to do first.
        figures: that stand above the tables.
        tables: in their order.
        notes: sentences below the tables; the lines of one that has several are those of a command.
        command: that made the page.
    """
    import jinja2

    bundle = require_itables()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name('page.html').read_text())
    library = b64encode((bundle / 'dt_bundle.js').read_bytes()).decode()
    page = template.render(
        verdict=verdict, answers=answers, figures=figures, notes=notes, command=redacted(command),
        tables=[(table, list(rows_of_html(table))) for table in tables],
        date=datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC'), commit=git_commit(),
        style=(bundle / 'dt_bundle.css').read_text(), library=library)
    # Records come from strangers, and somebody may print the page to a terminal, which would obey control characters.
    path.write_text(''.join(char if char.isprintable() or char == '\n' else ' ' for char in page), encoding='utf-8')


def rows_of_html(table: Table) -> Iterable[tuple[str, bool, list[str]]]:
    """Yield of each row its mark, whether it is doubtful, and its cells as text."""
    marks = table.marks or [''] * len(table.cells)
    doubtful = table.doubtful or [False] * len(table.cells)
    for mark, is_doubtful, (_, row) in zip(marks, doubtful, table.cells.iterrows(), strict=True):
        cells = []
        for heading, value in row.items():
            if heading not in table.decimals:
                cells.append(value)
            elif pd.isna(value):
                cells.append('')
            else:
                decimals = table.decimals[heading]
                cells.append(f'{value:,.0f}' if decimals is None else rounded(value, decimals))
        yield mark, is_doubtful, cells


def table_of_rows(rows: pd.DataFrame, keys: Sequence[str], caption: str) -> Table:
    """Return rows of a report as a table: the settings of `keys` in which they differ, their figures and notes."""
    labels = labels_of(rows, [key for key in keys if key not in ('input', *VERSIONS)])
    versions = [key for key in differing(rows, keys) if key in VERSIONS]
    devices = 'device' if 'on_cpu' in rows and rows['on_cpu'].any() else 'GPU'
    cells = pd.DataFrame(index=rows.index)
    if 'run' in labels:
        cells['run'] = labels['run']
    cells[devices] = rows['device'].map(short_name)
    if 'input' in rows:
        cells['input'] = rows['input']

    # the figures that decide, then the settings, then all other figures
    marks = marks_of(rows)
    decimals = {}
    for key in dict.fromkeys((*FIRST_FIGURES, *COLUMNS)):
        if key not in FIRST_FIGURES and 'settings' not in cells:
            cells['best'], cells['notes'] = marks, rows['notes']
            cells['settings'] = labels['settings']
        values = rows.get(key, pd.Series(math.nan, rows.index))
        heading = heading_with_unit(key, devices)
        decimals[heading] = COLUMNS[key].decimals
        cells[heading] = values * 100 if '%' in COLUMNS[key].cell else values
    if (rows['stage'] == 'plan').all():
        parts = pd.DataFrame(rows['record'].tolist(), rows.index).filter(regex='^days_')
        for key in sorted(parts):
            heading = f'{key.removeprefix("days_").replace("_", " ")} (days)'
            decimals[heading] = COLUMNS['days'].decimals
            cells[heading] = parts[key]
    cells['date'] = rows['date'].str[:10] if 'date' in rows and (rows['stage'] != 'plan').all() else ''
    cells['libraries'] = [settings_in_words(row, versions) for _, row in rows.iterrows()]
    cells = cells.loc[:, [column.notna().any() and (column != '').any() for _, column in cells.items()]]
    doubtful = [status not in (*WITH_FIGURES, 'plan') for status in rows['status']]
    return Table(caption, cells, decimals, marks, doubtful)


def nearest_to_limits(rows: pd.DataFrame) -> pd.Index:
    """Return the plan that is nearest to the limits where none is within them; nothing else."""
    return rows.index[rows['is_nearest']] if 'is_nearest' in rows else rows.index[:0]


def marks_of(rows: pd.DataFrame) -> list[str]:
    """Return what each row is marked for; '' for most. Only rows of the same work are compared."""
    marks = {row: {} for row in rows.index}  # by the work that it is the best at, in words
    for row in nearest_to_limits(rows):
        marks[row][''] = ['nearest to the limits']
    for mark, column, keys in MARKS:
        known = rows[rows[column].notna()] if column in rows else rows[:0]
        if len(known) < 2 or (keys == SAME_WORK and (rows['stage'] == 'evaluate').all()):
            continue  # a checkpoint is not better because it came earlier
        keys = [key for key in keys if key in known] if (rows['stage'] != 'plan').all() else []
        work = pd.DataFrame([{key: row[key] or usual_value(row, key) for key in keys} for _, row in known.iterrows()],
                            known.index)
        several = [key for key in keys if work[key].nunique() > 1]
        for _, comparable in known.groupby([work[key].fillna('') for key in several] or (lambda row: 0)):
            best = comparable[column].idxmin()
            words = settings_in_words(work.loc[best], several)
            marks[best].setdefault(words, []).append(mark)
    return ['; '.join(', '.join(filter(None, [' and '.join(found), words])) for words, found in of_row.items())
            for of_row in marks.values()]


def verdict_on(rows: pd.DataFrame, table: Table) -> tuple[str, list[str]]:
    """Return what rows come to in a line, and in sentences the other marked rows, how sure that is and what to do.

    The verdict names the plan that is nearest to the limits where none is within them, or the training that learned
    best where their losses compare, or else the row with the lowest FID, the lowest cost, the fewest days, or the
    highest speed or CLIP score.
    """
    keys = ['fid', 'cost_usd', 'days']
    if 'eval_loss' in rows and len(rows[rows['eval_loss'].notna()].drop_duplicates(LOSS_SETTINGS)) == 1:
        keys.insert(0, 'eval_loss')
    of_speed = 'images_per_sec' if 'images_per_sec' in rows else 'clip_score'
    by = next((key for key in keys if key in rows and rows[key].notna().any()), None)
    best = rows.loc[rows[by].idxmin()] if by else rows.loc[rows[of_speed].fillna(0).idxmax()]
    for row in nearest_to_limits(rows):
        best = rows.loc[row]
    marks = dict(zip(rows.index, table.marks, strict=True))
    settings = table.cells.get('settings', pd.Series('', rows.index))

    # other rows that are marked
    answers = []
    if settings[best.name]:
        answers.append(f'Settings: {settings[best.name]}.')
    for row, mark in marks.items():
        if mark and row != best.name:
            answers.append(', '.join(filter(None, [described(rows.loc[row], mark), settings[row]])) + '.')
    return described(best, marks[best.name]), [*answers, *how_sure(best, by)]


def how_sure(best: pd.Series, by: str | None) -> list[str]:
    """Return in sentences how sure the row of the verdict is, and what to do first."""
    if best['stage'] == 'evaluate':
        return [f'How sure: {best["notes"]}.'] if best['notes'] else []
    if by == 'eval_loss':
        return [f'How sure: the loss was evaluated on --eval_remote after batch {best["eval_batch"]:,.0f}; another '
                'seed may change the order of close ones.', 'First score the images of the best ones with evaluate.py.']
    statuses = {part.status for part in best['parts']} if best['stage'] == 'plan' else {best['status']}
    if statuses == {MEASURED}:
        on = ' on synthetic data' if best['dataset'] == 'synthetic' else ''
        return [f'How sure: measured{on}.',
                'First check that your own data loads as fast: benchmark.py --loader_only --remote DATA.']
    sure = f'How sure: {best["notes"]}.'
    first = f'First run make smoke on a machine with this GPU ({short_name(best["device"])}), which takes minutes'
    if statuses & {FORECAST, CORRECTED}:
        sure += f' {FORECAST_ERROR}'
    if statuses & {FORECAST, CORRECTED} and best['stage'] == 'plan':
        first += ': with its results.jsonl as one more file, this report corrects the forecasts for it'
    return [sure, f'{first}.']


def described(row: pd.Series, mark: str) -> str:
    """Return a row in words: what it is marked for, its GPUs or its model, and its figures."""
    words = [gpus_of(row)] if 'num_devices' in row else [row['model'], f'guidance {row["guidance"]:g}']
    for key, unit in (('eval_loss', ' eval loss'), ('fid', ' FID'), ('clip_score', ' CLIP score'),
                      ('cost_usd', ''), ('days', ' days'), ('images_per_sec', ' images/s')):
        value = row.get(key, math.nan)
        if not math.isnan(value):
            words.append(days_in_words(value, unit) if key == 'days' else cell(key, value) + unit)
    text = ', '.join(words)
    return f'{mark[:1].upper()}{mark[1:]}: {text}' if mark else text
