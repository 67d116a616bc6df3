"""Find the speeds that were measured on a GPU, to stand beside its forecast."""
import json
from pathlib import Path

import pandas as pd

from sdbench.flags.train import SD2_BASE, SWITCHES, Train
from sdbench.gpus import Card
from sdbench.models.loading import find_model
from sdbench.records.read import INPUTS, MEASURED, read_records, words

PUBLISHED = Path(__file__).parents[2] / 'published.csv'


def is_stable_diffusion_2(unet_config: dict) -> bool:
    """Tell whether a UNet is that of Stable Diffusion 2, by its configuration, whatever its image size."""
    for key, value in find_model(SD2_BASE).configs['unet'].items():
        if key in ('_class_name', 'sample_size'):
            continue
        if json.dumps(unet_config.get(key)) != json.dumps(value):  # where a tuple is a list
            return False
    return True


def measured_speeds(settings: Train, unet_config: dict, card: Card, rows: list[dict]) -> pd.DataFrame:
    """Return a row for each reliable speed of the same model and input on a card.

    Flags that such a run had otherwise stand in the column `with`.

    Args:
        settings: of the run that is forecast.
        unet_config: of its UNet. Published speeds stand beside that of Stable Diffusion 2 alone.
        card: that it is forecast for.
        rows: of the records of --results, as `read_records` returns them.
    """
    # published.csv names no model, and leaves out the maker of a GPU
    found = []
    if is_stable_diffusion_2(unet_config):
        for row in read_records(str(PUBLISHED)):
            found.append(row | {'file': PUBLISHED.name, 'model_name': settings.model_name,
                                'device': f'NVIDIA {row["device"]}'})
    found += [row | {'file': settings.results_file} for row in rows]

    # those of such a run
    same = {'stage': 'train', 'status': MEASURED, 'model_name': settings.model_name, 'device': card.name,
            'input': INPUTS[settings.encoders], 'image_size': str(settings.image_size)}
    speeds = []
    for row in found:
        if any(row.get(key) != value for key, value in same.items()):
            continue
        # flags that bear on speed and are others than those of the run, but for the microbatch
        flags = []
        for name in ('batch_size', 'use_ema', *SWITCHES):
            value = row[name]
            if value in ('', words(getattr(settings, name))) or name == 'device_train_microbatch_size':
                continue
            if value in ('yes', 'no'):
                flags.append(f'--{name}' if value == 'yes' else f'--no-{name}')
            else:
                flags.append(f'--{name} {value}')
        speeds.append({'measured on': row['device'], 'GPUs': row['num_devices'],
                       'microbatch': row['record'].get('device_train_microbatch_size', ''),
                       'images/s': row['images_per_sec'], 'with': ' '.join(flags), 'file': row['file']})
    return pd.DataFrame(speeds)
