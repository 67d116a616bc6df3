"""Turn throughput records into days, GPU-hours and dollars, and extrapolate them to more GPUs.

    python report.py results.jsonl                     # a table for each setting that was measured
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py published.csv --image_bytes 20000 # and what the remote must give, and what each node caches
    python report.py results.jsonl --phase 1126400000@256 --phase 1740800000@512  # as SD2 base was really trained
    python report.py results.jsonl --compare           # a row a record, what differs, and the speed over the first's

A record is a line of JSON as benchmark.py or encode.py writes it, or a row of a CSV file with the same keys as columns.
A figure is rounded once, when printed: to the decimals of the published table, or to three significant digits where
these are more. --csv holds the rows of all tables unrounded: `plan` is the stage of a plan, `inf` stands for never.
"""

import argparse
import csv
import json
import math
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median

from harness.costs import (DATASET_IMAGES, DAYS_PER_MONTH, DOLLARS_PER_GPU_HOUR, DOLLARS_PER_TB_MONTH, TRAINING_IMAGES,
                           days_to_train)

GPUS_PER_NODE = 8

# Records are averaged and fitted together only where all of these agree; one that is not stated agrees with no value.
# More devices leave each a smaller share of a fixed batch: to be one table, all runs need a microbatch that fits them.
SETTINGS = ('device', 'image_size', 'stage', 'model_name', 'batch_size', 'device_train_microbatch_size', 'precision',
            'use_ema', 'encoders', 'encoder_precision', 'dataset', 'num_workers', 'channels_last', 'compile',
            'attention', 'gradient_checkpointing', 'fused_optimizer', 'versions')
COLUMNS = {  # key: heading, template and decimals in print
    'num_devices': ('GPUs', '{}', 0), 'images_per_sec': ('images/s', '{}', 1),
    'images_per_sec_per_device': ('images/s per GPU', '{}', 2), 'scaling_efficiency': ('efficiency', '{} %', 1),
    'speed_over_first': ('over first', '{} x', 2), 'encode_days': ('encoding', '{} days', 2), 'days': ('days', '{}', 2),
    'gpu_hours': ('GPU-hours', '{}', 0), 'cost_usd': ('cost', '${}', 0), 'latents_tb': ('latents', '{} TB', 2),
    'pays_off_images': ('pays off from', '{} images', 0), 'remote_mb_per_sec': ('remote', '{} MB/s', 1),
    'cache_tb_per_node': ('cache', '{} TB', 2)}


def read_records(path: str) -> list[dict]:
    """The records of a file of JSON lines or of a CSV file; ValueError names file and line."""
    try:
        lines = Path(path).read_text(encoding='utf-8-sig', errors='replace').split('\n')
    except OSError as error:
        raise ValueError(f'{path}: {error.strerror}; give files of JSON lines or CSV') from None
    is_csv, records = path.lower().endswith('.csv'), []
    for number, row in enumerate(csv.DictReader(lines), start=2) if is_csv else enumerate(lines, start=1):
        try:
            if is_csv or row.strip():
                records.append(check({key: cell_value(row[key]) for key in row} if is_csv else json.loads(row)))
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
    for key in (*whole, 'images_per_sec', 'loader_images_per_sec', 'bytes_per_image'):
        value, kinds = record.get(key, 1), (int,) if key in whole else (int, float)
        if type(value) not in kinds or not 1e-15 < value < 1e15:
            raise ValueError(f'{key} {repr(value)[:80]} is not a positive {"whole " * (key in whole)}number')
    notes = 'extrapolated by its source' * bool(record['extrapolated'])
    if record['status'] != 'complete':
        notes = words(f'{record["status"]}: {record.get("error", "")}')[:70].rstrip(': ')
    return record | {key: words(record.get(key, '')) for key in (*SETTINGS, 'extrapolated')} | {
        'notes': notes, 'measured': not notes and record['status'] == 'complete'}


def words(value):
    """A value as one line of text."""
    if isinstance(value, dict):
        value = ', '.join(f'{name} {value[name]}' for name in sorted(value))
    text = ' '.join(('yes' if value is True else 'no' if value is False else str(value)).split())
    return ''.join(char if char.isprintable() else '\ufffd' for char in text)  # no commands to the terminal


def grouped(items, *keys):
    groups = {}
    for item in items:
        groups.setdefault(itemgetter(*keys)(item), []).append(item)
    return list(groups.values())


def rows_of(records):
    """A row for each number of devices with the median of its complete runs, and a row for each other record."""
    rows = [record for record in records if not record['measured']]
    for runs in grouped([record for record in records if record['measured']], 'num_devices'):
        speeds = sorted(float(run['images_per_sec']) for run in runs)
        spread = f'median of {len(runs)} runs, {speeds[0]:,.1f} to {speeds[-1]:,.1f}' if runs[1:] else ''
        rows.append(runs[0] | {'images_per_sec': median(speeds), 'notes': spread})
    return sorted(rows, key=lambda row: (row['num_devices'], not row['measured']))


def with_costs(row, days, args):
    """The row with its days, GPU-hours and dollars."""
    hours = days * 24 * row['num_devices']
    return row | {'days': days, 'gpu_hours': hours, 'cost_usd': hours * args.dollars_per_gpu_hour}


def with_figures(rows, args):
    """The rows of one stage with what follows from their throughput; ratios are to the first measured one."""
    first = min((row for row in rows if 'images_per_sec' in row), key=lambda row: not row['measured'], default={})
    num_images = args.dataset_images if rows[0]['stage'] == 'encode' else args.training_images
    epoch_tb = args.dataset_images * args.image_bytes / 1e12
    return [row if not (speed := row.get('images_per_sec')) else with_costs(row | {
        'images_per_sec': float(speed), 'images_per_sec_per_device': speed / row['num_devices'],
        'scaling_efficiency': speed / row['num_devices'] / (first['images_per_sec'] / first['num_devices']),
        'speed_over_first': speed / first['images_per_sec'],
        'latents_tb': args.dataset_images * row.get('bytes_per_image', 0) / 1e12 or '',
        'remote_mb_per_sec': speed * args.image_bytes / 1e6 or '',  # to all nodes together, while nothing is cached
        'cache_tb_per_node': epoch_tb / math.ceil(row['num_devices'] / GPUS_PER_NODE) or '',  # an even share
    }, days_to_train(speed, num_images), args) for row in rows]


def fit_step_seconds(counts: list[int], seconds: list[float]) -> tuple[float, float]:
    """The a, b >= 0 for which a / n + b is closest to the seconds that a step took on n devices: least squares of the
    relative errors, since the long steps on few devices would outweigh all others in absolute ones."""
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
    try:
        a, b = fit_step_seconds(list(speeds), [batch / speed for speed in speeds.values()])
        predicted = {count: batch / (a / count + b) for count in (*speeds, *counts)}
    except ZeroDivisionError:
        return [], '--extrapolate: these speeds are too far apart for a fit'
    residual, worst = max(((predicted[n] / speeds[n] - 1, n) for n in speeds), key=lambda pair: abs(pair[0]))
    shared = rows[0] | {'status': 'complete', 'measured': False, 'extrapolated': 'yes', 'notes': 'extrapolated'}
    return [shared | {'num_devices': n, 'images_per_sec': predicted[n]} for n in sorted({*counts})], (
        f'Extrapolated with step_seconds(n) = {a:.5g} / n + {b:.5g} for a batch of '
        f'{batch if batch > 1 else "one image"}, fitted on {", ".join(map(str, speeds))} GPUs; worst residual '
        f'{residual:+.1%} of the images/s, on {worst} GPUs.')


def plan(trained, encodings, phases, args):
    """A row for each setting and number of GPUs that was measured at the size of every phase (images, size), with what
    all phases take; the microbatch may differ between sizes. ValueError where there is none."""
    plans, sizes = [], dict.fromkeys(size for _, size in phases)
    free = {'stage': 'plan', 'image_size': ', '.join(sizes), 'device_train_microbatch_size': '', 'images_per_sec': ''}
    for alike in grouped(trained, 'num_devices', *(key for key in SETTINGS if key not in (*free, 'encoders'))):
        rows = {}  # by encoders
        for runs in grouped(sorted(alike, key=itemgetter('encoders', 'images_per_sec')), 'encoders'):
            speeds = {run['image_size']: run['images_per_sec'] for run in runs}  # the fastest of each size
            if sizes.keys() <= speeds.keys():
                days = [(days_to_train(speeds[size], images), size) for images, size in phases]
                notes = ', '.join(f'{cell("days", some)} days at {size} px' for some, size in days)
                row = with_costs(runs[0] | free | {'notes': notes}, sum(some for some, _ in days), args)
                rows[row['encoders']] = row
        if latents := rows.get('text_in_loop'):
            rows['text_in_loop'] = encode_once(latents, rows.get('in_loop'), encodings, phases, args)
        plans += rows.values() if latents or args.phase else []
    if not plans:
        raise ValueError(f'--phase: no number of GPUs was measured in one setting at {" and ".join(sizes)} px')
    return sorted(plans, key=itemgetter('num_devices'))


def encode_once(latents, in_loop, encodings, phases, args):
    """The plan `latents` after encoding every image once at each size, and with their storage while it trains. It pays
    off from as many images as save, over the plan `in_loop`, what the encoding costs."""
    place = itemgetter('device', 'model_name', 'image_size')
    found = {size: [run for run in encodings if 'bytes_per_image' in run and
                    place(run) == place(latents | {'image_size': size})] for _, size in phases}
    if missing := [size for size in found if not found[size]]:
        notes = f'no encode record with bytes_per_image at {" and ".join(missing)} px'
        return latents | {'days': '', 'gpu_hours': '', 'cost_usd': '', 'notes': notes}
    gpu_seconds = sum(median(run['num_devices'] / run['images_per_sec'] for run in runs) for runs in found.values())
    image_bytes = sum(median(run['bytes_per_image'] for run in runs) for runs in found.values())
    encode_days = days_to_train(latents['num_devices'] / gpu_seconds, args.dataset_images)
    row = with_costs(latents, encode_days + latents['days'], args) | {
        'encode_days': encode_days, 'latents_tb': args.dataset_images * image_bytes / 1e12}
    encode_usd = row['cost_usd'] - latents['cost_usd']
    row['cost_usd'] += row['latents_tb'] * args.dollars_per_tb_month * latents['days'] / DAYS_PER_MONTH
    if in_loop:
        saved = (in_loop['cost_usd'] - row['cost_usd'] + encode_usd) / sum(images for images, _ in phases)
        row['pays_off_images'] = encode_usd / saved if saved > 0 else math.inf
    return row


def loader_lines(records, trained):
    """How many times the throughput of the fastest model on the same devices each loader's is."""
    place = itemgetter('num_devices', 'device', 'image_size')
    for record in records:
        if loader := record.get('loader_images_per_sec'):
            model = max((run['images_per_sec'] for run in trained if place(run) == place(record)), default=None)
            times = f"{loader / model:,.1f} times the model's {model:,.1f}" if model else 'no model measured there'
            yield 'Loader, {} x {}, {} px: {:,.1f} images/s, {}.'.format(*place(record), loader, times)


def cell(key, value):
    """A figure as printed, and anything else as text."""
    if not isinstance(value, float) or value == math.inf:
        return words('never' if value == math.inf else value).replace('|', r'\|')
    _, template, decimals = COLUMNS[key]
    value *= 100 if '%' in template else 1
    return template.format(f'{value:,.{max(decimals, 2 - math.floor(math.log10(value)))}f}')


def markdown(keys, rows):
    """An aligned table, texts to the left; a column with nothing in it is left out."""
    columns = []
    for key in keys:
        heading, align, end = (COLUMNS[key][0], '>', ':') if key in COLUMNS else (key, '<', '-')
        if any(cells := [cell(key, row.get(key, '')) for row in rows]):
            width = max(3, *map(len, (heading, *cells)))
            columns.append([f'{text:{align}{width}}' for text in (heading, '-' * (width - 1) + end, *cells)])
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
    stages = grouped(sorted((run for run in records if run['stage'] != 'loader'), key=itemgetter('stage')), 'stage')
    differs = [key for key in SETTINGS if any(len({run[key] for run in runs}) > 1 for runs in stages)]
    differs += ['stage'] * (len(stages) > 1)
    figures = [key for key in COLUMNS if key != ('scaling_efficiency' if args.compare else 'speed_over_first')]
    blocks, table, trained, curves, basis = [], [], [], {}, ''
    for runs in [runs for stage in stages for runs in grouped(stage, *SETTINGS)]:
        rows, encode = rows_of(runs), runs[0]['stage'] == 'encode'
        trained += [row for row in rows if row['measured'] and row['stage'] == 'train']
        predicted, basis = extrapolate(rows, args.extrapolate) if args.extrapolate and not encode else ([], '')
        rows = with_figures(sorted(rows + predicted, key=itemgetter('num_devices')), args)
        stated = {key: f'{key} {rows[0][key]}' for key in SETTINGS[2:] if rows[0][key]}
        title = [rows[0]['device'], rows[0]['image_size'] + ' px', *(stated[key] for key in stated if key in differs)]
        same = ', '.join(stated[key] for key in stated if key not in differs)
        blocks += ['### ' + ', '.join(title), same, markdown([*figures, 'notes'], rows), basis]
        if not encode and (complete := [row for row in rows if row['status'] == 'complete']):
            curves[', '.join(title)] = complete
        table += rows
    if args.extrapolate and not any(row['notes'] == 'extrapolated' for row in table):
        raise ValueError(basis or '--extrapolate: no training in the records')  # else it stands below its own table
    if args.compare:
        tables = [with_figures(runs, args) for runs in stages]
        blocks = [markdown([*differs, *figures, 'notes'], rows) for rows in tables]
        table = [row for rows in tables for row in rows]
    encodings = [run for run in records if run['measured'] and run['stage'] == 'encode']
    sizes = {run['image_size'] for run in trained if run['encoders'] == 'text_in_loop' and encodings}
    for phases in [args.phase] if args.phase else [[(args.training_images, size)] for size in sorted(sizes)]:
        plans = plan(trained, encodings, phases, args)
        keys = [key for key in ('device', *differs, *figures, 'notes') if key not in ('stage', 'image_size')]
        title = ', then '.join(f'{images:,} images at {size} px' for images, size in phases)
        blocks += [f'### {title}', markdown(dict.fromkeys(keys), plans)]
        if any('latents_tb' in row for row in plans):
            blocks.append(f'For latents, {args.dataset_images:,} images are encoded once at each size; the cost holds '
                          f'their storage while the training lasts, at ${args.dollars_per_tb_month:g} a TB-month.')
        table += plans
    if args.image_bytes:
        shards = math.ceil(args.dataset_images * args.image_bytes / 2**26)  # of Streaming's default size
        blocks.append(f'An epoch of {args.dataset_images:,} samples is {shards:,} shards of 64 MiB; the cache is what '
                      f'it leaves on each node of {GPUS_PER_NODE} GPUs.')
    blocks += loader_lines(records, trained)
    if args.csv:
        extra = ['status'] * any(row['status'] != 'complete' for row in table) + ['stage'] * bool(args.phase)
        filled = [key for key in figures if any(row.get(key, '') != '' for row in table)]
        keys = dict.fromkeys(['device', *filled, 'extrapolated', *differs, *extra])
        with open(args.csv, 'w', newline='', encoding='utf-8') as file:
            rows = [[row.get(key, '') for key in keys] for row in table]
            csv.writer(file, lineterminator='\n').writerows([keys, *rows])
    if args.figure:
        draw(args.figure, curves, args.training_images)
    return '\n\n'.join(block for block in blocks if block)


def positive(text, kind=float, least=1e-15):
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not least <= value < 1e15:
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive {"whole " * (kind is int)}number')
    return value


def phase(text):
    images, _, size = text.partition('@')
    try:
        return positive(images, int), str(positive(size, int))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f'{text!r} is not IMAGES@SIZE, such as 1126400000@256') from None


def main(argv=None):
    parser = argparse.ArgumentParser('report.py', argparse.SUPPRESS, __doc__, allow_abbrev=False,  # errors of one line
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flag, count = parser.add_argument, partial(positive, kind=int)
    flag('records', nargs='+', metavar='RECORDS', help='files of JSON lines or CSV')
    flag('--training_images', type=count, default=TRAINING_IMAGES, help='images to train on (%(default)s)')
    flag('--dataset_images', type=count, default=DATASET_IMAGES, help='samples of the data set (%(default)s)')
    flag('--dollars_per_gpu_hour', type=positive, default=DOLLARS_PER_GPU_HOUR, help='price (%(default)s)')
    flag('--dollars_per_tb_month', type=partial(positive, least=0), default=DOLLARS_PER_TB_MONTH,
         help='price of storing latents, in the cost while the training lasts (%(default)s, as Amazon S3 lists it)')
    flag('--image_bytes', type=positive, default=0, help='stored bytes of an average sample: adds remote and cache')
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
