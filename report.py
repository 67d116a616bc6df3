"""Turn records into days, GPU-hours and dollars, and predict the speed on more GPUs.

    python report.py results.jsonl                     # a row for each measured setting and GPU count
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py results.jsonl --compare           # one row per training, with its speed relative to the first
    python report.py results.jsonl --learned learned.png # eval losses against images and against dollars
    python report.py results.jsonl --dollars_per_gpu_hour H100=2.5 H200=3.2  # costs at these prices
    python report.py results.jsonl --quality quality.png # FID and CLIP scores from evaluate.py
    python report.py results.jsonl --html report.html  # the whole report as a page to send, which needs no network

A record is a line of JSON that benchmark.py, encode.py or evaluate.py has written, or a row of a CSV file with the same
keys as columns. Settings that differ between rows are a column of the table, and settings that all rows share are one
line below it. Numbers are only rounded for printing, to at least three significant digits. --csv writes the rows of all
tables unrounded, with every key of their records. report.py can read such a file again.
"""
from sdbench.errors import UserError, plural
from sdbench.flags.commands import Report
from sdbench.flags.parser import answer_early, parse
from sdbench.process import begin, one_line_errors

if __name__ == '__main__':
    answer_early(Report, __doc__)

import functools
import json
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from sdbench.costs import DOLLARS_PER_GPU_HOUR, TRAINING_IMAGES, describe_prices, require_named
from sdbench.records.metrics import COLUMNS, WIDTH
from sdbench.records.read import EVALUATION_SETTINGS, read_all
from sdbench.records.settings import SETTINGS
from sdbench.records.status import FORECAST
from sdbench.report.markdown import markdown_tables, shared_settings
from sdbench.report.page import Figure, html_table, verdict_and_answers, write_page
from sdbench.report.pictures import draw_days, draw_learned, draw_quality, save, svg_of
from sdbench.report.speeds import score_table, speed_table


class Section(NamedTuple):
    """A section of a report: a table with its figure and its sentences.

    Attributes:
        rows: the rows of the table, with all figures unrounded.
        keys: the settings that distinguish rows.
        caption: heading of the table on an HTML page.
        tables: the table as Markdown, in several parts if it is too wide for one.
        notes: sentences below the table.
        flag: name of the flag that gives the file for the figure.
        figure_caption: what the figure shows.
        draw: function that draws the figure, or raises UserError if there is nothing to draw.
    """
    rows: pd.DataFrame
    keys: list[str]
    caption: str
    tables: list[str]
    notes: list[str]
    flag: str
    figure_caption: str
    draw: Callable[[], Any]


def main(argv=None):
    begin()
    settings = parse(Report, __doc__, argv, 'report.py')
    with one_line_errors('report.py'):
        print(report(settings, shlex.join(['report.py', *(sys.argv[1:] if argv is None else argv)])))


def report(settings: Report, command: str) -> str:
    """Return the report as Markdown, and write the files that --csv, --html and the flags of figures name.

    Raises UserError if a record is invalid, or if the records do not allow what a flag asks for.
    """
    # A report has measurements alone. Evaluations have scores instead of a speed, so they get their own table.
    rows = read_all(settings.records)
    forecasts = [row for row in rows if row['status'] == FORECAST]
    rows = [row for row in rows if row['status'] != FORECAST]
    unused = f'{plural(len(forecasts), "forecast")} in these files: plan.py and --dry_run calculate forecasts now'
    if not rows:
        raise UserError(f'no measurement, only {unused}')
    require_named({row['device'] for row in rows}, settings.dollars_per_gpu_hour)
    records = pd.DataFrame([row for row in rows if row['stage'] != 'evaluate'])
    evaluations = pd.DataFrame([row for row in rows if row['stage'] == 'evaluate'])
    has_trainings = len(records) > 0 and (records['stage'] == 'train').any()
    require_records(settings, has_trainings, has_evaluations=len(evaluations) > 0)
    sections = make_sections(records, evaluations, settings)

    # Save the figures that have a flag. An HTML page shows all of them.
    figures = {section.flag: (section.figure_caption, section.draw) for section in sections}
    if has_trainings:
        draw = functools.partial(draw_learned, records, settings.dollars_per_gpu_hour)
        figures['learned'] = ('Loss on --eval_remote', draw)
    save_figures(figures, settings)

    # Write the other files, and return the text. Sentences are wrapped; blocks that have lines already are not.
    notes = price_notes(sections, settings)
    if forecasts:
        notes.append(f'Not used: {unused}.')
    if settings.csv:
        write_csv(settings.csv, [section.rows for section in sections])
    if settings.html:
        write_html(sections, figures, notes, settings, command)
    blocks = []
    for section in sections:
        blocks += [*section.tables, *section.notes]
    files = [settings.figure, settings.learned, settings.quality, settings.csv, settings.html]
    text = '\n\n'.join(block if '\n' in block else textwrap.fill(block, WIDTH, break_on_hyphens=False)
                       for block in [*blocks, *notes] if block)
    if any(files):
        text += f'\n\nWritten: {", ".join(filter(None, files))}'
    return text


def require_records(settings: Report, has_trainings: bool, has_evaluations: bool) -> None:
    """Raise UserError if a flag needs records of a kind that is not there."""
    for flag in ('compare', 'extrapolate', 'figure', 'learned'):
        if getattr(settings, flag) and not has_trainings:
            raise UserError(f'--{flag} needs records of a training, and there are none')
    if settings.quality and not has_evaluations:
        raise UserError('--quality needs records of evaluate.py, and there are none')


def make_sections(records: pd.DataFrame, evaluations: pd.DataFrame, settings: Report) -> list[Section]:
    """Return the sections for speeds and for scores."""
    sections = []
    if len(records):
        sections.append(speed_section(records, settings))
    if len(evaluations):
        sections.append(score_section(evaluations, settings))
    return sections


def save_figures(figures: dict[str, tuple[str, Callable[[], Any]]], settings: Report) -> None:
    """Save each figure whose flag names a file. `figures` has the caption and the plotting function by flag."""
    for flag, (_, draw) in figures.items():
        path = getattr(settings, flag)
        if path:
            try:
                save(draw(), path)
            except UserError as error:
                raise UserError(f'--{flag} {path}: {error}') from None


def price_notes(sections: list[Section], settings: Report) -> list[str]:
    """Return sentences that say which prices were used for the costs; [] if nothing has a cost."""
    priced = pd.concat([section.rows[section.rows['total_gpu_hours'] > 0][['device', 'price']] for section in sections])
    if priced.empty:
        return []
    are_from_records = not settings.dollars_per_gpu_hour and (priced['price'] != DOLLARS_PER_GPU_HOUR).any()
    source = 'from the records; --dollars_per_gpu_hour replaces them' if are_from_records else '--dollars_per_gpu_hour'
    return [f'Costs: {describe_prices(zip(priced["device"], priced["price"], strict=True))} ({source}).']


def write_html(sections: list[Section], figures: dict[str, tuple[str, Callable[[], Any]]], notes: list[str],
               settings: Report, command: str) -> None:
    """Write the page of --html, with each figure that has something to show."""
    drawn = []
    for caption, draw in figures.values():
        try:
            drawn.append(Figure(caption, svg_of(draw())))
        except UserError:  # nothing to draw
            pass
    tables = [html_table(section.rows, section.keys, section.caption) for section in sections]
    verdict, answers = verdict_and_answers(sections[0].rows, tables[0])
    notes = [note for section in sections for note in section.notes if note] + notes
    write_page(Path(settings.html), verdict, answers, drawn, tables, notes, command)


def speed_section(records: pd.DataFrame, settings: Report) -> Section:
    """Return the section with the table of speeds."""
    speeds, sentences = speed_table(records, settings)
    keys = [*SETTINGS]
    if speeds.groupby(['setting', 'num_devices'])['num_nodes'].nunique().max() > 1:
        keys.append('num_nodes')  # one GPU count was measured on different numbers of machines
    if settings.compare:
        keys = ['run', *keys, 'date', 'git_commit']
    images = settings.training_images or TRAINING_IMAGES
    return Section(speeds, keys, 'Speeds, days and dollars', markdown_tables(speeds, keys),
                   [shared_settings(speeds, keys), *sentences], 'figure', 'Days over GPU count',
                   functools.partial(draw_days, speeds[speeds['stage'] == 'train'], images))


def score_section(evaluations: pd.DataFrame, settings: Report) -> Section:
    """Return the section with the table of scores."""
    scores = score_table(evaluations, settings.dollars_per_gpu_hour)
    shared = shared_settings(scores, EVALUATION_SETTINGS)
    return Section(scores, EVALUATION_SETTINGS, 'Scores', markdown_tables(scores, EVALUATION_SETTINGS), [shared],
                   'quality', 'FID and CLIP score', functools.partial(draw_quality, scores, shared))


def write_csv(path: str, tables: list[pd.DataFrame]) -> None:
    """Write the rows of tables unrounded: the keys of their records, the calculated figures, and the notes.

    Values that are neither text nor numbers are written as JSON, which report.py can read again.
    """
    lines = []
    for table in tables:
        for _, row in table.iterrows():
            values = row['record'] | {key: row[key] for key in (*COLUMNS, 'notes') if pd.notna(row.get(key))}
            for key, value in values.items():
                if isinstance(value, bool) or not isinstance(value, (str, int, float)):
                    values[key] = json.dumps(value)
            lines.append(values)
    pd.DataFrame(lines, dtype=object).to_csv(path, index=False)


if __name__ == '__main__':
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `report.py ... | head` ends silently when head does
    main()
