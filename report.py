"""Turn records into days, GPU-hours and dollars, and predict more GPUs.

    python report.py results.jsonl                     # a row for each setting and number of GPUs that was measured
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py plan.jsonl results.jsonl --phase 256 --phase 512    # a plan, by what was forecast and measured
    python report.py results.jsonl --compare           # a row for each training, and its speed over the first's
    python report.py results.jsonl --learned learned.png # which training learned best, over images and dollars
    python report.py results.jsonl --days 3 --dollars_per_gpu_hour H100=2.5 H200=3.2  # what three days buy
    python report.py results.jsonl --quality quality.png # scores of evaluate.py, over guidance and over the training

A record is a line of JSON as benchmark.py, encode.py or evaluate.py writes it, or a row of a CSV file with the same
keys as columns. A setting is a column where rows differ in it, and stands above the table where they agree. A figure
is rounded once, when printed: to the decimals of the published table, or to three significant digits where these are
more. --csv holds the rows of all tables unrounded, with every key of their records, and can be read again, but for
plans.
"""
from sdbench.flags.commands import Report
from sdbench.flags.parser import answer_early, parse
from sdbench.process import begin, one_line_errors

if __name__ == '__main__':
    answer_early(Report, __doc__)

import json
import signal
import textwrap

import pandas as pd

from sdbench.costs import TRAINING_IMAGES, prices_in_words
from sdbench.records.figures import COLUMNS, WIDTH
from sdbench.records.read import EVALUATED, SETTINGS, join_resumed, read_records
from sdbench.report.markdown import in_common, markdown
from sdbench.report.pictures import draw_days, draw_learned, draw_plan, draw_quality
from sdbench.report.plans import plan_blocks, plan_table
from sdbench.report.speeds import score_table, speed_table


def main(argv=None):
    begin()
    settings = parse(Report, __doc__, argv, 'report.py')
    with one_line_errors('report.py'):
        print(report(settings))


def report(settings: Report) -> str:
    """Return the report as Markdown, and write the files that --csv and the flags of pictures name.

    Raises ValueError if a record cannot be calculated with, or what was asked for does not follow from the records.
    """
    # the records, and those that a flag needs
    rows = []
    for path in settings.records:
        found = read_records(path)
        if not found:
            raise ValueError(f'{path}: no records in it; give a file of --results, not a plan of --csv')
        rows += found
    rows = join_resumed(rows)
    records = pd.DataFrame([row for row in rows if row['stage'] != 'evaluate'])
    evaluations = pd.DataFrame([row for row in rows if row['stage'] == 'evaluate'])
    if records.empty or (records['stage'] != 'train').all():
        for flag in ('compare', 'extrapolate', 'phase', 'figure', 'learned'):
            if getattr(settings, flag):
                raise ValueError(f'--{flag} needs records of a training, and there are none')
    if settings.quality and evaluations.empty:
        raise ValueError('--quality needs records of evaluate.py, and there are none')

    # a plan, or else a table for each kind of record, with what its rows agree in above it, and sentences below it
    tables = []
    blocks = []
    drawings = {}  # by path what was drawn
    if settings.phase:
        plans, title, sentences = plan_table(records, settings)
        tables.append(plans)
        blocks += [title, *plan_blocks(plans), *sentences]
        blocks = [block if block.startswith('|') else textwrap.fill(block, WIDTH) for block in blocks]
        if settings.figure:
            draw_plan(settings.figure, plans, title)
            drawings[settings.figure] = f'GPU-hours of {len(plans)} plans'
    elif len(records):
        speeds, sentences = speed_table(records, settings)
        tables.append(speeds)
        keys = [*SETTINGS, 'num_nodes']
        if settings.compare:
            keys = ['run', *keys, 'date', 'git_commit']
        blocks += [in_common(speeds, keys), markdown(speeds, keys), *sentences]
        if settings.figure:
            trainings = speeds[speeds['stage'] == 'train']
            draw_days(settings.figure, trainings, settings.training_images or TRAINING_IMAGES)
            drawings[settings.figure] = 'days over the number of GPUs'
    if settings.learned:
        draw_learned(settings.learned, records, settings.dollars_per_gpu_hour)
        drawings[settings.learned] = 'eval loss of each training'
    if len(evaluations) and not settings.phase:
        scores = score_table(evaluations, settings.dollars_per_gpu_hour)
        tables.append(scores)
        common = in_common(scores, EVALUATED)
        blocks += [common, markdown(scores, EVALUATED)]
        if settings.quality:
            draw_quality(settings.quality, scores, common)
            drawings[settings.quality] = 'FID and CLIP score'

    # by which prices, and which files
    priced = [row['device'] for table in tables for _, row in table.iterrows() if row.get('total_gpu_hours', 0) > 0]
    if priced:
        blocks.append(f'Costs: {prices_in_words(priced, settings.dollars_per_gpu_hour)} (--dollars_per_gpu_hour).')
    if settings.csv:
        write_csv(settings.csv, tables)
        drawings[settings.csv] = 'all rows'
    if drawings:
        written = ', '.join(f'{path} ({what})' for path, what in drawings.items())
        blocks.append(f'Written: {written}')
    return '\n\n'.join(blocks)


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
