"""Find the speeds that were measured on a GPU, to stand beside its forecast."""
import json
import os
from pathlib import Path

import pandas as pd

from sdbench.flags.train import SD2_BASE, SWITCHES, Train
from sdbench.gpus import Card
from sdbench.measuring.reliability import why_unreliable
from sdbench.models.loading import find_model

PUBLISHED = Path(__file__).parents[2] / 'published.csv'


def is_stable_diffusion_2(unet_config: dict) -> bool:
    """Tell whether a UNet is that of Stable Diffusion 2, by its configuration, whatever its image size."""
    for key, value in find_model(SD2_BASE).configs['unet'].items():
        if key in ('_class_name', 'sample_size'):
            continue
        if json.dumps(unet_config.get(key)) != json.dumps(value):  # where a tuple is a list
            return False
    return True


def measured_speeds(settings: Train, unet_config: dict, latents: bool, card: Card, records: list[dict]) -> pd.DataFrame:
    """Return a row for each reliable speed of the same model and input on a card.

    Flags that such a run had otherwise stand in the column `with`.

    Args:
        settings: of the run that is forecast.
        unet_config: of its UNet. Published speeds stand beside that of Stable Diffusion 2 alone.
        latents: whether it is on latents.
        card: that it is forecast for.
        records: those of --results.
    """
    found = [{'file': settings.results_file} | record for record in records]
    if is_stable_diffusion_2(unet_config):
        found = published_records(settings.model_name) + found
    same = {'stage': 'train', 'status': 'complete', 'model_name': settings.model_name, 'device': card.name,
            'encoders': 'text_in_loop' if latents else 'in_loop', 'image_size': settings.image_size}
    rows = []
    for record in found:
        record = {'stage': 'train', 'status': 'complete'} | record
        is_same = all(record.get(key) == value for key, value in same.items())
        if is_same and not why_unreliable(record):
            rows.append({'measured on': record['device'], 'GPUs': record.get('num_devices', ''),
                         'microbatch': record.get('device_train_microbatch_size', ''),
                         'images/s': record.get('images_per_sec', ''), 'with': flags_that_differ(record, settings),
                         'file': record['file']})
    return pd.DataFrame(rows)


def published_records(model_name: str) -> list[dict]:
    """Return the rows of published.csv that were measured, all of Stable Diffusion 2, as records of it by this name."""
    rows = pd.read_csv(PUBLISHED).query('extrapolated == "no"')
    rows = rows.assign(file=PUBLISHED.name, model_name=model_name, device='NVIDIA ' + rows['device'],
                       use_ema=rows['use_ema'] == 'yes')
    return rows.to_dict('records')


def flags_that_differ(record: dict, settings: Train) -> str:
    """Return the flags of a record that bear on speed and are others than those of the run, but for the microbatch."""
    flags = []
    for name in ('batch_size', 'use_ema', *SWITCHES):
        value = record.get(name)
        if value is None or name == 'device_train_microbatch_size' or value == getattr(settings, name):
            continue
        if isinstance(value, bool):
            flags.append(f'--{name}' if value else f'--no-{name}')
        else:
            flags.append(f'--{name} {value}')
    return ' '.join(flags)


def read_json_lines(path: str) -> tuple[list[dict], list[str]]:
    """Read the records of a file, and say of each line that is none, such as one that a full disk cut, why.

    A file that is not there has none.
    """
    if not os.path.isfile(path):
        return [], []
    records = []
    unread = []
    lines = Path(path).read_text(errors='replace').split('\n')
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            unread.append(f'{path}:{number} is no record, and is passed over: {error}')
            continue
        if isinstance(record, dict):
            records.append(record)
        else:
            unread.append(f'{path}:{number} is no record, and is passed over: not one JSON object')
    return records, unread
