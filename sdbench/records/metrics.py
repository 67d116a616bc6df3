"""Show metrics to people: as lines of the summary that a run prints, and as columns of report.py's tables.

A new metric has its value in the record, its meaning in docs/record.md, and here a line, a column, or both. Nothing
here needs torch.
"""
import math
import string
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

WIDTH = 120  # characters in the longest line that is printed


def rounded(value: float, decimals: int | None = 0) -> str:
    """Return a number as text with `decimals` decimals, or with more if three significant digits need more.

    Without `decimals`, the number is whole.
    """
    if decimals is None:
        return f'{value:,.0f}'
    if value:
        decimals = max(decimals, 2 - math.floor(math.log10(abs(value))))
    return f'{value:,.{decimals}f}'


def format_days(days: float, unit: str = '') -> str:
    """Return a duration as text: '2.50' and `unit` from one day on, else '7 h 30 min', '45 min' or '12.0 s'."""
    if days >= 1:
        return rounded(days, 2) + unit
    seconds = days * 24 * 60 * 60
    if seconds < 60:
        return f'{rounded(seconds)} s'
    minutes = round(seconds / 60)
    if minutes < 60:
        return f'{minutes} min'
    return f'{minutes // 60} h {minutes % 60} min'


# The lines of all summaries by heading. A template contains keys of the record, and keys that summary.py adds. A
# measurement prints each line whose values are known, in this order.
LINES = {
    'images/s': '{images_per_sec:r} on {num_devices} x {device}, {images_per_sec_per_device:r} each',
    'no speed': '{why_no_speed}',
    'batch': '{batch_seconds_median:.3g} s median of {measured_batches}, 10th to 90th percentile '
    '{batch_seconds_p10:.3g} to {batch_seconds_p90:.3g} s',
    'drift': '{drift:+.1%} (speed in the last third of the batches compared with the first third)',
    'wait for data': '{data_wait_fraction:.1%} of the time{on_waiting}',
    'peak memory': '{peak_memory_gib:.3g} GiB, microbatch {device_train_microbatch_size}',
    'arithmetic': '{tflops_per_sec_per_device:.3g} TFLOP/s each',
    'MFU': '{mfu:.1%}',
    'power': '{gpu_power_watts_mean:.0f} W each, {joules_per_image:.3g} J an image',
    'trained': 'up to batch {trained_batches:,}',
    'epochs': '{whole_epochs:,}',
    'resumed': 'after batch {resumed_after:,}',
    'spent': '{gpu_hours:r} GPU-hours, ${dollars:,.2f}',
    'loss': '{loss:.3g}',
    'eval loss': '{eval_loss:.4g} on {eval_samples:,} samples of --eval_remote, after batch {eval_batch:,}',
    'images': 'in {sample_images}',
    'no EMA': 'weights yet: the EMA starts at --ema_start {ema_start_to_come}',
    'checkpoint': 'in {checkpoints}',
    'caution': '{caution}',
    'full training': 'training on {full_images:,} images would take {full_days:,.1f} days on {gpus}, '
    '{full_hours:,.0f} GPU-hours, {full_cost}',
    'next': '{next}',
    # --loader_only
    'loader': '{loader_images_per_sec:r} images/s',
    # encode.py
    'encoded': '{encoded}, {images_per_sec:r} images/s',
    'stored': '{stored}, {bytes_per_image:,.0f} bytes each',
    'skipped': '{skipped}',
    # evaluate.py
    'generated': '{images_generated:,} images, {images_per_sec:r} images/s',
    'model': '{generated_by}',
    'not scored': '{not_scored}',
}
# A training prints its result first, and only two lines about its speed.
TRAINING_LINES = ('trained', 'epochs', 'resumed', 'spent', 'loss', 'eval loss', 'images', 'no EMA', 'checkpoint',
                 'next', 'images/s', 'no speed', 'wait for data')
LOADER_LINES = ('loader', 'caution')
ENCODING_LINES = ('encoded', 'no speed', 'stored', 'caution', 'skipped', 'next')
EVALUATION_LINES = ('generated', 'model', 'not scored')  # the table of scores and cautions follow


class MetricFormatter(string.Formatter):
    """Fill in a template, and round {metric:r} to one decimal or to three significant digits."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return rounded(value, 1) if format_spec == 'r' else super().format_field(value, format_spec)


def summary_lines(headings: Iterable[str], values: dict[str, Any]) -> list[str]:
    """Return the lines of a summary under these headings, without lines for which a value is missing or None."""
    lines = []
    for heading in headings:
        template = LINES[heading]
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
        if all(values.get(name) is not None for name in names):
            lines.append(f'{heading:<15} {MetricFormatter().vformat(template, (), values)}')
    return lines


def filled(sentences: Iterable[str]) -> str:
    """Return sentences as text, each on a new line and in lines of at most WIDTH characters."""
    return '\n'.join(textwrap.fill(sentence, WIDTH, break_on_hyphens=False) for sentence in sentences)


def text_table(rows: Sequence[dict[str, Any]], left: Sequence[str] | None = None, markdown: bool = False) -> str:
    """Return rows as a table of aligned text, without the columns that are empty in every row.

    Args:
        rows: the cells of each row by heading. All rows have the same headings, in the order of the columns.
        left: headings of the columns that are aligned to the left; None: only the first column. Others are aligned to
            the right.
        markdown: whether it is a Markdown table, or plain columns for a terminal.
    """
    headings = list(rows[0])
    if left is None:
        left = headings[:1]
    columns = []
    for heading in headings:
        column = [heading, *(str(row[heading]) for row in rows)]
        if not any(column[1:]):
            continue
        if markdown:
            column = [text.replace('|', r'\|') for text in column]  # or a pipe in a text would begin another cell
        width = max(map(len, column))
        column = [text.ljust(width) if heading in left else text.rjust(width) for text in column]
        if markdown:
            column.insert(1, ':'.ljust(width, '-') if heading in left else ':'.rjust(width, '-'))
        columns.append(column)
    lines = zip(*columns, strict=True)
    if markdown:
        return '\n'.join(f'| {" | ".join(line)} |' for line in lines)
    return '\n'.join('  '.join(line).rstrip() for line in lines)


class Column(NamedTuple):
    """A column of numbers in a table.

    Attributes:
        heading: text of the heading; {} is replaced by 'GPU' or 'device'.
        cell: template for the number and its unit; a template with % shows the number times 100.
        decimals: minimum number of decimals, as `rounded` takes them; None: the number is whole.
        is_of_a_run: whether it is measured in each run. Repeated runs show their median, and predicted rows nothing.
    """
    heading: str
    cell: str = '{}'
    decimals: int | None = 1
    is_of_a_run: bool = False


# All columns of metrics, in the order of the tables. They are in the record or are calculated from it.
COLUMNS = {
    'num_devices': Column('{}s', decimals=None),
    'images_per_sec': Column('images/s', is_of_a_run=True),
    'speed_over_first': Column('over the first', '{} x', 2),
    'images_per_sec_per_device': Column('images/s per {}', decimals=2),
    'forecast_images_per_sec': Column('forecast'),
    'forecast_error': Column('forecast - measured', '{} %', 0),
    'scaling_efficiency': Column('efficiency', '{} %'),
    'data_wait_fraction': Column('wait for data', '{} %', is_of_a_run=True),
    'microbatch': Column('microbatch', decimals=None),
    'peak_memory_gib': Column('peak memory', '{} GiB', is_of_a_run=True),
    'mfu': Column('MFU', '{} %', is_of_a_run=True),
    'eval_loss': Column('eval loss', decimals=4),
    'eval_batch': Column('eval batch', decimals=None),
    'eval_samples': Column('eval samples', decimals=None),
    'loss': Column('loss', decimals=3),
    'guidance': Column('guidance'),
    'fid': Column('FID', decimals=2),
    'clip_score': Column('CLIP score', decimals=2),
    'trained_batches': Column('batches', decimals=None),
    'images_seen': Column('images seen', decimals=None),
    'days': Column('days', decimals=2),
    'total_gpu_hours': Column('GPU-hours', decimals=0),
    'cost_usd': Column('cost', '${}', 0),
}
RUN_METRICS = tuple(key for key, column in COLUMNS.items() if column.is_of_a_run)


def format_metric(key: str, value: float | None) -> str:
    """Return a metric as the text of its cell, with its unit; '' if it is not known."""
    _, template, decimals, _ = COLUMNS[key]
    if value is None or math.isnan(value):
        return ''
    if '%' in template:
        value *= 100
    if key == 'days':
        return format_days(value)
    if key == 'forecast_error':
        return f'{round(value):+} %' if round(value) else '0 %'
    return template.format(rounded(value, decimals))
