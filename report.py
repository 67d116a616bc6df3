"""Turn throughput records into days, GPU-hours and dollars, and extrapolate them to more GPUs.

    python report.py results.jsonl                     # a table for each setting that was measured
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py published.csv --image_bytes 20000 # and what the remote must give, and what each node caches
    python report.py results.jsonl --phase 1126400000@256 --phase 1740800000@512  # as SD2 base was really trained
    python report.py results.jsonl --compare           # a row a record, what differs, and the speed over the first's
    python report.py results.jsonl --quality quality.png # scores of evaluate.py, over guidance and over the training

A record is a line of JSON as benchmark.py, encode.py or evaluate.py writes it, or a row of a CSV file with the same
keys as columns. A figure is rounded once, when printed: to the decimals of the published table, or to three
significant digits where these are more. Ratios are those of complete runs, to the first measured one. --csv holds the
rows of all tables unrounded: `plan` is the stage of a plan, `inf` stands for never.
"""
from settings.commands import Report
from settings.ends import one_line_errors
from settings.flags import parse

if __name__ == '__main__':
    parse(Report, __doc__)  # a mistake is answered before pandas, which takes a second

import math
import sys

import pandas as pd

from inputs.words import counted
from settings.costs import DATASET_IMAGES, TRAINING_IMAGES, Assumptions, Phase
from reporting.figures import draw
from reporting.plans import plan_rows
from reporting.quality import read_evaluations, table_of
from reporting.quality_figure import draw_quality
from reporting.records import SETTINGS, read_records, settings_in_one
from reporting.tables import (
    COLUMNS,
    MEANING_OF_MARK,
    Table,
    differing_settings,
    identity_that_differs,
    in_devices,
    labels_of_settings,
    markdown,
    marked,
    nodes_differ,
    settings_in_words,
    versions_in_all,
    without_packages,
)
from reporting.throughput import GPUS_PER_NODE, extrapolated_rows, rows_of_setting, with_figures

SHARD_BYTES = 2**26  # Streaming's default


def main(argv=None):
    args = parse(Report, __doc__, argv, 'report.py')
    with one_line_errors('report.py'):
        given = assumptions(args)
        files = [read_records(path) for path in args.records]
        records = pd.concat([records_of_file for records_of_file, _ in files], ignore_index=True)
        in_tables = records[records['stage'] != 'loader'].sort_values('stage', kind='stable')  # one stage after another
        rows = median_rows(in_tables)
        trained = rows[rows['reliable'] & (rows['stage'] == 'train')]

        if args.compare:
            tables = tables_of_records(in_tables, given)
        else:
            tables = tables_of_settings(rows, args.extrapolate, given)
        plans = tables_of_plans(records, trained, args.phase, given)
        evaluations = read_evaluations(args.records, given.dollars_per_gpu_hour)
        if len(evaluations):
            plans.append(table_of(evaluations))
        remarks = [sentence for _, left_out in files for sentence in left_out]
        remarks += [*remarks_on_costs(in_tables, given), *remarks_on_storage(given)]
        remarks += remarks_on_loaders(records, rows[rows['measured'] & (rows['stage'] == 'train')])
        if records['doubt'].any():
            remarks.append(MEANING_OF_MARK)

        if args.csv:
            write_csv(args.csv, in_tables, tables + plans)
            say_written(args.csv)
        if args.figure:
            draw(args.figure, rows_of_tables(tables, in_tables), given.training_images, as_ladder=args.compare)
            say_written(args.figure)
        if args.quality:
            draw_quality(args.quality, evaluations, given.dollars_per_gpu_hour)
            say_written(args.quality)
    print(report_text(in_tables, tables + plans, remarks))


def say_written(path: str) -> None:
    print(f'wrote {path}', file=sys.stderr)


def assumptions(args: Report) -> Assumptions:
    """What the flags say that days and dollars rest on."""
    return Assumptions(
        args.training_images or TRAINING_IMAGES, args.dataset_images or DATASET_IMAGES, args.dollars_per_gpu_hour,
        args.dollars_per_tb_month, args.image_bytes,
        counts_tiny=args.training_images is not None or args.dataset_images is not None)


def median_rows(records: pd.DataFrame) -> pd.DataFrame:
    """Setting by setting, a row for each number of GPUs with the median of its reliable runs, and one for each other
    record."""
    rows = [records.iloc[:0]]
    for _, runs in records.groupby(settings_in_one(records), sort=False):
        rows.append(rows_of_setting(runs))
    return pd.concat(rows, ignore_index=True)


def tables_of_settings(rows: pd.DataFrame, gpus_to_predict: list[int], given: Assumptions) -> list[Table]:
    """A table for each setting, with the predicted rows among the measured ones.

    Raises ValueError if no setting allows a prediction that was asked for; if some do, the reason stands below the
    tables of the others.
    """
    columns = [key for key in COLUMNS if key != 'speed_over_first']
    if not nodes_differ(rows):
        columns.remove('num_nodes')
    rows = rows.assign(heading=labels_of_settings(rows))
    why_not = '--extrapolate: no training in the records'
    some_were_predicted = False
    tables = []
    for _, setting_rows in rows.groupby(settings_in_one(rows), sort=False):
        is_encoding = setting_rows['stage'].iloc[0] == 'encode'
        remarks = []
        if gpus_to_predict and not is_encoding:
            try:
                predicted, basis = extrapolated_rows(setting_rows, gpus_to_predict)
                setting_rows = pd.concat([setting_rows, predicted]).sort_values('num_devices', kind='stable')
                some_were_predicted = True
            except ValueError as reason:
                why_not = basis = str(reason)
            remarks.append(basis)
        heading = setting_rows['heading'].iloc[0]
        setting_rows = with_figures(setting_rows, given)
        if is_encoding:
            remarks += remarks_on_encoding(setting_rows, given)
        tables.append(Table(heading, setting_rows, [*columns, 'notes'], remarks))
    if gpus_to_predict and not some_were_predicted:
        raise ValueError(why_not)
    return tables


def tables_of_records(records: pd.DataFrame, given: Assumptions) -> list[Table]:
    """A table for each stage with a row a record, in the order of the records."""
    columns = [key for key in COLUMNS if key != 'scaling_efficiency']
    if not nodes_differ(records):
        columns.remove('num_nodes')
    differing = differing_settings(records)
    packages = versions_in_all(records)
    tables = []
    for stage, rows in records.groupby('stage', sort=False):
        differing_here = [*differing_settings(rows), *identity_that_differs(rows)]
        same_here = [key for key in differing if key not in differing_here]
        first = rows.iloc[0].copy()
        first['versions'] = without_packages(first['versions'], packages)
        heading = ', '.join(settings_in_words(first, same_here))
        rows = with_figures(rows, given)
        remarks = remarks_on_encoding(rows, given) if stage == 'encode' else []
        tables.append(Table(heading, rows, [*differing_here, *columns, 'notes'], remarks))
    return tables


def tables_of_plans(records: pd.DataFrame, trained: pd.DataFrame, phases: list[Phase],
                    given: Assumptions) -> list[Table]:
    """The plan of --phase; or, where there are records of encoding, one for each size that was trained on latents."""
    encodings = records[records['reliable'] & (records['stage'] == 'encode')]
    if not phases and not given.counts_tiny:
        trained = trained[trained['model_name'] != 'tiny']
    plans = []
    if phases:
        plans = [phases]
    elif len(encodings):
        sizes = trained['image_size'][trained['encoders'] == 'text_in_loop'].unique()
        plans = [[Phase(given.training_images, size)] for size in sorted(sizes)]
    settings = [key for key in differing_settings(trained) if key not in ('device', 'image_size')]
    figures = [key for key in COLUMNS if key not in ('scaling_efficiency', 'speed_over_first')]
    if not nodes_differ(trained):
        figures.remove('num_nodes')
    tables = []
    for plan in plans:
        rows = plan_rows(trained, encodings, plan, given, only_with_latents=not phases)
        if rows.empty:
            sizes = ' and '.join(dict.fromkeys(phase.size for phase in plan))
            raise ValueError(f'--phase: no number of devices was measured in one setting at {sizes} px; the records '
                             f'have {sizes_in_words(trained)}, without those in doubt; measure each size with the same '
                             'flags')
        heading = ', then '.join(f'{counted(phase.images, "image")} at {phase.size} px' for phase in plan)
        table = Table(f'Plan: train on {heading}', rows, ['device', *settings, *figures, 'notes'])
        if 'latents_tb' in rows:
            remark = (f'For latents, all {given.dataset_images:,} images of the data set (--dataset_images) are '
                      'encoded once at each size, however many are trained on (--training_images, --phase)')
            if rows['cost_usd'].notna().any():
                remark += ('; the cost holds their storage while the training lasts, at '
                           f'${given.dollars_per_tb_month:g} a TB-month')
            table.remarks.append(f'{remark}.')
        tables.append(table)
    return tables


def sizes_in_words(trained: pd.DataFrame) -> str:
    """The sizes that were measured, and on how many devices each."""
    sizes = []
    for size, rows in sorted(trained.groupby('image_size'), key=lambda entry: int(entry[0])):
        sizes.append(f'{size} px on {" and ".join(dict.fromkeys(in_devices(rows)))}')
    return ', '.join(sizes) or 'none that count'


def remarks_on_encoding(rows: pd.DataFrame, given: Assumptions) -> list[str]:
    """What the columns of an encoding count that are in its table."""
    columns = [COLUMNS[key][0] for key in ('days', 'gpu_hours', 'cost_usd', 'latents_tb') if rows[key].notna().any()]
    if not columns:
        return []
    return [f'Of an encoding: {", ".join(columns)} count all {given.dataset_images:,} images of the data set once '
            '(--dataset_images); --training_images does not change them.']


def remarks_on_costs(records: pd.DataFrame, given: Assumptions) -> list[str]:
    """Which records have no days or no price."""
    remarks = []
    if (records['model_name'] == 'tiny').any() and not given.counts_tiny:
        remarks.append('The model tiny is for trying things out and has no days and no cost but in a plan of '
                       '--phase; --training_images asks for them.')
    if records['on_cpu'].any():
        remarks.append('Ranks on a CPU have no GPU-hours and no cost.')
    return remarks


def remarks_on_storage(given: Assumptions) -> list[str]:
    """How many shards an epoch reads, if --image_bytes says how large they are."""
    if not given.image_bytes:
        return []
    shards = math.ceil(given.dataset_images * given.image_bytes / SHARD_BYTES)
    return [f'An epoch of {counted(given.dataset_images, "sample")} is {counted(shards, "shard")} of 64 MiB '
            f'(--dataset_images); the cache is what it leaves on each node of {GPUS_PER_NODE} GPUs.']


def remarks_on_loaders(records: pd.DataFrame, trained: pd.DataFrame) -> list[str]:
    """How many times the throughput of the fastest model on the same devices each loader's is; a model whose speed is
    in doubt counts where there is no other."""
    loaders = records[records['loader_images_per_sec'].notna()]
    if loaders.empty:
        return []
    place = ['num_devices', 'device', 'image_size']
    by_speed = trained.sort_values(['reliable', 'images_per_sec'], ascending=False)
    fastest = {tuple(row[place]): row for _, row in by_speed.drop_duplicates(place).iterrows()}
    remarks = []
    for _, record in loaders.iterrows():
        loader = record['loader_images_per_sec']
        model = fastest.get(tuple(record[place]))
        times = 'no model measured there'
        if model is not None:
            speed = marked(f'{model["images_per_sec"]:,.1f}', model['doubt'])
            ratio = marked(f'{loader / model["images_per_sec"]:,.1f}', model['doubt'] or record['doubt'])
            times = f"{ratio} times the model's {speed}"
        speed = marked(f'{loader:,.1f}', record['doubt'])
        remarks.append(f'Loader, {record["num_devices"]} x {record["device"]}, {record["image_size"]} px: '
                       f'{speed} images/s, {times}.')
    return remarks


def report_text(records: pd.DataFrame, tables: list[Table], remarks: list[str]) -> str:
    """The whole report as Markdown: what all records have in common, the tables, and the remarks."""
    blocks = []
    if len(records):
        blocks.append(f'All records in the tables: {settings_in_common(records)}')
    packages = versions_in_all(records)
    for table in tables:
        if table.heading:
            blocks.append(f'### {table.heading}')
        versions = table.rows['versions'].map(lambda text: without_packages(text, packages))
        blocks.append(markdown(table.rows.assign(versions=versions), table.columns))
        blocks += table.remarks
    return '\n\n'.join([*blocks, *remarks])


def settings_in_common(records: pd.DataFrame) -> str:
    """The settings that all records agree in, with the packages that all state in one version."""
    common = records.iloc[0].copy()
    common['versions'] = ', '.join(versions_in_all(records))
    differing = differing_settings(records)
    keys = [key for key in SETTINGS if key == 'versions' or key not in differing]
    words = settings_in_words(common, keys)
    if len(words) < len(settings_in_words(common, keys, always=keys)):
        words.append('other settings at the defaults')
    return ', '.join(words)


def rows_of_tables(tables: list[Table], records: pd.DataFrame) -> pd.DataFrame:
    """The rows of all tables, and at least the columns of the records where there is no table."""
    return pd.concat([records.iloc[:0], *(table.rows for table in tables)])


def write_csv(path: str, records: pd.DataFrame, tables: list[Table]) -> None:
    """Writes the rows of all tables, unrounded, with the columns that any of them fills."""
    rows = rows_of_tables(tables, records)
    printed = {key for table in tables for key in table.columns}
    filled = [key for key in COLUMNS if key in printed and key in rows and rows[key].notna().any()]
    columns = ['device', *filled, 'extrapolated', *differing_settings(records)]
    if (rows['status'] != 'complete').any():
        columns.append('status')
    if rows['stage'].nunique() > 1:
        columns.append('stage')
    if rows['doubt'].any():
        columns.append('doubt')
    columns = list(dict.fromkeys(columns))  # each once
    try:
        rows.to_csv(path, columns=columns, index=False)
    except OSError as error:
        raise ValueError(f'--csv {path} cannot be written: {error.strerror}; name another file') from None


if __name__ == '__main__':
    main()
