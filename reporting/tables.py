"""Tables as people read them: figures rounded once, settings in words, Markdown."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from inputs.words import counted
from measuring.caution import FEWEST_BATCHES, MUCH_DRIFT, QUEUES_IN_WINDOW
from reporting.records import IDENTITY, SETTINGS, SWITCHES_OF_SPEED, one_line_of_text, settings_in_one
from settings.train import ENCODER_PRECISIONS, Train
from settings.switch_table import Situation, switch_of

COLUMNS = {  # key: heading, template and decimals in print; {} in a heading stands for the kind of device
    'num_devices': ('{}s', '{}', 0),
    'num_nodes': ('nodes', '{}', 0),
    'images_per_sec': ('images/s', '{}', 1),
    'images_per_sec_per_device': ('images/s per {}', '{}', 2),
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
    'guidance': ('guidance', '{}', 1),
    'fid': ('FID', '{}', 2),
    'clip_score': ('CLIP score', '{}', 2),
    'trained_batches': ('batches', '{}', 0),
    'images_seen': ('images seen', '{}', 0),
}
MEANING_OF_MARK = (
    f'Figures marked * are not to be relied on: they are of fewer than {FEWEST_BATCHES} batches, or than '
    f"{QUEUES_IN_WINDOW} times the loader's queue, or the speed changed by more than {100 * MUCH_DRIFT:g} % within "
    'them, or other programs used much of the machine. Nothing is extrapolated from them.')
SPEEDS = ('images_per_sec', 'images_per_sec_per_device', 'scaling_efficiency', 'speed_over_first')
ALWAYS_STATED = ('device', 'image_size', 'stage', 'batch_size', 'encoders')  # also where they are at their defaults


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
        decimals_of_three_digits = 2 - math.floor(math.log10(value)) if value else 0
        return template.format(f'{value:,.{max(decimals, decimals_of_three_digits)}f}')
    return one_line_of_text(value).replace('|', r'\|')


def marked(figure: str, doubt: str) -> str:
    """A printed figure, with the sign of those that are not to be relied on where there is a doubt."""
    return f'{figure} *' if figure and doubt else figure


def markdown(rows: pd.DataFrame, columns: list[str]) -> str:
    """An aligned Markdown table, figures to the right; a column with nothing in it is left out."""
    printed = pd.DataFrame(index=rows.index)
    alignment = []
    for key in columns:
        if key not in rows:
            continue
        cells = [printed_figure(key, value) for value in rows[key]]
        if key in SPEEDS:
            cells = [marked(cell, doubt) for cell, doubt in zip(cells, rows['doubt'], strict=True)]
        if not any(cells):
            continue
        if key in COLUMNS:
            heading, _, _ = COLUMNS[key]
            heading = heading.format(kind_of_device(rows))
            alignment.append('right')
        else:
            heading = key
            alignment.append('left')
        printed[heading] = cells
    return printed.to_markdown(index=False, disable_numparse=True, colalign=alignment)


def kind_of_device(rows: pd.DataFrame) -> str:
    """What one device of these rows is called, with an s for more."""
    if rows['on_cpu'].all():
        return 'CPU rank'
    if rows['on_cpu'].any():
        return 'device'
    return 'GPU'


def in_devices(rows: pd.DataFrame) -> list[str]:
    """The devices of each row in words, with its nodes where some number of devices is on several numbers of them."""
    kinds = rows['on_cpu'].map({True: 'CPU rank', False: 'GPU'})
    words = [counted(count, kind) for count, kind in zip(rows['num_devices'], kinds, strict=True)]
    if nodes_differ(rows):
        nodes = [counted(int(text), 'node') if text.isdecimal() else '? nodes' for text in rows['num_nodes']]
        words = [f'{device} on {node}' for device, node in zip(words, nodes, strict=True)]
    return words


def nodes_differ(rows: pd.DataFrame) -> bool:
    """Whether rows of one number of devices are on several numbers of nodes."""
    return bool((rows.groupby('num_devices')['num_nodes'].nunique() > 1).any())


def identity_that_differs(rows: pd.DataFrame) -> list[str]:
    """Which of date and commit tell rows apart that agree in all settings."""
    keys = []
    for key in IDENTITY:
        if (rows.groupby([settings_in_one(rows), 'num_devices', 'num_nodes'])[key].nunique() > 1).any():
            keys.append(key)
    return keys


def differing_settings(rows: pd.DataFrame) -> list[str]:
    """The settings that not all rows agree in."""
    return [key for key in SETTINGS if len(set(rows[key])) > 1]


def versions_in_all(rows: pd.DataFrame) -> list[str]:
    """The packages that every row states in the same version, such as 'torch 2.7.0'."""
    stated = [versions.split(', ') for versions in rows['versions'].unique()]
    if not stated:
        return []
    return [package for package in stated[0] if all(package in packages for packages in stated)]


def without_packages(versions: str, packages: list[str]) -> str:
    """The text of versions, such as 'composer 0.32.1, torch 2.7.0', without some of its packages."""
    return ', '.join(package for package in versions.split(', ') if package not in packages)


@functools.cache
def defaults() -> dict[str, str]:
    """The settings of a run without flags, as a record states them, but for those that follow from its machine."""
    flags = {field.name: field.default for field in dataclasses.fields(Train) if field.name in SETTINGS}
    stated = {key: one_line_of_text(value) for key, value in flags.items() if value is not None}
    return stated | {'stage': 'train', 'encoders': 'in_loop', 'num_workers': 'default'}


def is_at_default(row: pd.Series, key: str) -> bool:
    """Whether a setting is what a run without this flag would have taken on the same device."""
    if key == 'encoder_precision':
        return row[key] == ENCODER_PRECISIONS.get(row['precision'])
    if key == 'precision':
        return row[key] == ('fp32' if row['on_cpu'] else 'amp_bf16')
    if key == 'device_train_microbatch_size':  # on a CPU a rank's whole share of the batch
        is_stated = row[key] and row['batch_size']
        return row['on_cpu'] and bool(is_stated) and int(row[key]) * row['num_devices'] == int(row['batch_size'])
    if key in SWITCHES_OF_SPEED:
        return row[key] == one_line_of_text(switch_of(key).default_in(situation_of(row)))
    return row[key] == defaults().get(key)


def situation_of(row: pd.Series) -> Situation:
    """What the defaults of switches depend on, as a record states it."""
    modes = {'': False, 'no': False, 'yes': True}
    return Situation(not row['on_cpu'], int(row['num_devices']), modes.get(row['compile'], row['compile']))


def settings_in_words(row: pd.Series, keys: list[str], always: Sequence[str] = ALWAYS_STATED) -> list[str]:
    """The settings that a row states, as 'H200', '512 px' and 'compile yes', without those at their defaults, unless
    they are `always` named."""
    words = []
    for key in keys:
        if not row[key]:
            continue
        if is_at_default(row, key) and key not in always:
            continue
        if key in ('device', 'versions'):
            words.append(row[key])
        elif key == 'image_size':
            words.append(f'{row[key]} px')
        else:
            words.append(f'{key} {row[key]}')
    return words


def labels_of_settings(rows: pd.DataFrame) -> list[str]:
    """What tells the settings of each row from those of the others; '' where nothing does.

    A setting that is at its default, or not stated, is named only where it alone tells two rows apart.
    """
    keys = differing_settings(rows)
    if not keys:
        return [''] * len(rows)
    packages = versions_in_all(rows)
    rows = rows.assign(versions=rows['versions'].map(lambda text: without_packages(text, packages)))
    labels = pd.Series([label_of_setting(row, keys) for _, row in rows.iterrows()])
    for places in labels.groupby(labels).indices.values():
        alike = rows.iloc[places]
        for place, (_, row) in zip(places, alike.iterrows(), strict=True):
            labels.iloc[place] = label_of_setting(row, keys, differing_settings(alike))
    return labels.tolist()


def label_of_setting(row: pd.Series, keys: list[str], needed: Sequence[str] = ()) -> str:
    """What a row states of its settings `keys`; those that are `needed` are named whatever they are."""
    words = settings_in_words(row, keys, [*ALWAYS_STATED, *needed])
    words += [f'{key} not stated' for key in needed if not row[key]]
    if words:
        return ', '.join(words)
    if any(row[key] for key in keys):
        return 'at the defaults'
    return f'not stated: {", ".join(keys)}'
