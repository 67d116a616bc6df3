"""Turn throughput records into days, GPU-hours and dollars, and extrapolate them to more GPUs.

    python report.py results.jsonl                     # a table for each setting that was measured
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py results.jsonl --phase 1126400000@256 --phase 1740800000@512  # as SD2 base was really trained
    python report.py results.jsonl --compare           # a row a record, what differs, and the speed over the first's

A record is a line of JSON as benchmark.py writes it, or a row of a CSV file with the same keys as its columns.
A figure is rounded once, when printed: to the decimals of the published table (images/s and percents 1, days and
ratios 2, GPU-hours and dollars 0), or to three significant digits where these are more.
"""

import argparse
import csv
import io
import json
import math
import os
import sys
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median

TRAINING_IMAGES = 2_867_200_000  # 1,400,000 steps of 2048 images: Stable Diffusion 2 base, as published
DOLLARS_PER_GPU_HOUR = 2.0
SECONDS_PER_DAY = 86_400

# Records are averaged and fitted together only where all of these agree; one that is not stated agrees with no value.
# Left out: numbers of devices and nodes, which are a table's rows, and what does not bear on speed (seed, date).
MICROBATCH = 'device_train_microbatch_size'
SETTINGS = ('device', 'image_size', 'stage', 'model_name', 'batch_size', MICROBATCH, 'precision', 'use_ema', 'encoders',
            'encoder_precision', 'dataset', 'num_workers', 'channels_last', 'compile', 'attention',
            'gradient_checkpointing', 'fused_optimizer', 'versions')
COLUMNS = {  # key: heading, template and decimals in print
    'num_devices': ('GPUs', '{}', 0),
    'images_per_sec': ('images/s', '{}', 1),
    'images_per_sec_per_device': ('images/s per GPU', '{}', 2),
    'scaling_efficiency': ('efficiency', '{} %', 1),
    'speed_over_first': ('over first', '{} x', 2),
    'days': ('days', '{}', 2),
    'gpu_hours': ('GPU-hours', '{}', 0),
    'cost_usd': ('cost', '${}', 0),
}
FIGURES = tuple(key for key in COLUMNS if key != 'speed_over_first')


def days_to_train(images_per_sec: float, num_images: int = TRAINING_IMAGES) -> float:
    return num_images / images_per_sec / SECONDS_PER_DAY


def gpu_hours(images_per_sec: float, num_devices: int, num_images: int = TRAINING_IMAGES) -> float:
    return days_to_train(images_per_sec, num_images) * 24 * num_devices


def cost_usd(images_per_sec: float, num_devices: int, num_images: int = TRAINING_IMAGES,
             dollars_per_gpu_hour: float = DOLLARS_PER_GPU_HOUR) -> float:
    return gpu_hours(images_per_sec, num_devices, num_images) * dollars_per_gpu_hour


def read_records(path: str) -> list[dict]:
    """The records of a file of JSON lines or of a CSV file; ValueError names file and line."""
    try:
        text = Path(path).read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'{path}: {getattr(error, "strerror", "not text")}; give JSON lines or CSV') from None
    number, records = 1, []
    try:
        if path.lower().endswith('.csv'):
            for row in (reader := csv.DictReader(io.StringIO(text, newline=''))):
                number = reader.line_num
                records.append(check({key: cell_value(cell) for key, cell in row.items()}, f'{path}:{number}'))
        else:
            for number, line in enumerate(text.split('\n'), start=1):
                if line.strip():  # integers are read as floats, which have no limit on their digits
                    records.append(check(json.loads(line, parse_int=float), f'{path}:{number}'))
    except (json.JSONDecodeError, RecursionError, csv.Error) as error:
        raise ValueError(f'{path}:{number}: {error}; a record is one JSON object a line, or one CSV row') from None
    if not records:
        raise ValueError(f'{path}: no records in it; benchmark.py --results {path} adds one')
    return records


def cell_value(cell):
    try:
        return float(cell)
    except (TypeError, ValueError):
        return {'true': True, 'yes': True, 'false': False, 'no': False}.get(str(cell).lower(), cell)


def check(record, where):
    """The record without what is not stated; ValueError where it cannot be calculated with."""
    if not isinstance(record, dict) or None in record:
        raise ValueError(f'{where}: not one JSON object, or more cells than columns')
    record = {'stage': 'train', 'status': 'complete', 'extrapolated': False} | {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in record.items() if value not in (None, '', 'auto')}
    for key, allowed in (('status', ('complete', 'interrupted', 'failed')), ('extrapolated', (True, False))):
        if record[key] not in allowed:
            raise ValueError(f'{where}: {key} {record[key]!r} is none of {", ".join(map(words, allowed))}')
    speed = 'loader_images_per_sec' if record['stage'] == 'loader' else 'images_per_sec'
    needed = ['device', 'num_devices', 'image_size', *[speed] * (record['status'] == 'complete')]
    if missing := [key for key in needed if key not in record]:
        raise ValueError(f'{where}: no {", ".join(missing)}; a record needs {", ".join(needed)}')
    whole = ('num_devices', 'image_size', 'batch_size', MICROBATCH)
    for key in (*whole, 'images_per_sec', 'loader_images_per_sec'):
        value, kind = record.get(key, 1), int if key in whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not 1e-15 < value < 1e15:
            raise ValueError(f'{where}: {key} {value!r} is not a positive {"whole " * (kind is int)}number')
    return record


def words(value):
    """A value as one line of text, without what a terminal would act on."""
    if isinstance(value, dict):
        value = ', '.join(f'{name} {value[name]}' for name in sorted(value))
    text = 'yes' if value is True else 'no' if value is False else '' if value is None else str(value)
    return ' '.join(''.join(char if char.isprintable() else ' ' for char in text).split())


def alike(record, *but):
    return tuple(words(record.get(key)) for key in SETTINGS if key not in but)


def differing(rows):
    return [key for key in SETTINGS if len({row[key] for row in rows}) > 1]


def grouped(items, key):
    groups = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def comparable(records):
    """The records in groups of equal settings. More devices leave each a smaller share of a fixed batch: a run whose
    microbatch is all of its share counts as one at the largest microbatch of the runs that are otherwise alike."""
    def microbatch(record):
        size = record.get(MICROBATCH, 0)
        return largest if size * record['num_devices'] == record.get('batch_size') else size

    groups = []
    for family in grouped(records, lambda record: alike(record, MICROBATCH)):
        largest = max(record.get(MICROBATCH, 0) for record in family)
        groups += grouped(family, microbatch)
    return groups


def rows_of(records):
    """A row for each number of devices with the median of its complete runs, and a row for each other record."""
    def measured(record):
        return record['status'] == 'complete' and not record['extrapolated']

    rows = []
    for runs in grouped(records, lambda record: (record['num_devices'], measured(record) or id(record))):
        run, speeds = runs[0], sorted(float(run['images_per_sec']) for run in runs if 'images_per_sec' in run)
        notes = 'extrapolated by its source' if run['status'] == 'complete' else run['status']
        notes += f': {words(run["error"])[:60]}' if 'error' in run else ''
        if measured(run):
            notes = f'median of {len(runs)} runs, {speeds[0]:,.1f} to {speeds[-1]:,.1f}' if runs[1:] else ''
        rows.append(dict(zip(SETTINGS, alike(run), strict=True)) | {
            'num_devices': run['num_devices'], 'images_per_sec': median(speeds) if speeds else None, 'notes': notes,
            'status': run['status'], 'measured': measured(run), 'extrapolated': words(run['extrapolated'])})
    return sorted(rows, key=itemgetter('num_devices'))


def with_figures(rows, num_images, dollars_per_gpu_hour):
    """The rows with what follows from their throughput; ratios are to the first measured one."""
    first = min((row for row in rows if row['images_per_sec']), key=lambda row: not row['measured'], default={})
    return [row if not (speed := row['images_per_sec']) else row | {
        'images_per_sec_per_device': speed / row['num_devices'],
        'scaling_efficiency': speed / row['num_devices'] / (first['images_per_sec'] / first['num_devices']),
        'speed_over_first': speed / first['images_per_sec'],
        'days': days_to_train(speed, num_images),
        'gpu_hours': gpu_hours(speed, row['num_devices'], num_images),
        'cost_usd': cost_usd(speed, row['num_devices'], num_images, dollars_per_gpu_hour),
    } for row in rows]


def fit_step_seconds(counts: list[int], seconds: list[float]) -> tuple[float, float]:
    """The a, b >= 0 for which a / n + b is closest to the seconds that a step took on n devices.

    Least squares of the relative errors: the long steps on few devices would outweigh all others in absolute ones.
    """
    pairs = [(1 / n / t, 1 / t) for n, t in zip(counts, seconds, strict=True)]  # x, y: a x + b y = 1 where it fits
    terms = [(x, y, x * x, x * y, y * y) for x, y in pairs]
    u, v, uu, uv, vv = map(sum, zip(*terms, strict=True))
    a, b = (u * vv - v * uv) / (uu * vv - uv**2), (v * uu - u * uv) / (uu * vv - uv**2)
    return (u / uu, 0.0) if b < 0 else (0.0, v / vv) if a < 0 else (a, b)


def extrapolate(rows, counts):
    """Rows predicted for `counts` and what they rest on; or none, and the reason."""
    speeds = {row['num_devices']: row['images_per_sec'] for row in rows if row['measured']}
    batch = int(rows[0]['batch_size'] or 1)  # a batch that is not stated cancels out, as long as it is fixed
    if len(speeds) < 3:
        return [], f'--extrapolate: a fit needs three numbers of GPUs measured in one setting, not {len(speeds)}'
    if 1 < batch < max(counts):
        return [], f'--extrapolate {max(counts)}: more GPUs than the {batch} images of a batch'
    a, b = fit_step_seconds(list(speeds), [batch / speed for speed in speeds.values()])
    predicted = {count: batch / (a / count + b) for count in (*speeds, *counts)}
    worst = max(speeds, key=lambda count: abs(predicted[count] / speeds[count] - 1))
    shared = rows[0] | {'status': 'complete', 'measured': False, 'extrapolated': 'yes', 'notes': 'extrapolated'}
    return [shared | {'num_devices': n, 'images_per_sec': predicted[n]} for n in sorted({*counts} - {*speeds})], (
        f'Extrapolated with step_seconds(n) = {a:.5g} / n + {b:.5g} for a batch of '
        f'{batch if batch > 1 else "one image"}, fitted on {", ".join(map(str, speeds))} GPUs; worst residual '
        f'{predicted[worst] / speeds[worst] - 1:+.1%} of the images/s, on {worst} GPUs.')


def plan(rows, phases):
    """A row for each setting and number of GPUs that has every size of `phases` (size: images), with the days of each;
    the microbatch may differ between sizes. ValueError where a phase was not measured."""
    rows = [row for row in rows if row['status'] == 'complete' and row['stage'] == 'train']
    plans = []
    for size, images in phases.items():
        if str(size) not in {row['image_size'] for row in rows}:
            raise ValueError(f'--phase {images}@{size}: no record at {size} px; measure one with --image_size {size}')
    for runs in grouped(rows, lambda row: (row['num_devices'], alike(row, 'image_size', MICROBATCH))):
        best = {int(run['image_size']): run for run in sorted(runs, key=itemgetter('measured', 'images_per_sec'))}
        if phases.keys() <= best.keys():
            days = {size: days_to_train(best[size]['images_per_sec'], images) for size, images in phases.items()}
            plans.append(best[size] | {f'days at {size} px': days[size] for size in phases} | {
                'images_per_sec': sum(phases.values()) / sum(days.values()) / SECONDS_PER_DAY,
                'notes': '; '.join(dict.fromkeys(best[size]['notes'] for size in phases if best[size]['notes']))})
    if not plans:
        raise ValueError(f'--phase: no setting has records at all of {", ".join(map(str, phases))} px on as many GPUs')
    return sorted(plans, key=itemgetter('num_devices'))


def loader_lines(records):
    """How many times the model's throughput the loader's is: the model of the record itself, or the fastest alike."""
    def place(record):
        return f'{record["num_devices"]} x {words(record["device"])}, {record["image_size"]} px'

    for record in records:
        if loader := record.get('loader_images_per_sec'):
            models = [run for run in records if run['stage'] == 'train' and run['status'] == 'complete']
            speeds = [run['images_per_sec'] for run in models if place(run) == place(record)]
            model = record.get('images_per_sec') or max(speeds, default=None)
            times = f"{loader / model:,.1f} times the model's {model:,.1f}" if model else 'no model measured there'
            yield f'Loader, {place(record)}: {loader:,.1f} images/s, {times}.'


def cell(key, value):
    """A figure as printed, and anything else as text."""
    if not isinstance(value, float):
        return words(value).replace('|', r'\|')
    _, template, decimals = COLUMNS.get(key, COLUMNS['days'])
    value *= 100 if '%' in template else 1
    return template.format(f'{value:,.{max(decimals, 2 - math.floor(math.log10(value)))}f}')


def markdown(keys, rows):
    """An aligned table, texts to the left; a column with nothing in it is left out."""
    columns = []
    for key in keys:
        cells = [cell(key, row.get(key)) for row in rows]
        if any(cells):
            heading, text = COLUMNS.get(key, (key,))[0], key in (*SETTINGS, 'notes')
            width = max(3, *map(len, (heading, *cells)))
            rule = '-' * width if text else '-' * (width - 1) + ':'
            columns.append([one.ljust(width) if text else one.rjust(width) for one in (heading, rule, *cells)])
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in zip(*columns, strict=True))


def write_csv(path, rows, extra):
    notes = ['notes'] * any(row['notes'] and row['extrapolated'] == 'no' for row in rows)
    keys = ['device', *FIGURES, 'extrapolated', *extra, *notes]
    with open(path, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, dict.fromkeys(keys), extrasaction='ignore', lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def draw(path, curves, num_images):
    """Days against GPUs on log axes: `curves` maps a label to its rows."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, StrMethodFormatter
    except ImportError:
        raise ValueError('matplotlib is missing: pip install matplotlib') from None
    if not curves:
        raise ValueError('no complete record to draw')
    figure = Figure(figsize=(9, 5.2), layout='constrained')
    axes = figure.add_subplot(xscale='log', yscale='log')
    for index, (label, rows) in enumerate(curves.items()):
        color, marker = ('#1f3b73', '#d9730d', '#2a9d8f', '0.5')[index % 4], 'osD^'[index % 4]
        counts, days = [row['num_devices'] for row in rows], [row['days'] for row in rows]
        base = next((row for row in rows if row['measured']), rows[0])
        axes.plot(counts, [base['days'] * base['num_devices'] / count for count in counts], color='0.65', lw=0.8)
        axes.plot(counts, days, color=color, lw=1.5)
        for row, x, y in zip(rows, counts, days, strict=True):
            axes.plot(x, y, marker, color=color, markerfacecolor=color if row['measured'] else 'white', markersize=8)
            axes.annotate(cell('days', y), (x, y), (5, 7), textcoords='offset points', fontsize=10)
        axes.annotate(label.replace(', ', '\n').replace('$', r'\$'), (counts[-1], days[-1]), (13, 4), va='top',
                      color=color, textcoords='offset points', fontsize=11, annotation_clip=False)
    ticks = sorted({row['num_devices'] for rows in curves.values() for row in rows})
    axes.set(xticks=ticks, xticklabels=ticks, xlim=(ticks[0] / 1.25, ticks[-1] * 1.25))
    axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=StrMethodFormatter('{x:,g}'))
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.set_xlabel('GPUs', fontsize=12)
    axes.set_ylabel('days', fontsize=12)
    axes.spines[['top', 'right']].set_visible(False)
    axes.set_title(f'Days to train Stable Diffusion on {num_images:,} images', loc='left', fontsize=14, weight='bold',
                   pad=26)
    axes.text(0, 1.04, 'filled: measured   hollow: extrapolated   thin line: ideal scaling', transform=axes.transAxes,
              fontsize=11, color='0.35')
    figure.savefig(path, dpi=160)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f'report.py: error: {words(message)}\n')  # one line, without the usage


def positive(text, kind=float):
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 1e-15 < value < 1e15:
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive {"whole " * (kind is int)}number')
    return value


def phase(text):
    try:
        images, size = text.split('@')
        return positive(images, int), positive(size, int)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f'{text!r} is not IMAGES@SIZE, such as 1126400000@256') from None


def title(row, keys):
    rest = [f'{key} {row[key]}' for key in keys if row[key] and key not in ('device', 'image_size')]
    return ', '.join([row['device'], row['image_size'] + ' px', *rest])


def report(args):
    """The report as text; writes the files that were asked for."""
    records = [record for path in args.records for record in read_records(path)]
    runs = [record for record in records if record['stage'] != 'loader']
    priced = partial(with_figures, dollars_per_gpu_hour=args.dollars_per_gpu_hour)
    tables, said = [], []
    for rows in map(rows_of, comparable(runs)):
        predicted, sentence = extrapolate(rows, args.extrapolate) if args.extrapolate else ([], '')
        tables.append(priced(sorted(rows + predicted, key=itemgetter('num_devices')), args.training_images))
        said.append(sentence)
    everything = [row for rows in tables for row in rows]
    if said and all(sentence.startswith('--extrapolate') for sentence in said):  # else it stands below its table
        raise ValueError(said[0])
    extra = differs = differing([rows[0] for rows in tables])
    names = [title(rows[0], differs) for rows in tables]
    blocks = []
    for name, rows, sentence in zip(names, tables, said, strict=True):
        same = ', '.join(f'{key} {rows[0][key]}' for key in SETTINGS[2:] if key not in differs and rows[0][key])
        blocks += [f'### {name}', same, markdown([*FIGURES, 'notes'], rows), sentence]
    if args.compare:
        everything = priced([row for run in runs for row in rows_of([run])], args.training_images)
        extra = [*differing(everything), 'speed_over_first']
        blocks = [markdown([*extra[:-1], *FIGURES[:3], 'speed_over_first', *FIGURES[4:], 'notes'], everything)]
    if args.phase:
        phases = {size: sum(images for images, other in args.phase if other == size) for _, size in args.phase}
        plans = priced(plan([row for rows in tables for row in rows], phases), sum(phases.values()))
        days = [f'days at {size} px' for size in phases]
        keys = ['device', *differing(plans), 'num_devices', *days, 'days', 'gpu_hours', 'cost_usd', 'notes']
        blocks += ['### ' + ', then '.join(f'{images:,} images at {size} px' for size, images in phases.items()),
                   markdown(dict.fromkeys(keys), plans)]
    blocks += loader_lines(records)
    curves = {name: complete for name, rows in zip(names, tables, strict=True)
              if (complete := [row for row in rows if row['status'] == 'complete'])}
    for flag, path, write in (('--csv', args.csv, partial(write_csv, rows=everything, extra=extra)),
                              ('--figure', args.figure, partial(draw, curves=curves, num_images=args.training_images))):
        try:
            if path is not None:
                write(path)
        except (OSError, ValueError) as error:
            raise ValueError(f'{flag} {path}: {getattr(error, "strerror", None) or error}') from None
    return '\n\n'.join(block for block in blocks if block)


def main(argv=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flag, count = parser.add_argument, partial(positive, kind=int)
    flag('records', nargs='+', metavar='RECORDS', help='files of JSON lines or CSV')
    flag('--training_images', type=count, default=TRAINING_IMAGES, help='images to train on (%(default)s)')
    flag('--dollars_per_gpu_hour', type=positive, default=DOLLARS_PER_GPU_HOUR, help='price (%(default)s)')
    flag('--extrapolate', type=count, nargs='+', default=[], metavar='GPUS', help='numbers of GPUs to predict')
    flag('--phase', type=phase, action='append', default=[], metavar='IMAGES@SIZE', help='a phase of a plan; repeat it')
    flag('--compare', action='store_true', help='one table with a row a record')
    flag('--figure', help='file for a picture of days against GPUs (png, svg, pdf)')
    flag('--csv', help='file for the rows, unrounded')
    args = parser.parse_args(argv)
    if args.compare and args.extrapolate:
        parser.error('--compare has a row a record: give --extrapolate in a run of its own')
    for name, path in (('--csv', args.csv), ('--figure', args.figure)):
        if path in args.records:
            parser.error(f'{name} {path}: would overwrite the records; give another file')
    try:
        print(report(args), flush=True)
    except ValueError as error:
        parser.error(str(error))
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == '__main__':
    main()
