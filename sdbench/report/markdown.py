"""Write rows as a Markdown table: a column for what they differ in, and below it what they agree in."""
import textwrap
from collections.abc import Sequence

import pandas as pd

from sdbench.records.figures import COLUMNS, WIDTH, cell, table_of

# How a sentence or a legend writes a setting, where its name and its value are not enough
IN_WORDS = {'device': '{}', 'device_train_microbatch_size': 'microbatch {}', 'image_size': '{} pixels',
            'input': 'on {}', 'model_name': '{}', 'batch_size': 'batch of {}', 'use_ema': 'EMA', 'model': '{}',
            'weights': '{}', 'guidance': 'guidance {:g}', 'trained_batches': 'batch {:,.0f}',
            'num_nodes': 'machines {}', 'network_gbits': '{} Gbit/s', 'save_folder': 'in {}'}


def differing(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return the keys in which rows differ: of several values, or, within a stage, stated by some rows alone.

    '' is a setting that a row does not state.
    """
    stated = rows[list(keys)].replace('', None).nunique()
    in_a_stage = rows.groupby('stage')[list(keys)].nunique().max()  # '' is a value
    return [key for key in keys if in_a_stage[key] > 1 or stated[key] > 1]


def settings_in_words(row: pd.Series, keys: Sequence[str]) -> str:
    """Return the settings of a row that it states, of these keys, such as 'on latents, microbatch 4, no compile'."""
    settings = []
    for key in keys:
        value = row[key]
        name = key.replace('_', ' ')
        if value in ('yes', 'no'):
            name = IN_WORDS.get(key, name)
            settings.append(name if value == 'yes' else f'no {name}')
        elif value != '' and pd.notna(value):
            settings.append(IN_WORDS.get(key, f'{name} {{}}').format(value))
    return ', '.join(settings)


def names_of_lines(firsts: pd.DataFrame, keys: Sequence[str], apart: str = 'stage') -> list[str]:
    """Return a name for each line of a picture, by the settings in which those lines differ that state them.

    Where two lines would have the same name, all are named by what some state and others do not, too. The number of a
    `training` is in no name.

    Args:
        firsts: a row of each line.
        keys: of the settings.
        apart: a key by which lines are told apart elsewhere.
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
    return textwrap.fill(f'All rows: {", ".join(settings)}', WIDTH) if settings else ''


def markdown(rows: pd.DataFrame, keys: Sequence[str]) -> str:
    """Return an aligned Markdown table: those of its keys that rows differ in, the figures and the notes."""
    device = 'GPU'
    if 'on_cpu' in rows and rows['on_cpu'].any():
        device = 'device'
    settings = differing(rows, keys)
    cells = rows[settings].copy()
    for key, column in COLUMNS.items():
        if key in rows:
            cells[column.heading.format(device)] = [cell(key, value) for value in rows[key]]
    cells['notes'] = rows['notes']
    return table_text(cells, [*settings, 'notes'])


def table_text(cells: pd.DataFrame, texts: Sequence[str]) -> str:
    """Return a Markdown table of cells; columns of `texts` stand to the left. One with nothing in it is left out."""
    return table_of(cells.to_dict('records'), texts)
