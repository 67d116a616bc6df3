"""Write rows as Markdown tables of at most 120 columns.

One column describes the settings that differ between rows. One line below the tables has the settings that all share.
"""
import functools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sdbench.flags.parser import build_parser
from sdbench.flags.train import Train
from sdbench.gpus import short_name
from sdbench.records.metrics import COLUMNS, WIDTH, format_metric, text_table
from sdbench.records.settings import DEFAULTS, SETTINGS, UNSTATED_NETWORK, VERSIONS, text_of

RECIPES = Path(__file__).parents[2] / 'recipes'
NAMED_RECIPES = ('fastest.txt', 'original.txt')  # their names replace their settings in tables and legends
# Text for a setting in sentences and legends, if its name and its value are not enough
SETTING_TEMPLATES = {
    'stage': '{}', 'device': '{}', 'device_train_microbatch_size': 'microbatch {}', 'image_size': '{} pixels',
    'input': 'on {}', 'model_name': '{}', 'batch_size': 'batch of {}', 'use_ema': 'EMA', 'model': '{}',
    'weights': '{}', 'guidance': 'guidance {:g}', 'trained_batches': 'batch {:,.0f}', 'num_nodes': '{} machines',
    'network': '{}', 'program': '{}', 'save_folder': 'in {}', 'git_commit': 'commit {}'}
# Values that most runs on GPUs have, besides the defaults of the flags
USUAL_VALUES = {'stage': 'train', 'input': 'images', 'precision': 'amp_bf16', 'encoder_precision': 'bf16'}
TEXT_COLUMNS = ('run', 'device', 'settings', 'date', 'notes')  # aligned to the left
# A table that is too wide is split into one table for each of these groups of figures.
FIGURE_GROUPS = [
    ('images_per_sec', 'images_per_sec_per_device', 'forecast_images_per_sec', 'forecast_error', 'scaling_efficiency',
     'speed_over_first', 'notes'),
    ('days', 'total_gpu_hours', 'cost_usd', 'data_wait_fraction', 'microbatch', 'peak_memory_gib', 'mfu'),
    ('eval_loss', 'eval_batch', 'eval_samples', 'loss', 'trained_batches'),
]


def differing_settings(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return the keys whose values differ between rows, and keys that some rows of a stage state and others do not."""
    stated = rows[list(keys)].replace('', None).nunique()  # '' means that a row does not state the setting
    in_a_stage = rows.groupby('stage')[list(keys)].nunique().max()  # here '' counts as a value
    return [key for key in keys if stated[key] > 1 or (in_a_stage[key] > 1 and key not in (*VERSIONS, 'eval_sha256'))]


@functools.cache
def recipe_flags(name: str) -> dict[str, Any]:
    """Return the flags that a recipe gives."""
    return vars(build_parser(Train, '', 'benchmark.py').parse_args([f'@{RECIPES / name}']))


@functools.cache
def recipe_settings() -> dict[str, dict[str, str]]:
    """Return the settings that each named recipe gives, as text."""
    return {name: {key: text_of(value) for key, value in recipe_flags(name).items() if key in SETTINGS}
            for name in NAMED_RECIPES}


def matching_recipe(row: pd.Series) -> str | None:
    """Return the name of the recipe that gives all the settings of a row that it contains; None if none does."""
    for name, settings in recipe_settings().items():
        if all(row.get(key) == value for key, value in settings.items()):
            return name
    return None


def usual_value(row: pd.Series, key: str) -> str | None:
    """Return the value of a setting that texts about a row leave out; None if they mention every value."""
    if key == 'channels_last':
        return text_of(row['compile'] not in ('', 'no'))  # its default follows from --compile
    if key == 'network':
        return UNSTATED_NETWORK
    default = USUAL_VALUES.get(key, DEFAULTS.get(key))
    return text_of(default) if isinstance(default, (bool, str)) else None  # numbers are always mentioned


def describe_settings(row: pd.Series, keys: Sequence[str], with_defaults: bool = True) -> str:
    """Return the stated settings of a row as text, such as 'on latents, microbatch 4, no compile'.

    Args:
        row: a row of a report.
        keys: the settings to describe.
        with_defaults: whether to mention usual values. If False, the name of a recipe also replaces its settings.
    """
    texts = []
    keys = list(keys)

    # Replace the settings of a recipe by its name.
    recipe = None if with_defaults else matching_recipe(row)
    if recipe and set(keys) & set(recipe_settings()[recipe]):
        texts.append(recipe)
        keys = [key for key in keys if key not in recipe_settings()[recipe]]

    # Describe switches by their names, and other settings by their templates.
    for key in keys:
        value = row[key]
        name = key.replace('_', ' ')
        if value == usual_value(row, key) and not with_defaults:
            continue
        if value in ('yes', 'no'):
            name = SETTING_TEMPLATES.get(key, name)
            texts.append(name if value == 'yes' else f'no {name}')
        elif key == 'device':
            texts.append(short_name(value))
        elif value != '' and pd.notna(value):
            texts.append(SETTING_TEMPLATES.get(key, f'{name} {{}}').format(value))
    return ', '.join(texts)


def line_labels(firsts: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return a label for each line of a figure, from the settings that differ between lines.

    If two lines would have the same label, the labels also include settings that only some lines state. The key
    `training`, a running number, is never used.

    Args:
        firsts: the first row of each line.
        keys: the settings that may be in a label.
    """
    keys = [key for key in keys if key != 'training']
    named = [key for key in keys if firsts[key].replace('', None).nunique() > 1]  # '' means not stated
    if firsts.duplicated([*named, 'stage']).any():  # `duplicated` needs a key; 'stage' is equal in all lines
        named = [key for key in keys if firsts[key].nunique(dropna=False) > 1]
    return [describe_settings(first, named) for _, first in firsts.iterrows()]


def shared_settings(rows: pd.DataFrame, keys: Sequence[str]) -> str:
    """Return a line with the settings that all rows share, except switches that are off; '' if there are none."""
    differing = differing_settings(rows, keys)
    settings = []
    for key in keys:
        value = rows[key].max()  # '' sorts first, so a row that does not state the setting is ignored
        if key not in differing and value not in ('', 'no'):
            settings.append(f'{key} {value[:8] if key == "eval_sha256" else value}')
    return f'All rows: {", ".join(settings)}' if settings else ''


def markdown_tables(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return rows as Markdown tables of the settings in `keys` that differ between rows, the figures and the notes."""
    cells = label_columns(rows, keys)
    device = 'device' if 'on_cpu' in rows and rows['on_cpu'].any() else 'GPU'
    headings = {key: column.heading.format(device) for key, column in COLUMNS.items()}
    for key, heading in headings.items():
        if key in rows:
            cells[heading] = [format_metric(key, value) for value in rows[key]]
    cells['notes'] = rows['notes']

    # If the table is split, each part repeats the columns that identify a row.
    labels = [heading for heading in cells if heading in TEXT_COLUMNS[:-1] or heading == headings['num_devices']]
    groups = [[headings.get(key, key) for key in group] for group in FIGURE_GROUPS]
    return tables_within_width(cells, labels, groups, TEXT_COLUMNS)


def label_columns(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return the columns that identify a row: its settings, and its run, device and date if they differ."""
    keys = differing_settings(rows, keys)
    labels = pd.DataFrame(index=rows.index)
    if 'run' in keys:
        labels['run'] = rows['run']
    if 'device' in keys:
        labels['device'] = rows['device'].map(short_name)

    # Leave usual values out of the column of settings, unless two different settings would then have the same text.
    others = [key for key in keys if key not in TEXT_COLUMNS]
    for with_defaults in (False, True):
        labels['settings'] = [describe_settings(row, others, with_defaults) for _, row in rows.iterrows()]
        settings = rows[keys].apply(tuple, axis='columns') if keys else pd.Series('', rows.index)
        if settings.groupby(labels.apply(tuple, axis='columns')).nunique().max() == 1:
            break
    if 'date' in keys:
        labels['date'] = rows['date']
    return labels


def tables_within_width(cells: pd.DataFrame, labels: Sequence[str], groups: Sequence[Sequence[str]],
                        left: Sequence[str]) -> list[str]:
    """Return cells as Markdown tables of at most WIDTH characters, and a last block with texts that did not fit.

    The result is one table if it fits, or else one table for each group of columns. While a table is still too wide,
    the rows get numbers, and the widest column of text moves to the last block.

    Args:
        cells: the text of all columns.
        labels: headings of the columns that each table repeats.
        groups: headings of the other columns, by group. Columns in no group are in a table by themselves.
        left: headings of the columns that are aligned to the left.
    """
    whole = text_table(cells.to_dict('records'), left, markdown=True)
    if table_width(whole) <= WIDTH:
        return [whole]

    # Split the columns, and move text until each table fits.
    grouped = {heading for group in groups for heading in group}
    ungrouped = [heading for heading in cells if heading not in grouped and heading not in labels]
    moved = []  # columns of text for the last block
    while True:
        tables = []
        for group in [*groups, ungrouped]:
            part = cells[[heading for heading in cells if heading in ('run', *labels, *group)]]
            if (part.drop(columns=[*labels, *TEXT_COLUMNS], errors='ignore') != '').any(axis=None):
                tables.append(text_table(part.to_dict('records'), left, markdown=True))
        movable = [heading for heading in cells if heading in TEXT_COLUMNS and heading != 'run']
        if not movable or max(map(table_width, tables)) <= WIDTH:
            break
        widest = max(movable, key=lambda heading: cells[heading].str.len().max())
        moved.append(cells.pop(widest))
        if 'run' not in cells:
            cells.insert(0, 'run', [str(number) for number in range(1, len(cells) + 1)])

    # Write the moved text of each row, after the run number that the row has in the tables.
    lines = []
    if moved:
        for number, *texts in zip(cells['run'], *moved, strict=True):
            if any(texts):
                text = f'{number}: {"; ".join(filter(None, texts))}'
                lines.append(textwrap.fill(text, WIDTH, subsequent_indent='   ', break_on_hyphens=False))
    return [*tables, '\n'.join(lines)] if lines else tables


def table_width(table: str) -> int:
    """Return the number of characters in the longest line of a table."""
    return max(map(len, table.splitlines()))


def describe_gpus(row: pd.Series) -> str:
    """Return the GPUs and the input of a row as text, such as '8 x B200 on latents'."""
    on = f' on {row["input"]}' if row['input'] else ''
    return f'{row["num_devices"]:g} x {short_name(row["device"])}{on}'
