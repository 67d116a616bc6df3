"""Write rows as Markdown tables of at most 120 columns: one column in words for the settings in which rows differ.

What all rows agree in stands below the tables.
"""
import functools
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from sdbench.flags.parser import build_parser
from sdbench.flags.train import Train
from sdbench.gpus import short_name
from sdbench.records.figures import COLUMNS, WIDTH, cell, text_table
from sdbench.records.setup import DEFAULTS, SETTINGS, UNSTATED_NETWORK, VERSIONS, text_of

RECIPES = Path(__file__).parents[2] / 'recipes'
NAMED_RECIPES = ('fastest.txt', 'original.txt')
# How a sentence or a legend writes a setting, where its name and its value are not enough
IN_WORDS = {'stage': '{}', 'device': '{}', 'device_train_microbatch_size': 'microbatch {}', 'image_size': '{} pixels',
            'input': 'on {}', 'model_name': '{}', 'batch_size': 'batch of {}', 'use_ema': 'EMA', 'model': '{}',
            'weights': '{}', 'guidance': 'guidance {:g}', 'trained_batches': 'batch {:,.0f}',
            'num_nodes': '{} machines', 'network': '{}', 'program': '{}', 'save_folder': 'in {}',
            'git_commit': 'commit {}'}
USUAL = {'stage': 'train', 'input': 'images', 'precision': 'amp_bf16', 'encoder_precision': 'bf16'}
TEXTS = ('run', 'device', 'settings', 'date', 'notes')  # columns of text, which stand to the left
# The figures of a table that would be too wide are split by subject.
SUBJECTS = [
    ('images_per_sec', 'images_per_sec_per_device', 'scaling_efficiency', 'speed_over_first', 'days',
     'total_gpu_hours', 'cost_usd', 'notes'),
    ('data_wait_fraction', 'microbatch', 'peak_memory_gib', 'mfu'),
    ('eval_loss', 'eval_batch', 'eval_samples', 'loss', 'trained_batches'),
]


def differing(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return the keys with several values, and those that only some rows of a stage state; '' means not stated."""
    stated = rows[list(keys)].replace('', None).nunique()
    in_a_stage = rows.groupby('stage')[list(keys)].nunique().max()  # '' is a value
    return [key for key in keys if stated[key] > 1 or (in_a_stage[key] > 1 and key not in VERSIONS)]


@functools.cache
def settings_of_recipes() -> dict[str, dict[str, str]]:
    """Return the settings, as text, that each named recipe gives."""
    settings = {}
    for name in NAMED_RECIPES:
        given = vars(build_parser(Train, '', 'benchmark.py').parse_args([f'@{RECIPES / name}']))
        settings[name] = {key: text_of(value) for key, value in given.items() if key in SETTINGS}
    return settings


def recipe_of(row: pd.Series) -> str | None:
    """Return the named recipe whose settings a row has; None if it has those of none."""
    for name, settings in settings_of_recipes().items():
        if all(row.get(key) == value for key, value in settings.items()):
            return name
    return None


def usual_value(row: pd.Series, key: str) -> str | None:
    """Return the value that a setting has by default on GPUs and that needs no mention; None if it is always told."""
    if key == 'channels_last':
        return text_of(row['compile'] not in ('', 'no'))
    if key == 'network':
        return UNSTATED_NETWORK
    default = USUAL.get(key, DEFAULTS.get(key))
    return text_of(default) if isinstance(default, (bool, str)) else None  # a number is always told


def settings_in_words(row: pd.Series, keys: Sequence[str], with_defaults: bool = True) -> str:
    """Return those settings of a row that it states, such as 'on latents, microbatch 4, no compile'.

    Args:
        row: of a report.
        keys: of the settings.
        with_defaults: whether what has its usual value is named. Without it, a recipe stands for its settings.
    """
    words = []
    keys = list(keys)
    recipe = None if with_defaults else recipe_of(row)
    if recipe and set(keys) & set(settings_of_recipes()[recipe]):
        words.append(recipe)
        keys = [key for key in keys if key not in settings_of_recipes()[recipe]]
    for key in keys:
        value = row[key]
        name = key.replace('_', ' ')
        if value == usual_value(row, key) and not with_defaults:
            continue
        if value in ('yes', 'no'):
            name = IN_WORDS.get(key, name)
            words.append(name if value == 'yes' else f'no {name}')
        elif key == 'device':
            words.append(short_name(value))
        elif value != '' and pd.notna(value):
            words.append(IN_WORDS.get(key, f'{name} {{}}').format(value))
    return ', '.join(words)


def names_of_lines(firsts: pd.DataFrame, keys: Sequence[str], apart: str = 'stage') -> list[str]:
    """Return a name for each line of a figure, from the settings in which the lines differ.

    If two lines would have the same name, the names also include settings that only some lines state. The number of a
    `training` is never in a name.

    Args:
        firsts: one row for each line.
        keys: the settings that may be in a name.
        apart: a key that already distinguishes lines, for example by color.
    """
    keys = [key for key in keys if key != 'training']
    named = [key for key in keys if firsts[key].replace('', None).nunique() > 1]
    if firsts.duplicated([*named, apart]).any():
        named = [key for key in keys if firsts[key].nunique(dropna=False) > 1]
    return [settings_in_words(first, named) for _, first in firsts.iterrows()]


def in_common(rows: pd.DataFrame, keys: Sequence[str]) -> str:
    """Return what rows agree in, of some keys. A switch that is off is not named."""
    columns = differing(rows, keys)
    settings = []
    for key in keys:
        value = rows[key].max()  # '' where a row does not state it
        if key not in columns and value not in ('', 'no'):
            settings.append(f'{key} {value}')
    return f'All rows: {", ".join(settings)}' if settings else ''


def markdown(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return Markdown tables of rows: the settings of `keys` in which they differ, their figures and notes."""
    cells = labels_of(rows, keys)
    device = 'device' if 'on_cpu' in rows and rows['on_cpu'].any() else 'GPU'
    headings = {key: column.heading.format(device) for key, column in COLUMNS.items()}
    for key, heading in headings.items():
        if key in rows:
            cells[heading] = [cell(key, value) for value in rows[key]]
    cells['notes'] = rows['notes']

    # one table, or one for each subject, which repeats the labels
    labels = [heading for heading in cells if heading in TEXTS[:-1] or heading == headings['num_devices']]
    subjects = [[headings.get(key, key) for key in keys_of_subject] for keys_of_subject in SUBJECTS]
    return fitting_tables(cells, labels, subjects, TEXTS)


def labels_of(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return the columns that say which run a row is: run, device and date where there are several, and settings."""
    keys = differing(rows, keys)
    labels = pd.DataFrame(index=rows.index)
    if 'run' in keys:
        labels['run'] = rows['run']
    if 'device' in keys:
        labels['device'] = rows['device'].map(short_name)
    others = [key for key in keys if key not in TEXTS]
    for with_defaults in (False, True):
        labels['settings'] = [settings_in_words(row, others, with_defaults) for _, row in rows.iterrows()]
        is_other = rows[keys].apply(tuple, axis='columns') if keys else pd.Series('', rows.index)
        if is_other.groupby(labels.apply(tuple, axis='columns')).nunique().max() == 1:
            break  # no two settings have the same words
    if 'date' in keys:
        labels['date'] = rows['date']
    return labels


def fitting_tables(cells: pd.DataFrame, labels: Sequence[str], subjects: Sequence[Sequence[str]],
                   texts: Sequence[str]) -> list[str]:
    """Return cells as Markdown tables of at most WIDTH characters, and lines below them for text that has no room.

    It is one table where that fits, or else one for each subject. While one is still too wide, the rows are numbered,
    and the widest column of text moves below the tables.

    Args:
        cells: text of all columns.
        labels: columns that each table repeats.
        subjects: lists of other columns. Those in no list are a subject of their own.
        texts: columns of text, which stand to the left.
    """
    whole = text_table(cells.to_dict('records'), texts, markdown=True)
    if width_of(whole) <= WIDTH:
        return [whole]
    known = {heading for subject in subjects for heading in subject}
    others = [heading for heading in cells if heading not in known and heading not in labels]
    moved = []
    while True:
        tables = []
        for subject in [*subjects, others]:
            part = cells[[heading for heading in cells if heading in ('run', *labels, *subject)]]
            if (part.drop(columns=[*labels, *TEXTS], errors='ignore') != '').any(axis=None):
                tables.append(text_table(part.to_dict('records'), texts, markdown=True))
        movable = [heading for heading in cells if heading in TEXTS and heading != 'run']
        if not movable or max(map(width_of, tables)) <= WIDTH:
            break
        widest = max(movable, key=lambda heading: cells[heading].str.len().max())
        moved.append(cells.pop(widest))
        if 'run' not in cells:
            cells.insert(0, 'run', [str(number) for number in range(1, len(cells) + 1)])
    lines = []
    for number, of_row in enumerate(zip(*moved, strict=True), start=1):
        if any(of_row):
            lines.append(textwrap.fill(f'{number}: {"; ".join(filter(None, of_row))}', WIDTH, subsequent_indent='   '))
    return [*tables, '\n'.join(lines)] if lines else tables


def width_of(table: str) -> int:
    """Return the characters of the longest line of a table."""
    return max(map(len, table.splitlines()))
