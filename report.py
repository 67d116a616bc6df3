"""Turn records into days, GPU-hours and dollars, and predict more GPUs.

    python report.py results.jsonl                     # a row for each setting and number of GPUs that was measured
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py results.jsonl --phase 1126400000@256 --phase 1740800000@512  # as SD2 base was really trained
    python report.py results.jsonl --compare           # a row for each training, and its speed over the first's
    python report.py results.jsonl --days 3 --dollars_per_gpu_hour H100=2.5 H200=3.2  # what three days buy
    python report.py results.jsonl --quality quality.png # scores of evaluate.py, over guidance and over the training

A record is a line of JSON as benchmark.py, encode.py or evaluate.py writes it, or a row of a CSV file with the same
keys as columns. A setting is a column where rows differ in it, and stands above the table where they agree. A figure
is rounded once, when printed: to the decimals of the published table, or to three significant digits where these are
more. --csv holds the rows of all tables unrounded, with every setting.
"""
from sdbench.flags.commands import Report
from sdbench.flags.parser import answer_early, parse
from sdbench.process import begin, one_line_errors

if __name__ == '__main__':
    answer_early(Report, __doc__)

import pandas as pd

from sdbench.costs import TRAINING_IMAGES, prices_in_words
from sdbench.records.read import EVALUATED, SETTINGS, read_records
from sdbench.report.markdown import in_common, markdown
from sdbench.report.pictures import draw_days, draw_quality
from sdbench.report.plans import plan_in_words, plan_table
from sdbench.report.scores import FROM_SPEED, score_table
from sdbench.report.speeds import speed_table

NOT_IN_CSV = ['record', 'setting', 'on_cpu']  # columns that are for the program alone


def main(argv=None):
    begin()
    settings = parse(Report, __doc__, argv, 'report.py')
    with one_line_errors('report.py'):
        print(report(settings))


def report(settings: Report) -> str:
    """Return the report as Markdown, and write the files that --csv, --figure and --quality name.

    Raises ValueError if a record cannot be calculated with, or what was asked for does not follow from the records.
    """
    rows = []
    for path in settings.records:
        found = read_records(path)
        if not found:
            raise ValueError(f'{path}: no records in it; benchmark.py --results {path} adds one')
        rows += found
    records = pd.DataFrame([row for row in rows if row['stage'] != 'evaluate'])
    evaluations = pd.DataFrame([row for row in rows if row['stage'] == 'evaluate'])
    require_what_flags_need(settings, records, evaluations)

    # a table for each kind of record, with what its rows agree in above it, and sentences below it
    tables = {}
    blocks = []
    if len(records):
        speeds, sentences = speed_table(records, settings)
        tables['speeds'] = speeds
        keys = [*SETTINGS, 'num_nodes']
        if settings.compare:
            keys = ['run', *keys, 'date', 'git_commit']
        blocks += [in_common(speeds, keys), markdown(speeds, keys), *sentences]
    if settings.phase:
        plans, left_out = plan_table(records, settings)
        tables['plans'] = plans
        blocks += [plan_in_words(settings.phase), markdown(plans, SETTINGS)]
        if left_out:
            blocks.append(f'Not in the plan: {"; ".join(left_out)}')
    if len(evaluations):
        scores = score_table(evaluations, records, settings.dollars_per_gpu_hour)
        tables['scores'] = scores
        blocks += [in_common(scores, EVALUATED), markdown(scores, EVALUATED)]
        if scores['gpu_hours'].notna().any():
            blocks.append(FROM_SPEED)

    if any('cost_usd' in table and table['cost_usd'].notna().any() for table in tables.values()):
        blocks.append(f'Costs: {prices_in_words(settings.dollars_per_gpu_hour)} (--dollars_per_gpu_hour).')

    written = write_files(settings, tables)
    if written:
        blocks.append(f'Written: {", ".join(written)}')
    return '\n\n'.join(blocks)


def require_what_flags_need(settings: Report, records: pd.DataFrame, evaluations: pd.DataFrame) -> None:
    """Raise ValueError if there are no records of the kind that a flag needs."""
    if records.empty or (records['stage'] != 'train').all():
        for flag in ('compare', 'extrapolate', 'phase', 'figure'):
            if getattr(settings, flag):
                raise ValueError(f'--{flag} needs records of a training, and there are none')
    if settings.quality and evaluations.empty:
        raise ValueError('--quality needs records of evaluate.py, and there are none')


def write_files(settings: Report, tables: dict[str, pd.DataFrame]) -> list[str]:
    """Write the files that --csv, --figure and --quality name, and return their paths.

    Args:
        settings: of the report.
        tables: those of `speeds`, `plans` and `scores` that the report has.
    """
    if settings.csv:
        write_csv(settings.csv, pd.concat(tables.values()))
    if settings.figure:
        speeds = tables['speeds']
        trainings = speeds[speeds['stage'] == 'train']
        draw_days(settings.figure, trainings, settings.training_images or TRAINING_IMAGES)
    if settings.quality:
        scores = tables['scores']
        draw_quality(settings.quality, scores, in_common(scores, EVALUATED))
    return [path for path in (settings.csv, settings.figure, settings.quality) if path]


def write_csv(path: str, rows: pd.DataFrame) -> None:
    """Write rows unrounded, with those of their columns that hold something."""
    rows = rows.drop(columns=NOT_IN_CSV, errors='ignore').replace('', None)
    rows.dropna(axis='columns', how='all').to_csv(path, index=False)


if __name__ == '__main__':
    main()
