"""Turn records into days, GPU-hours and dollars, and predict the speed on more GPUs.

    python report.py results.jsonl                          # a row for each measured setup and GPU count
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py results.jsonl --compare                # one row per training, with its speed relative to the first
    python report.py results.jsonl --learned learned.png    # eval losses against images and against dollars
    python report.py results.jsonl --quality quality.png    # FID and CLIP scores from evaluate.py
    python report.py results.jsonl --dollars_per_gpu_hour H100=2.5 H200=3.2    # costs at these prices
    python report.py results.jsonl --html report.html       # the whole report as a page to send; it needs no network

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

import csv
import json
import shlex
import signal
import sys
from collections.abc import Sequence

from sdbench.costs import DOLLARS_PER_GPU_HOUR, describe_prices, hours_by_device, price_of, require_named
from sdbench.records.metrics import COLUMNS, filled
from sdbench.records.read import Row, read_all
from sdbench.records.status import FORECAST
from sdbench.report.page import write_page
from sdbench.report.pictures import draw_days, draw_learned, draw_quality, save, svg_of
from sdbench.report.speeds import score_table, speed_table
from sdbench.report.trainings import join_trainings


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
    measured = [row for row in rows if row.status != FORECAST]
    forecasts = len(rows) - len(measured)
    unused = f'{plural(forecasts, "forecast")} in these files: plan.py and --dry_run calculate forecasts now'
    if not measured:
        raise UserError(f'no measurement, only {unused}')
    prices = settings.dollars_per_gpu_hour
    require_named({row.device for row in measured}, prices)
    runs = join_trainings([row for row in measured if row.stage != 'evaluate'])
    speeds = speed_table(runs, settings)
    scores = score_table([row for row in measured if row.stage == 'evaluate'], prices)
    tables = [table for table in (speeds, scores) if table.rows]
    notes = price_notes([row for table in tables for row in table.rows], settings)
    if forecasts:
        notes.append(f'Not used: {unused}.')

    # Save the figures whose flag names a file. A page shows all that have something to show.
    figures = {'figure': ('Days over GPU count', lambda: draw_days(speeds, settings)),
               'learned': ('Loss on --eval_remote', lambda: draw_learned(runs, prices)),
               'quality': ('FID and CLIP score', lambda: draw_quality(scores))}
    shown = {}
    for flag, (caption, draw) in figures.items():
        path = getattr(settings, flag)
        try:
            if path:
                save(draw(), path)
            if settings.html:
                shown[caption] = svg_of(draw())
        except UserError as error:
            if path:
                raise UserError(f'--{flag} {path}: {error}') from None

    # Write the other files, and return the text.
    if settings.csv:
        write_csv(settings.csv, [row for table in tables for row in table.rows])
    if settings.html:
        write_page(settings.html, shown, tables, notes, command)
    blocks = []
    for table in tables:
        blocks += [table.markdown(), *(filled([sentence]) for sentence in table.sentences)]
    blocks += [filled([note]) for note in notes]
    files = [settings.figure, settings.learned, settings.quality, settings.csv, settings.html]
    if any(files):
        blocks.append(f'Written: {", ".join(filter(None, files))}')
    return '\n\n'.join(blocks)


def price_notes(rows: Sequence[Row], settings: Report) -> list[str]:
    """Return a sentence that says which prices were used for the costs; [] if nothing has a cost."""
    given = settings.dollars_per_gpu_hour
    prices = []
    notes = []
    for row in rows:
        if 'total_gpu_hours' not in row.metrics:
            continue
        training = row.record.get('training')  # of an evaluation
        if training and training.get('dollars') is not None and not given:
            notes = ['Costs of scores: as their trainings recorded them; --dollars_per_gpu_hour replaces them.']
            continue
        devices = hours_by_device(training) if training else [row.device]
        prices += [(device, price_of(device, given or row.prices)) for device in devices]
    if prices:
        source = 'assumed, as in the published benchmark; --dollars_per_gpu_hour replaces it'
        if any(row.prices for row in rows):
            source = (f'from the records, or ${DOLLARS_PER_GPU_HOUR:g} as in the published benchmark if a record has '
                      'none; --dollars_per_gpu_hour replaces these prices')
        if given:
            source = '--dollars_per_gpu_hour'
        notes.insert(0, f'Costs: {describe_prices(prices)} ({source}).')
    return notes


def write_csv(path: str, rows: Sequence[Row]) -> None:
    """Write rows unrounded: the keys of their records, the calculated metrics, and the notes.

    Values that are neither text nor numbers are written as JSON, which report.py can read again.
    """
    lines = []
    for row in rows:
        values = row.record | {key: row.metrics[key] for key in COLUMNS if key in row.metrics} | {'notes': row.notes}
        lines.append({key: value if isinstance(value, (str, int, float)) and not isinstance(value, bool)
                      else json.dumps(value) for key, value in values.items()})
    with open(path, 'w', newline='') as file:
        writer = csv.DictWriter(file, {key: None for line in lines for key in line})
        writer.writeheader()
        writer.writerows(lines)


if __name__ == '__main__':
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `report.py ... | head` ends silently when head does
    main()
