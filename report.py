"""Turn records into days, GPU-hours and dollars, and predict more GPUs.

    python report.py results.jsonl                     # a row for each setting and number of GPUs that was measured
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py plan.jsonl results.jsonl --phase 256 --phase 512    # a plan, by what was forecast and measured
    python report.py results.jsonl --compare           # a row for each training, and its speed over the first's
    python report.py results.jsonl --learned learned.png # which training learned best, over images and dollars
    python report.py results.jsonl --days 3 --dollars_per_gpu_hour H100=2.5 H200=3.2  # what three days buy
    python report.py results.jsonl --quality quality.png # scores of evaluate.py, over guidance and over the training

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

import json
import signal
import textwrap

import pandas as pd

from sdbench.costs import DOLLARS_PER_GPU_HOUR, ONE_PRICE, TRAINING_IMAGES, costs_in_words, require_named
from sdbench.records.figures import COLUMNS, WIDTH
from sdbench.records.read import EVALUATED, read_all
from sdbench.records.setup import SETTINGS
from sdbench.report.markdown import in_common, markdown
from sdbench.report.pictures import draw_days, draw_learned, draw_plan, draw_quality
from sdbench.report.plans import plan_blocks, plan_table, told_apart_by, within_limits
from sdbench.report.speeds import score_table, speed_table


def main(argv=None):
    begin()
    settings = parse(Report, __doc__, argv, 'report.py')
    with one_line_errors('report.py'):
        print(report(settings))


def report(settings: Report) -> str:
    """Return the report as Markdown, and write the files that --csv and the flags of pictures name.

    Raises UserError if a record cannot be calculated with, or what was asked for does not follow from the records.
    """
    # the records, and those that a flag needs
    rows = read_all(settings.records)
    require_named({row['device'] for row in rows}, settings.dollars_per_gpu_hour)
    records = pd.DataFrame([row for row in rows if row['stage'] != 'evaluate'])
    evaluations = pd.DataFrame([row for row in rows if row['stage'] == 'evaluate'])
    if records.empty or (records['stage'] != 'train').all():
        for flag in ('compare', 'extrapolate', 'phase', 'figure', 'learned'):
            if getattr(settings, flag):
                raise UserError(f'--{flag} needs records of a training, and there are none')
    if settings.quality and evaluations.empty:
        raise UserError('--quality needs records of evaluate.py, and there are none')

    # a plan, or else a table for each kind of record
    parts = []  # each a table and its blocks
    if settings.phase:
        parts.append(plan_report(records, settings))
    elif len(records):
        parts.append(speed_report(records, settings))
    if settings.learned:
        draw_learned(settings.learned, records, settings.dollars_per_gpu_hour)
    if len(evaluations) and not settings.phase:
        parts.append(score_report(evaluations, settings))
    tables = [table for table, _ in parts]
    blocks = [block for _, found in parts for block in found]

    # by which prices, and which files
    priced = pd.concat([table[table['total_gpu_hours'] > 0][['device', 'price']] for table in tables])
    if len(priced):
        whose = '--dollars_per_gpu_hour'
        if not settings.dollars_per_gpu_hour and (priced['price'] != DOLLARS_PER_GPU_HOUR).any():
            whose = 'of the records; --dollars_per_gpu_hour gives others'
        blocks.append(f'Costs: {costs_in_words(zip(priced["device"], priced["price"], strict=True))} ({whose}).')
        if whose == '--dollars_per_gpu_hour' and priced['price'].nunique() == 1 and priced['device'].nunique() > 1:
            blocks.append(ONE_PRICE)
    if settings.csv:
        write_csv(settings.csv, tables)
    files = [path for path in (settings.figure, settings.learned, settings.quality, settings.csv) if path]
    blocks = [block if '\n' in block else textwrap.fill(block, WIDTH, break_on_hyphens=False)
              for block in blocks if block]
    if files:
        blocks.append(f'Written: {", ".join(files)}')
    return '\n\n'.join(blocks)


def plan_report(records: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """Return the table of plans and its blocks of Markdown, and draw it for --figure."""
    plans, title, sentences = plan_table(records, settings)
    apart = told_apart_by(plans)  # also where only some are within the limits
    plans, how_near = within_limits(plans, apart, settings.max_dollars, settings.max_days)
    if settings.figure:
        draw_plan(settings.figure, plans, apart, title)
    return plans, [title, *plan_blocks(plans, apart), *how_near, *sentences]


def speed_report(records: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """Return the table of speeds and its blocks, what rows agree in below it, and draw it for --figure."""
    speeds, sentences = speed_table(records, settings)
    if settings.figure:
        trainings = speeds[speeds['stage'] == 'train']
        draw_days(settings.figure, trainings, settings.training_images or TRAINING_IMAGES)
    keys = [*SETTINGS]
    if speeds.groupby(['setting', 'num_devices'])['num_nodes'].nunique().max() > 1:
        keys.append('num_nodes')  # as many GPUs on another number of machines
    if settings.compare:
        keys = ['run', *keys, 'date', 'git_commit']
    return speeds, [*markdown(speeds, keys), in_common(speeds, keys), *sentences]


def score_report(evaluations: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """Return the table of scores and its blocks, what rows agree in below it, and draw it for --quality."""
    scores = score_table(evaluations, settings.dollars_per_gpu_hour)
    common = in_common(scores, EVALUATED)
    if settings.quality:
        draw_quality(settings.quality, scores, common)
    return scores, [*markdown(scores, EVALUATED), common]


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
