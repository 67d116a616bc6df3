"""Turn throughput records into days, GPU-hours and dollars, and extrapolate them to more GPUs.

    python report.py results.jsonl                     # a table for each setting that was measured
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py published.csv --image_bytes 20000 # and what the remote must give, and what each node caches
    python report.py results.jsonl --phase 1126400000@256 --phase 1740800000@512  # as SD2 base was really trained
    python report.py results.jsonl --compare           # a row a record, what differs, and the speed over the first's

A record is a line of JSON as benchmark.py writes it, or a row of a CSV file with the same keys as its columns.
A figure is rounded once, when printed: to the decimals of the published table (images/s and percents 1, days and
ratios 2, GPU-hours and dollars 0), or to three significant digits where these are more.
"""

import argparse
import csv
import json
import math
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median

TRAINING_IMAGES = 2_867_200_000  # 1,400,000 steps of 2048 images: Stable Diffusion 2 base, as published
DATASET_IMAGES = 2_900_000_000
DOLLARS_PER_GPU_HOUR = 2.0
SECONDS_PER_DAY = 86_400
GPUS_PER_NODE = 8

# Records are averaged and fitted together only where all of these agree; one that is not stated agrees with no value.
# Left out: numbers of devices and nodes, which are a table's rows, and what does not bear on speed (seed, date).
# More devices leave each a smaller share of a fixed batch: to be one table, all runs need a microbatch that fits them.
SETTINGS = ('device', 'image_size', 'stage', 'model_name', 'batch_size', 'device_train_microbatch_size', 'precision',
            'use_ema', 'encoders', 'encoder_precision', 'dataset', 'num_workers', 'channels_last', 'compile',
            'attention', 'gradient_checkpointing', 'fused_optimizer', 'versions')
COLUMNS = {  # key: heading, template and decimals in print
    'num_devices': ('GPUs', '{}', 0),
    'images_per_sec': ('images/s', '{}', 1),
    'images_per_sec_per_device': ('images/s per GPU', '{}', 2),
    'scaling_efficiency': ('efficiency', '{} %', 1),
    'speed_over_first': ('over first', '{} x', 2),
    'days': ('days', '{}', 2),
    'gpu_hours': ('GPU-hours', '{}', 0),
    'cost_usd': ('cost', '${}', 0),
    'remote_mb_per_sec': ('remote', '{} MB/s', 1),
    'cache_tb_per_node': ('cache', '{} TB', 2),
}


def days_to_train(images_per_sec: float, num_images: int = TRAINING_IMAGES) -> float:
    return num_images / images_per_sec / SECONDS_PER_DAY


def gpu_hours(images_per_sec: float, num_devices: int, num_images: int = TRAINING_IMAGES) -> float:
    return days_to_train(images_per_sec, num_images) * 24 * num_devices


def remote_mb_per_sec(images_per_sec: float, image_bytes: float) -> float:
    """What the remote must give to all nodes together, in 10^6 bytes a second, while nothing is cached yet."""
    return images_per_sec * image_bytes / 1e6


def cache_tb_per_node(num_devices: int, image_bytes: float, dataset_images: int = DATASET_IMAGES) -> float:
    """What an epoch leaves in the cache of each node of 8 GPUs, in 10^12 bytes: its even share of the data set."""
    return dataset_images * image_bytes / math.ceil(num_devices / GPUS_PER_NODE) / 1e12


def num_shards(image_bytes: float, dataset_images: int = DATASET_IMAGES) -> int:
    """Shards of 64 MiB (2^26 bytes), Streaming's default, that hold the data set."""
    return math.ceil(dataset_images * image_bytes / 2**26)


def read_records(path: str) -> list[dict]:
    """The records of a file of JSON lines or of a CSV file; ValueError names file and line."""
    try:
        lines = Path(path).read_text(encoding='utf-8-sig', errors='replace').split('\n')
    except OSError as error:
        raise ValueError(f'{path}: {error.strerror}; give files of JSON lines or CSV') from None
    rows, records = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()], []
    if path.lower().endswith('.csv'):
        rows = [(number, {key: cell_value(cell) for key, cell in row.items()})
                for number, row in enumerate(csv.DictReader(lines), start=2)]
    for number, row in rows:
        try:
            records.append(check(json.loads(row) if isinstance(row, str) else row))
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{path}:{number}: not a record: {error}') from None
    if not records:
        raise ValueError(f'{path}: no records in it; benchmark.py --results {path} adds one')
    return records


def cell_value(cell):
    try:
        return float(cell)
    except (TypeError, ValueError):
        return {'true': True, 'yes': True, 'false': False, 'no': False}.get(str(cell).lower(), cell)


def check(record):
    """The record without what is not stated, and its settings as text; ValueError if it cannot be calculated with."""
    if not isinstance(record, dict) or None in record:
        raise ValueError('not one JSON object, or more cells than columns')
    record = {'stage': 'train', 'status': 'complete', 'extrapolated': False} | {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in record.items() if value not in (None, '', 'auto')}
    speed = 'loader_images_per_sec' if record['stage'] == 'loader' else 'images_per_sec'
    needed = ['device', 'num_devices', 'image_size', *[speed] * (record['status'] == 'complete')]
    if missing := [key for key in needed if key not in record]:
        raise ValueError(f'no {", ".join(missing)}; a record needs {", ".join(needed)}')
    whole = ('num_devices', 'image_size', 'batch_size', 'device_train_microbatch_size')
    for key in (*whole, 'images_per_sec', 'loader_images_per_sec'):
        value, kinds = record.get(key, 1), (int,) if key in whole else (int, float)
        if type(value) not in kinds or not 1e-15 < value < 1e15:
            raise ValueError(f'{key} {value!r} is not a positive {"whole " * (key in whole)}number')
    notes = 'extrapolated by its source' * bool(record['extrapolated'])
    if record['status'] != 'complete':
        notes = words(f'{record["status"]}: {record.get("error", "")}')[:70].rstrip(': ')
    return record | {key: words(record.get(key, '')) for key in (*SETTINGS, 'extrapolated')} | {
        'notes': notes, 'measured': not notes}


def words(value):
    """A value as one line of text."""
    if isinstance(value, dict):
        value = ', '.join(f'{name} {value[name]}' for name in sorted(value))
    return ' '.join(('yes' if value is True else 'no' if value is False else str(value)).split())


def grouped(items, key):
    groups = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def rows_of(records):
    """A row for each number of devices with the median of its complete runs, and a row for each other record."""
    rows = []
    for runs in grouped(records, lambda run: (run['num_devices'], run['measured'] or id(run))):
        speeds = sorted(float(run['images_per_sec']) for run in runs if 'images_per_sec' in run)
        spread = f'median of {len(runs)} runs, {speeds[0]:,.1f} to {speeds[-1]:,.1f}' if runs[1:] else ''
        rows.append(runs[0] | {'images_per_sec': median(speeds) if speeds else '', 'notes': runs[0]['notes'] or spread})
    return sorted(rows, key=itemgetter('num_devices'))


def with_figures(rows, num_images, args):
    """The rows with what follows from their throughput; ratios are to the first measured one."""
    first = min((row for row in rows if row['images_per_sec']), key=lambda row: not row['measured'], default={})
    return [row if not (speed := row['images_per_sec']) else row | {
        'images_per_sec_per_device': speed / row['num_devices'],
        'scaling_efficiency': speed / row['num_devices'] / (first['images_per_sec'] / first['num_devices']),
        'speed_over_first': speed / first['images_per_sec'],
        'days': days_to_train(speed, num_images),
        'gpu_hours': gpu_hours(speed, row['num_devices'], num_images),
        'cost_usd': gpu_hours(speed, row['num_devices'], num_images) * args.dollars_per_gpu_hour,
        'remote_mb_per_sec': remote_mb_per_sec(speed, args.image_bytes),
        'cache_tb_per_node': cache_tb_per_node(row['num_devices'], args.image_bytes, args.dataset_images),
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
    return [shared | {'num_devices': n, 'images_per_sec': predicted[n]} for n in sorted({*counts})], (
        f'Extrapolated with step_seconds(n) = {a:.5g} / n + {b:.5g} for a batch of '
        f'{batch if batch > 1 else "one image"}, fitted on {", ".join(map(str, speeds))} GPUs; worst residual '
        f'{predicted[worst] / speeds[worst] - 1:+.1%} of the images/s, on {worst} GPUs.')


def plan(rows, phases):
    """A row for each setting and number of GPUs that was measured at the size of every phase (images, size), with the
    speed over all of them; the microbatch may differ between sizes. ValueError where there is none."""
    sizes, free = [size for _, size in phases], {'image_size': '', 'device_train_microbatch_size': ''}
    trained = [row | free | {'size': row['image_size']} for row in rows if row['measured'] and row['stage'] == 'train']
    plans = []
    for runs in grouped(trained, itemgetter('num_devices', *SETTINGS)):
        speeds = {run['size']: run['images_per_sec'] for run in sorted(runs, key=itemgetter('images_per_sec'))}
        if {*sizes} <= speeds.keys():
            days = [days_to_train(speeds[size], images) for images, size in phases]
            notes = [f'{cell("days", some)} days at {size} px' for some, size in zip(days, sizes, strict=True)]
            speed = sum(images for images, _ in phases) / sum(days) / SECONDS_PER_DAY
            plans.append(runs[0] | {'images_per_sec': speed, 'notes': ', '.join(notes)})
    if not plans:
        raise ValueError(f'--phase: no number of GPUs was measured in one setting at {" and ".join(sizes)} px')
    return sorted(plans, key=itemgetter('num_devices'))


def loader_lines(records):
    """How many times the throughput of the fastest model on the same devices each loader's is."""
    place = itemgetter('num_devices', 'device', 'image_size')
    models = [record for record in records if record['measured'] and record['stage'] == 'train']
    for record in records:
        if loader := record.get('loader_images_per_sec'):
            model = max((run['images_per_sec'] for run in models if place(run) == place(record)), default=None)
            times = f"{loader / model:,.1f} times the model's {model:,.1f}" if model else 'no model measured there'
            yield 'Loader, {} x {}, {} px: {:,.1f} images/s, {}.'.format(*place(record), loader, times)


def cell(key, value):
    """A figure as printed, and anything else as text."""
    if not isinstance(value, float):
        return words(value).replace('|', r'\|')
    _, template, decimals = COLUMNS[key]
    value *= 100 if '%' in template else 1
    return template.format(f'{value:,.{max(decimals, 2 - math.floor(math.log10(value)))}f}')


def markdown(keys, rows):
    """An aligned table, texts to the left; a column with nothing in it is left out."""
    columns = []
    for key in keys:
        cells = [cell(key, row.get(key, '')) for row in rows]
        if any(cells):
            heading, text = COLUMNS.get(key, (key,))[0], key not in COLUMNS
            width = max(3, *map(len, (heading, *cells)))
            rule = '-' * width if text else '-' * (width - 1) + ':'
            columns.append([one.ljust(width) if text else one.rjust(width) for one in (heading, rule, *cells)])
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in zip(*columns, strict=True))


def draw(path, curves, num_images):
    """Days against GPUs on log axes: `curves` maps a label to its rows."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator
    if not curves:
        raise ValueError('--figure: no complete record to draw')
    figure = Figure(figsize=(9, 5.2), layout='constrained')
    axes = figure.add_subplot(xscale='log', yscale='log', xlabel='GPUs', ylabel='days')
    for index, (label, rows) in enumerate(curves.items()):
        color, marker = ('#1f3b73', '#d9730d', '#2a9d8f', '0.5')[index % 4], 'osD^'[index % 4]
        counts, days = [row['num_devices'] for row in rows], [row['days'] for row in rows]
        axes.plot(counts, [row['days'] * row['scaling_efficiency'] for row in rows], color='0.65', lw=0.8)
        axes.plot(counts, days, color=color, lw=1.5)
        for row, x, y in zip(rows, counts, days, strict=True):
            axes.plot(x, y, marker, color=color, markerfacecolor=color if row['measured'] else 'white', markersize=8)
            axes.annotate(cell('days', y), (x, y), (5, 7), textcoords='offset points')
        axes.annotate(label.replace(', ', '\n').replace('$', r'\$'), (counts[-1], days[-1]), (13, 4), va='top',
                      color=color, textcoords='offset points', fontsize=11, annotation_clip=False)
    ticks = sorted({row['num_devices'] for rows in curves.values() for row in rows})
    axes.set(xticks=ticks, xticklabels=ticks, xlim=(ticks[0] / 1.25, ticks[-1] * 1.25))
    axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter='{x:,g}')
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.spines[['top', 'right']].set_visible(False)
    axes.set_title(f'Days to train Stable Diffusion on {num_images:,} images\n', loc='left', fontsize=14, weight='bold')
    axes.text(0, 1.03, 'filled: measured   hollow: extrapolated   thin line: ideal scaling', fontsize=11, color='0.35',
              transform=axes.transAxes)
    figure.savefig(path, dpi=160)


def report(args):
    """The report as text; writes the files that were asked for."""
    records = [record for path in args.records for record in read_records(path)]
    runs = [record for record in records if record['stage'] != 'loader']
    differs = [key for key in SETTINGS if len({run[key] for run in runs}) > 1]
    figures = [key for key in COLUMNS if key != 'speed_over_first'][:None if args.image_bytes else -2]
    blocks, table, curves, basis = [], [], {}, ''
    for group in grouped(runs, itemgetter(*SETTINGS)):
        rows = rows_of(group)
        predicted, basis = extrapolate(rows, args.extrapolate) if args.extrapolate else ([], '')
        rows = with_figures(sorted(rows + predicted, key=itemgetter('num_devices')), args.training_images, args)
        stated = {key: f'{key} {rows[0][key]}' for key in SETTINGS[2:] if rows[0][key]}
        title = [rows[0]['device'], rows[0]['image_size'] + ' px', *(stated[key] for key in stated if key in differs)]
        same = ', '.join(stated[key] for key in stated if key not in differs)
        blocks += ['### ' + ', '.join(title), same, markdown([*figures, 'notes'], rows), basis]
        if complete := [row for row in rows if row['status'] == 'complete']:
            curves[', '.join(title)] = complete
        table += rows
    if basis and not any(row['notes'] == 'extrapolated' for row in table):
        raise ValueError(basis)  # the reason; where another table was extrapolated, it stands below its own
    plans = plan(table, args.phase) if args.phase else []
    if args.compare:
        table = with_figures([row for run in runs for row in rows_of([run])], args.training_images, args)
        keys = ['speed_over_first' if key == 'scaling_efficiency' else key for key in figures]
        blocks = [markdown([*differs, *keys, 'notes'], table)]
    if args.phase:
        keys = dict.fromkeys(['device', *differs, 'num_devices', 'days', 'gpu_hours', 'cost_usd', 'notes'])
        blocks += ['### ' + ', then '.join(f'{images:,} images at {size} px' for images, size in args.phase),
                   markdown(keys, with_figures(plans, sum(images for images, _ in args.phase), args))]
    if args.image_bytes:
        shards = num_shards(args.image_bytes, args.dataset_images)
        blocks.append(f'An epoch of {args.dataset_images:,} samples is {shards:,} shards of 64 MiB; the cache is what '
                      f'it leaves on each node of {GPUS_PER_NODE} GPUs.')
    blocks += loader_lines(records)
    if args.csv:
        extra = ['speed_over_first'] * args.compare + ['status'] * any(row['status'] != 'complete' for row in table)
        keys = dict.fromkeys(['device', *figures, 'extrapolated', *differs, *extra])
        with open(args.csv, 'w', newline='', encoding='utf-8') as file:
            rows = [[row.get(key, '') for key in keys] for row in table]
            csv.writer(file, lineterminator='\n').writerows([keys, *rows])
    if args.figure:
        draw(args.figure, curves, args.training_images)
    return '\n\n'.join(block for block in blocks if block)


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
        return positive(images, int), str(positive(size, int))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f'{text!r} is not IMAGES@SIZE, such as 1126400000@256') from None


def main(argv=None):
    parser = argparse.ArgumentParser('report.py', argparse.SUPPRESS, __doc__, allow_abbrev=False,  # errors of one line
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flag, count = parser.add_argument, partial(positive, kind=int)
    flag('records', nargs='+', metavar='RECORDS', help='files of JSON lines or CSV')
    flag('--training_images', type=count, default=TRAINING_IMAGES, help='images to train on (%(default)s)')
    flag('--dollars_per_gpu_hour', type=positive, default=DOLLARS_PER_GPU_HOUR, help='price (%(default)s)')
    flag('--image_bytes', type=positive, default=0, help='stored bytes of an average sample: adds remote and cache')
    flag('--dataset_images', type=count, default=DATASET_IMAGES, help='samples of the data set (%(default)s)')
    either = parser.add_mutually_exclusive_group().add_argument
    either('--extrapolate', type=count, nargs='+', default=[], metavar='GPUS', help='numbers of GPUs to predict')
    either('--compare', action='store_true', help='one table with a row a record')
    flag('--phase', type=phase, action='append', default=[], metavar='IMAGES@SIZE', help='a phase of a plan; repeat it')
    flag('--figure', help='file for a picture of days against GPUs (png, svg, pdf)')
    flag('--csv', help='file for the rows, unrounded')
    args = parser.parse_args(argv)
    if {args.csv, args.figure} & {*args.records}:
        parser.error('--csv or --figure would overwrite the records; give another file')
    try:
        print(report(args))
    except ImportError:
        parser.error('--figure needs matplotlib: pip install matplotlib')
    except OSError as error:
        flag = '--csv' if error.filename == args.csv else '--figure'
        parser.error(f'{flag} {error.filename} cannot be written: {error.strerror}; name another file')
    except (ValueError, csv.Error) as error:
        parser.error(str(error))


if __name__ == '__main__':
    main()
