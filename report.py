"""Turn records into days, GPU-hours and dollars, and predict more GPUs.

    python report.py results.jsonl                     # a row for each setting and number of GPUs that was measured
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py plan.jsonl results.jsonl --phase 256 --phase 512    # a plan, by what was forecast and measured
    python report.py results.jsonl --compare           # a row for each training, and its speed over the first's
    python report.py results.jsonl --learned learned.png # which training learned best, over images and dollars
    python report.py results.jsonl --days 3 --dollars_per_gpu_hour H100=2.5 H200=3.2  # what three days buy
    python report.py results.jsonl --quality quality.png # scores of evaluate.py, over guidance and over the training
    python report.py results.jsonl --html report.html  # all of it as a page to send, which needs no network

A record is a line of JSON as benchmark.py, encode.py or evaluate.py writes it, or a row of a CSV file with the same
keys as columns. A setting is a column where rows differ in it, and stands below the table where they agree. A figure
is rounded once, when printed: to the decimals of the published table, or to three significant digits where these are
more. --csv holds the rows of all tables unrounded, with every key of their records, and can be read again, but for
plans.
"""
from sdbench.errors import UserError
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

from sdbench.costs import DOLLARS_PER_GPU_HOUR, ONE_PRICE, TRAINING_IMAGES, costs_in_words, require_named
from sdbench.records.figures import COLUMNS, WIDTH
from sdbench.records.read import EVALUATION_SETTINGS, read_all
from sdbench.records.setup import SETTINGS
from sdbench.report.markdown import in_common, markdown
from sdbench.report.page import Figure, table_of_rows, verdict_on, write_page
from sdbench.report.pictures import draw_days, draw_learned, draw_plan, draw_quality, save, svg_of
from sdbench.report.plans import plan_blocks, plan_table, told_apart_by, within_limits
from sdbench.report.speeds import score_table, speed_table


class Part(NamedTuple):
    """A part of a report.

    Attributes:
        rows: its table, with all that is known of each row.
        keys: the settings that tell rows apart.
        caption: of the table.
        answers: sentences that stand first on a page: what it is, and which rows are within the limits.
        tables: as Markdown.
        notes: other sentences.
        flag: that names the file of its figure.
        shows: what the figure shows.
        draw: draws it, or raises UserError if there is nothing to draw.
    """
    rows: pd.DataFrame
    keys: list[str]
    caption: str
    answers: list[str]
    tables: list[str]
    notes: list[str]
    flag: str
    shows: str
    draw: Callable[[], Any]


def main(argv=None):
    begin()
    settings = parse(Report, __doc__, argv, 'report.py')
    with one_line_errors('report.py'):
        print(report(settings, shlex.join(['report.py', *(sys.argv[1:] if argv is None else argv)])))


def report(settings: Report, command: str) -> str:
    """Return the report as Markdown, and write the files that --csv, --html and the flags of figures name.

    Raises UserError if a record cannot be calculated with, or what was asked for does not follow from the records.
    """
    # the records, and those that a flag needs
    rows = read_all(settings.records)
    require_named({row['device'] for row in rows}, settings.dollars_per_gpu_hour)
    records = pd.DataFrame([row for row in rows if row['stage'] != 'evaluate'])
    evaluations = pd.DataFrame([row for row in rows if row['stage'] == 'evaluate'])
    is_trained = len(records) > 0 and (records['stage'] == 'train').any()
    if not is_trained:
        for flag in ('compare', 'extrapolate', 'phase', 'figure', 'learned'):
            if getattr(settings, flag):
                raise UserError(f'--{flag} needs records of a training, and there are none')
    if settings.quality and evaluations.empty:
        raise UserError('--quality needs records of evaluate.py, and there are none')

    # a plan, or else a part for each kind of record
    parts = []
    if settings.phase:
        parts.append(plan_part(records, settings))
    elif len(records):
        parts.append(speed_part(records, settings))
    if len(evaluations) and not settings.phase:
        parts.append(score_part(evaluations, settings))

    # the figures by their flags; a page has each that there is
    drawings = {part.flag: (part.shows, part.draw) for part in parts}
    if is_trained:
        draw = functools.partial(draw_learned, records, settings.dollars_per_gpu_hour)
        drawings['learned'] = ('Loss of the evaluations', draw)
    for flag, (_, draw) in drawings.items():
        path = getattr(settings, flag)
        if path:
            try:
                save(draw(), path)
            except UserError as error:
                raise UserError(f'--{flag} {path}: {error}') from None

    # by which prices, and which files
    notes = price_notes(parts, settings)
    if settings.csv:
        write_csv(settings.csv, [part.rows for part in parts])
    if settings.html:
        write_html(parts, drawings, notes, settings, command)
    blocks = [block for part in parts for block in (*part.answers[:1], *part.tables, *part.answers[1:], *part.notes)]
    blocks += notes
    blocks = [block if '\n' in block else textwrap.fill(block, WIDTH, break_on_hyphens=False)
              for block in blocks if block]
    files = [settings.figure, settings.learned, settings.quality, settings.csv, settings.html]
    if any(files):
        blocks.append(f'Written: {", ".join(filter(None, files))}')
    return '\n\n'.join(blocks)


def price_notes(parts: list[Part], settings: Report) -> list[str]:
    """Return in sentences which prices the costs follow from."""
    priced = pd.concat([part.rows[part.rows['total_gpu_hours'] > 0][['device', 'price']] for part in parts])
    if priced.empty:
        return []
    whose = '--dollars_per_gpu_hour'
    if not settings.dollars_per_gpu_hour and (priced['price'] != DOLLARS_PER_GPU_HOUR).any():
        whose = 'of the records; --dollars_per_gpu_hour gives others'
    notes = [f'Costs: {costs_in_words(zip(priced["device"], priced["price"], strict=True))} ({whose}).']
    if whose == '--dollars_per_gpu_hour' and priced['price'].nunique() == 1 and priced['device'].nunique() > 1:
        notes.append(ONE_PRICE)
    return notes


def write_html(parts: list[Part], drawings: dict, notes: list[str], settings: Report, command: str) -> None:
    """Write the page of --html, with every figure that there is something to draw for."""
    figures = []
    for caption, draw in drawings.values():
        try:
            figures.append(Figure(caption, svg_of(draw())))
        except UserError:  # nothing to draw
            pass
    tables = [table_of_rows(part.rows, part.keys, part.caption) for part in parts]
    verdict, answers = verdict_on(parts[0].rows, tables[0])
    answers = [*parts[0].answers, *answers]
    notes = [note for part in parts for note in part.notes if note] + notes
    write_page(Path(settings.html), verdict, answers, figures, tables, notes, command)


def plan_part(records: pd.DataFrame, settings: Report) -> Part:
    """Return the part of a report that is a plan."""
    plans, title, sentences = plan_table(records, settings)
    apart = told_apart_by(plans)  # also where only some are within the limits
    plans, how_near = within_limits(plans, apart, settings.max_dollars, settings.max_days)
    return Part(plans, apart, 'Plans', [title, *how_near], plan_blocks(plans, apart), sentences, 'figure',
                'GPU-hours of each plan', functools.partial(draw_plan, plans, apart, title))


def speed_part(records: pd.DataFrame, settings: Report) -> Part:
    """Return the part of a report that is a table of speeds; what rows agree in stands below it."""
    speeds, sentences = speed_table(records, settings)
    keys = [*SETTINGS]
    if speeds.groupby(['setting', 'num_devices'])['num_nodes'].nunique().max() > 1:
        keys.append('num_nodes')  # as many GPUs on another number of machines
    if settings.compare:
        keys = ['run', *keys, 'date', 'git_commit']
    images = settings.training_images or TRAINING_IMAGES
    return Part(speeds, keys, 'Speeds, days and dollars', [], markdown(speeds, keys),
                [in_common(speeds, keys), *sentences], 'figure', 'Days over the number of GPUs',
                functools.partial(draw_days, speeds[speeds['stage'] == 'train'], images))


def score_part(evaluations: pd.DataFrame, settings: Report) -> Part:
    """Return the part of a report that is a table of scores; what rows agree in stands below it."""
    scores = score_table(evaluations, settings.dollars_per_gpu_hour)
    common = in_common(scores, EVALUATION_SETTINGS)
    return Part(scores, EVALUATION_SETTINGS, 'Scores', [], markdown(scores, EVALUATION_SETTINGS), [common], 'quality',
                'FID and CLIP score', functools.partial(draw_quality, scores, common))


def write_csv(path: str, tables: list[pd.DataFrame]) -> None:
    """Write the rows of tables unrounded: the keys of their records, the figures that follow, and the notes.

    What is neither text nor a number is JSON, so that the file is read as records again.
    """
    written = []
    for table in tables:
        for _, row in table.iterrows():
            values = dict(row['record'])
            if values['stage'] == 'evaluate':
                values['scores'] = [{key: row[key] for key in ('guidance', 'fid', 'clip_score') if pd.notna(row[key])}]
            values |= {key: row[key] for key in (*COLUMNS, 'notes') if pd.notna(row.get(key))}
            written.append({key: value if isinstance(value, (str, int, float)) and not isinstance(value, bool)
                            else json.dumps(value) for key, value in values.items()})
    pd.DataFrame(written, dtype=object).to_csv(path, index=False)


if __name__ == '__main__':
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `report.py ... | head` ends where head does
    main()
