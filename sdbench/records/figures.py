"""The figures of a record: how the summary of a run and the table of report.py show each. Nothing here needs torch.

A new figure is an entry here, and its value in the record: docs/extending.md says where that comes from.
"""
import string
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """How a key of a record is shown.

    Attributes:
        heading: of its line in a summary, and of its column in a table.
        line: in a summary; a template of this key and others. None: it has no line of its own.
        cell: in a table; a template of the number alone, times 100 where it has a %. None: it has no column. Several
            runs of one setting show their median, and a row that is predicted or planned shows nothing.
        decimals: of a cell, or three significant digits where these are more; None: of a whole number.
    """
    heading: str
    line: str | None = None
    cell: str | None = None
    decimals: int | None = 1


FIGURES = {
    'images_per_sec': Figure(
        'images/s', '{images_per_sec:.4g} on {num_devices} x {device}, {images_per_sec_per_device:.4g} each', '{}'),
    'why_no_speed': Figure('no speed', '{why_no_speed}'),
    'batch_seconds_median': Figure(
        'batch', '{batch_seconds_median:.3g} s median of {measured_batches}, 10th to 90th percentile '
        '{batch_seconds_p10:.3g} to {batch_seconds_p90:.3g} s'),
    'drift': Figure('change', '{drift:+.1%} in speed from the first third of the batches to the last'),
    'data_wait_fraction': Figure('wait for data', '{data_wait_fraction:.1%} of the time{on_waiting}', '{} %'),
    'peak_memory_gib': Figure(
        'peak memory', '{peak_memory_gib:.3g} GiB, microbatch {device_train_microbatch_size}', '{} GiB'),
    'tflops_per_sec_per_device': Figure('arithmetic', '{tflops_per_sec_per_device:.3g} TFLOP/s each'),
    'mfu': Figure('of the peak', '{mfu:.1%}', '{} %'),
    'joules_per_image': Figure('power', '{gpu_power_watts_mean:.0f} W each, {joules_per_image:.3g} J an image'),
    'trained_batches': Figure('trained', 'up to batch {trained_batches:,}'),
    'whole_epochs': Figure('epochs', '{whole_epochs:,}'),
    'resumed_after': Figure('resumed', 'after batch {resumed_after:,}'),
    'loss': Figure('loss', '{loss:.3g}'),
    'eval_loss': Figure('held-out loss', '{eval_loss:.4g} after batch {eval_batch:,}'),
    'ema_start_to_come': Figure('no average', 'yet, for --ema_start is {ema_start_to_come}'),
    'young_half_life': Figure(
        'average', 'still near the weights at the start, for --ema_half_life is {young_half_life}'),
    'caution': Figure('caution', '{caution}'),
    'full_days': Figure(
        'full training', 'training on {full_images:,} images would take {full_days:,.1f} days on {gpus}, '
        '{full_hours:,.0f} GPU-hours, ${full_dollars:,.0f}'),
    'checkpoints': Figure('checkpoint', 'in {checkpoints}'),
    'drawings': Figure('drawings', 'in {drawings}'),
    'export_flags': Figure('next', 'python export.py {checkpoints} {pipeline}{export_flags}'),
}

# The lines of a summary, in their order: of a measurement the speed comes first, of a training what was trained.
SPEED_LINES = ('images_per_sec', 'why_no_speed')
TRAINED_LINES = ('trained_batches', 'whole_epochs', 'resumed_after', 'loss', 'eval_loss', 'drawings',
                 'ema_start_to_come')
OF_A_MEASUREMENT = (*SPEED_LINES, 'batch_seconds_median', 'drift', 'data_wait_fraction', 'peak_memory_gib',
                    'tflops_per_sec_per_device', 'mfu', 'joules_per_image', *TRAINED_LINES, 'caution',
                    'full_days')
OF_A_TRAINING = (*TRAINED_LINES, 'young_half_life', 'checkpoints', 'export_flags', *SPEED_LINES)

IN_TABLES = tuple(key for key, figure in FIGURES.items() if figure.cell is not None)


def summary_lines(keys: tuple[str, ...], values: dict[str, Any]) -> list[str]:
    """Return the lines of a summary. One is left out where a value of its template is missing, or None."""
    lines = []
    for key in keys:
        figure = FIGURES[key]
        names = [name for _, name, _, _ in string.Formatter().parse(figure.line) if name]
        if all(values.get(name) is not None for name in names):
            lines.append(f'{figure.heading:<15} {figure.line.format_map(values)}')
    return lines
