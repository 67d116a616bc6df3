"""Write rows as a Markdown table: what they agree in above it, and a column for what they differ in."""
import math
from collections.abc import Sequence

import pandas as pd

from sdbench.records.figures import FIGURES, IN_TABLES, Figure
from sdbench.records.read import VERSIONS

# Columns of figures in their order: those of a record, and those that follow from them.
COLUMNS = {
    'num_devices': Figure('{}s', cell='{}', decimals=None),
    'images_per_sec': FIGURES['images_per_sec'],
    'images_per_sec_per_device': Figure('images/s per {}', cell='{}', decimals=2),
    'scaling_efficiency': Figure('efficiency', cell='{} %'),
    'speed_over_first': Figure('over the first', cell='{} x', decimals=2),
    **{key: FIGURES[key] for key in IN_TABLES},
    'guidance': Figure('guidance', cell='{}'),
    'fid': Figure('FID', cell='{}', decimals=2),
    'clip_score': Figure('CLIP score', cell='{}', decimals=2),
    'trained_batches': Figure('batches', cell='{}', decimals=None),
    'images_seen': Figure('images seen', cell='{}', decimals=None),
    'days': Figure('days', cell='{}', decimals=2),
    'gpu_hours': Figure('GPU-hours', cell='{}', decimals=0),
    'cost_usd': Figure('cost', cell='${}', decimals=0),
    'images_in_days': Figure('images in --days', cell='{}', decimals=0),
}


def differing(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return the keys with several values, or, within a stage, with a value in some rows and none in others."""
    in_a_stage = rows.groupby('stage')[list(keys)].nunique().max()  # '' is a value
    stated = rows[list(keys)].replace('', None).nunique()
    return [key for key in keys if in_a_stage[key] > 1 or stated[key] > 1]


def in_common(rows: pd.DataFrame, keys: Sequence[str]) -> str:
    """Return what rows agree in, of some keys, with the versions on a line of their own.

    A switch that is off is not named.
    """
    columns = differing(rows, keys)
    settings = []
    versions = []
    for key in keys:
        value = rows[key].max()  # '' where a row does not state it
        if key in columns or value in ('', 'no'):
            continue
        if key in VERSIONS:
            versions.append(f'{key} {value}')
        else:
            settings.append(f'{key} {value}')
    lines = []
    if settings:
        lines.append(f'All rows: {", ".join(settings)}')
    if versions:
        lines.append(f'Versions: {", ".join(versions)}')
    return '\n'.join(lines)


def markdown(rows: pd.DataFrame, keys: Sequence[str]) -> str:
    """Return an aligned Markdown table: those of its keys that rows differ in, the figures and the notes.

    A column with nothing in it is left out.
    """
    device = 'GPU'
    if 'on_cpu' in rows and rows['on_cpu'].any():
        device = 'device'
    cells = pd.DataFrame(index=rows.index)
    alignment = []
    for key in [*differing(rows, keys), *COLUMNS, 'notes']:
        if key not in rows:
            continue
        texts = [printed(key, value) for value in rows[key]]
        if not any(texts):
            continue
        heading = key
        if key in COLUMNS:
            heading = COLUMNS[key].heading.format(device)
        cells[heading] = texts
        alignment.append('right' if key in COLUMNS else 'left')
    return cells.to_markdown(index=False, disable_numparse=True, colalign=alignment)


def printed(key: str, value: str | float) -> str:
    """Return a figure with its column's decimals, or with three digits where these are more; a text as it is."""
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return ''
    template, decimals = COLUMNS[key].cell, COLUMNS[key].decimals
    if '%' in template:
        value *= 100
    if decimals is None:
        decimals = 0
    elif value:
        decimals = max(decimals, 2 - math.floor(math.log10(value)))
    return template.format(f'{value:,.{decimals}f}')
