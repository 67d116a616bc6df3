"""Make the cells of a table from rows, and print them as Markdown of at most 120 columns.

One column says in words in which settings the rows differ. One line below the tables has the settings that all share.
"""
import functools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.flags.parser import build_parser
from sdbench.flags.train import Train
from sdbench.gpus import short_name
from sdbench.records.metrics import COLUMNS, WIDTH, format_metric, text_table
from sdbench.records.read import Row
from sdbench.records.settings import SETTINGS, UNSTATED_NETWORK, VERSIONS, comparable
from sdbench.setup import FLAG_DEFAULTS

RECIPES = Path(__file__).parents[2] / 'recipes'
NAMED_RECIPES = ('fastest.txt', 'original.txt')  # their names replace their settings in tables and legends
# Text for a setting in sentences and legends, if its name and its value are not enough
SETTING_TEMPLATES = {
    'stage': '{}', 'device_train_microbatch_size': 'microbatch {}', 'image_size': '{} pixels', 'input': 'on {}',
    'model_name': '{}', 'batch_size': 'batch of {}', 'use_ema': 'EMA', 'model': '{}', 'weights': '{}',
    'guidance': 'guidance {:g}', 'trained_batches': 'batch {:,.0f}', 'num_nodes': '{} machines', 'network': '{}',
    'program': '{}', 'save_folder': 'in {}', 'git_commit': 'commit {}'}
# Values that most runs on GPUs have, besides the defaults of the flags
USUAL_VALUES = {'stage': 'train', 'input': 'images', 'precision': 'amp_bf16', 'encoder_precision': 'bf16',
                'network': UNSTATED_NETWORK, 'num_nodes': 1}
OWN_COLUMNS = ('run', 'device', 'date')  # settings that have a column of their own
TEXT_COLUMNS = (*OWN_COLUMNS, 'settings', 'notes')  # aligned to the left
LONGEST_TEXT = 20  # in a cell of a table that is too wide


class Table(NamedTuple):
    """A table of a report.

    Attributes:
        caption: its heading on a page.
        rows: its rows, with all metrics unrounded.
        keys: the settings that may tell its rows apart.
        sentences: what to know about it, with the settings that all rows share.
    """
    caption: str
    rows: list[Row]
    keys: Sequence[str]
    sentences: list[str]

    def headings(self) -> dict[str, str]:
        """Return the heading of each metric by its key."""
        device = 'device' if any(row.on_cpu for row in self.rows) else 'GPU'
        return {key: column.heading.format(device) for key, column in COLUMNS.items()}

    def cells(self) -> list[dict[str, str]]:
        """Return the texts of each row by heading, without the columns that are empty in every row."""
        differing = differing_settings(self.rows, self.keys)
        found = []
        for row, settings in zip(self.rows, describe_differences(self.rows, self.keys, OWN_COLUMNS), strict=True):
            cells = {}
            if 'run' in differing:
                cells['run'] = row.settings['run']
            if 'device' in differing:
                cells['device'] = short_name(row.device)
            cells['settings'] = settings
            if 'date' in differing:
                cells['date'] = row.date
            for key, heading in self.headings().items():
                cells[heading] = format_metric(key, row.metrics.get(key))
            found.append(cells | {'notes': row.notes})
        shown = [heading for heading in found[0] if any(cells[heading] for cells in found)]
        return [{heading: cells[heading] for heading in shown} for cells in found]

    def markdown(self) -> str:
        """Return the table as Markdown of at most WIDTH columns.

        A table that is too wide is continued below, with numbered rows. Its long texts are below all parts.
        """
        blocks = [text_table(self.cells(), TEXT_COLUMNS, markdown=True)]
        if table_width(blocks[0]) > WIDTH:
            cells = [{'run': str(number)} | cells for number, cells in enumerate(self.cells(), start=1)]
            below = [heading for heading in ('settings', 'notes', 'date', 'device')
                     if any(len(row.get(heading, '')) > LONGEST_TEXT for row in cells)]
            labels = [heading for heading in cells[0] if heading not in (*below, 'notes')
                      and heading in (*TEXT_COLUMNS, self.headings()['num_devices'])]
            others = [heading for heading in cells[0] if heading not in (*labels, *below)]
            blocks = continued_tables(cells, labels, others)
            lines = []
            for row in cells:
                texts = '; '.join(row[heading] for heading in below if row[heading])
                if texts:
                    lines.append(textwrap.fill(f'{row["run"]}: {texts}', WIDTH, subsequent_indent='   ',
                                               break_on_hyphens=False))
            blocks.append('\n'.join(lines))
        return '\n\n'.join(filter(None, blocks))


def shared_settings(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return a sentence with the settings that all rows share, except switches that are off; [] if there are none."""
    differing = differing_settings(rows, keys)
    texts = []
    for key in keys:
        value = next((row.settings[key] for row in rows if row.settings.get(key) is not None), None)
        if key not in differing and value is not None and value is not False:
            text = 'yes' if value is True else str(value)
            texts.append(f'{key} {text[:8] if key == "eval_sha256" else text}')
    return [f'All rows: {", ".join(texts)}'] if texts else []


def continued_tables(cells: list[dict[str, str]], labels: list[str], others: list[str]) -> list[str]:
    """Return the columns `others` in tables of at most WIDTH columns that all begin with `labels`."""
    parts = [labels]
    for heading in others:
        if table_width(table_of(cells, [*parts[-1], heading])) > WIDTH:
            parts.append(labels)
        parts[-1] = [*parts[-1], heading]
    return [table_of(cells, part) for part in parts]


def table_of(cells: list[dict[str, str]], headings: list[str]) -> str:
    return text_table([{heading: row[heading] for heading in headings} for row in cells], TEXT_COLUMNS, markdown=True)


def table_width(table: str) -> int:
    """Return the number of characters in the longest line of a table."""
    return max(map(len, table.splitlines()))


def differing_settings(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return the settings that differ between rows, and those that some rows of a stage state and others do not."""
    differing = []
    for key in keys:
        values = {(row.stage, row.settings.get(key)) for row in rows}
        stated = {value for _, value in values if value is not None}
        in_one_stage = len(values) > len({stage for stage, _ in values}) and key not in (*VERSIONS, 'eval_sha256')
        if len(stated) > 1 or in_one_stage:
            differing.append(key)
    return differing


def describe_differences(rows: Sequence[Row], keys: Sequence[str], omitted: Sequence[str] = ()) -> list[str]:
    """Return for each row the settings in which it differs from others, without those in `omitted`.

    Usual values are left out, unless rows with different settings would then have the same text.
    """
    differing = differing_settings(rows, keys)
    shown = [key for key in differing if key not in omitted]
    others = [key for key in differing if key in omitted]
    texts = [describe_settings(row.settings, shown, with_defaults=False) for row in rows]
    settings_with = {}  # by text, with the settings that are told elsewhere
    for row, text in zip(rows, texts, strict=True):
        own = (text, *(row.settings.get(key) for key in others))
        settings_with.setdefault(own, set()).add(tuple(row.settings.get(key) for key in shown))
    confused = {text for (text, *_), settings in settings_with.items() if len(settings) > 1}
    return [describe_settings(row.settings, shown) if text in confused else text
            for row, text in zip(rows, texts, strict=True)]


def line_labels(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return for each row the settings in which it differs from others, for a legend, where '' would show nothing."""
    texts = describe_differences(rows, keys)
    return [text or 'defaults' for text in texts] if len(rows) > 1 else texts


def describe_settings(settings: dict[str, Any], keys: Sequence[str], with_defaults: bool = True) -> str:
    """Return settings as text, such as 'on latents, microbatch 4, no compile'.

    Args:
        settings: the values, None where one is not stated.
        keys: the settings to describe.
        with_defaults: whether to mention usual values. If False, the name of a recipe also replaces its settings.
    """
    texts = []
    for recipe in () if with_defaults else NAMED_RECIPES:
        given = recipe_settings(recipe)
        if {*keys} & given.keys() and all(settings.get(key) == value for key, value in given.items()):
            texts.append(recipe)
            keys = [key for key in keys if key not in given]
            break
    for key in keys:
        value = settings.get(key)
        template = SETTING_TEMPLATES.get(key, key.replace('_', ' '))
        if value is None or not with_defaults and value == usual_value(settings, key):
            continue
        if isinstance(value, bool):
            texts.append(template if value else f'no {template}')
        elif key == 'device':
            texts.append(short_name(value))
        else:
            texts.append((template if '{' in template else f'{template} {{}}').format(value))
    return ', '.join(texts)


def usual_value(settings: dict[str, Any], key: str) -> Any:
    """Return the value of a setting that texts leave out; None if they mention every value."""
    if key == 'channels_last':
        return bool(settings['compile'])  # its default follows from --compile
    default = FLAG_DEFAULTS.get(key)
    return USUAL_VALUES.get(key, default if isinstance(default, (bool, str)) else None)  # numbers are mentioned


@functools.cache
def recipe_settings(name: str) -> dict[str, Any]:
    """Return the settings that a recipe gives."""
    flags = vars(build_parser(Train, '', 'benchmark.py').parse_args([f'@{RECIPES / name}']))
    return {key: comparable(value) for key, value in flags.items() if key in SETTINGS}


def describe_gpus(row: Row) -> str:
    """Return the GPUs and the input of a row as text, such as '8 x B200 on latents'."""
    on = f' on {row.settings["input"]}' if row.settings['input'] else ''
    return f'{row.metrics["num_devices"]:g} x {short_name(row.device)}{on}'
