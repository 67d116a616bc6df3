"""Tables as people read them: figures rounded once, settings in words, Markdown."""

import math
from dataclasses import dataclass, field

import pandas as pd

from reporting.records import SETTINGS, one_line_of_text

COLUMNS = {  # key: heading, template and decimals in print
    'num_devices': ('GPUs', '{}', 0),
    'images_per_sec': ('images/s', '{}', 1),
    'images_per_sec_per_device': ('images/s per GPU', '{}', 2),
    'scaling_efficiency': ('efficiency', '{} %', 1),
    'speed_over_first': ('over first', '{} x', 2),
    'encode_days': ('encoding', '{} days', 2),
    'days': ('days', '{}', 2),
    'gpu_hours': ('GPU-hours', '{}', 0),
    'cost_usd': ('cost', '${}', 0),
    'latents_tb': ('latents', '{} TB', 2),
    'pays_off_images': ('pays off from', '{} images', 0),
    'remote_mb_per_sec': ('remote', '{} MB/s', 1),
    'cache_tb_per_node': ('cache', '{} TB', 2),
}


@dataclass
class Table:
    """A table of the report: its rows unrounded, which of their columns are printed, and what stands around it."""
    heading: str
    rows: pd.DataFrame
    columns: list[str]
    remarks: list[str] = field(default_factory=list)  # below the table


def printed_figure(key: str, value) -> str:
    """A float with its column's decimals, or with three significant digits where these are more; else the text."""
    if isinstance(value, float):
        if math.isnan(value):
            return ''
        if math.isinf(value):
            return 'never'
        _, template, decimals = COLUMNS[key]
        if '%' in template:
            value *= 100
        decimals_of_three_digits = 2 - math.floor(math.log10(value))
        return template.format(f'{value:,.{max(decimals, decimals_of_three_digits)}f}')
    return one_line_of_text(value).replace('|', r'\|')


def markdown(rows: pd.DataFrame, columns: list[str]) -> str:
    """An aligned Markdown table, figures to the right; a column with nothing in it is left out."""
    printed = pd.DataFrame(index=rows.index)
    alignment = []
    for key in columns:
        if key not in rows:
            continue
        cells = [printed_figure(key, value) for value in rows[key]]
        if not any(cells):
            continue
        if key in COLUMNS:
            heading, _, _ = COLUMNS[key]
            alignment.append('right')
        else:
            heading = key
            alignment.append('left')
        printed[heading] = cells
    return printed.to_markdown(index=False, disable_numparse=True, colalign=alignment)


def differing_settings(rows: pd.DataFrame) -> list[str]:
    """The settings that not all rows agree in."""
    return [key for key in SETTINGS if rows[key].nunique() > 1]


def versions_in_all(rows: pd.DataFrame) -> list[str]:
    """The packages that every row states in the same version, such as 'torch 2.7.0'."""
    stated = [versions.split(', ') for versions in rows['versions'].unique()]
    if not stated:
        return []
    return [package for package in stated[0] if all(package in packages for packages in stated)]


def without_packages(versions: str, packages: list[str]) -> str:
    """The text of versions, such as 'composer 0.32.1, torch 2.7.0', without some of its packages."""
    return ', '.join(package for package in versions.split(', ') if package not in packages)


def settings_as_flags(row: pd.Series, keys: list[str]) -> str:
    """The settings of a row that it states, as 'H200, 512 px, compile yes'; or which of them it does not."""
    stated = []
    for key in keys:
        if not row[key]:
            continue
        if key == 'device':
            stated.append(row[key])
        elif key == 'image_size':
            stated.append(f'{row[key]} px')
        else:
            stated.append(f'{key} {row[key]}')
    if not stated:
        return f'not stated: {", ".join(keys)}'
    return ', '.join(stated)
