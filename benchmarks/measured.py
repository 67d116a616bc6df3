"""Print the README's table of speeds that were measured on GPUs, from the records in a folder.

    python -m benchmarks.measured [results]

A row is the fastest reliable run on random images of 512 pixels with EMA, for each GPU model, GPU count and recipe.
"""
import sys
from pathlib import Path

import pandas as pd
from benchmarks.smoke import ratio_to_forecast

from sdbench.gpus import short_name
from sdbench.records.figures import rounded, text_table
from sdbench.records.read import MEASURED, read_all
from sdbench.records.setup import MODEL_SETTINGS
from sdbench.report.markdown import describe_settings

RECIPES = ('fastest.txt', 'defaults', 'channels last', 'original.txt')  # in the order of the table
NOT_IN_A_RECIPE = ('device_train_microbatch_size', 'compile_blocks', 'use_ema', 'network')


def recipe_in_words(row: pd.Series) -> str:
    """Return the name of a run's recipe, 'defaults' if no switch is given, or else its settings as text."""
    words = describe_settings(row, [key for key in MODEL_SETTINGS if key not in NOT_IN_A_RECIPE], with_defaults=False)
    return words or 'defaults'


def measured_table(folder: Path) -> str:
    """Return the table for all records in a folder and its subfolders."""
    # Select trainings on random images with EMA, and put the forecast for its setup next to each of them.
    records = pd.DataFrame(read_all([str(path) for path in sorted(folder.rglob('*.jsonl'))]))
    records['recipe'] = [recipe_in_words(row) for _, row in records.iterrows()]
    alike = {'stage': 'train', 'input': 'images', 'image_size': '512', 'dataset': 'synthetic', 'use_ema': 'yes'}
    records = records[(records[list(alike)] == pd.Series(alike)).all(axis='columns')]
    runs = records[(records['status'] == MEASURED) & records['recipe'].isin(RECIPES)]
    runs = runs.assign(forecast=[record['images_per_sec'] / ratio_to_forecast(record) for record in runs['record']])
    runs = runs.sort_values('images_per_sec', ascending=False).drop_duplicates(['device', 'num_devices', 'recipe'])

    # Write one row per GPU model, GPU count and recipe, with the speed relative to the original's recipe.
    rows = []
    for (device, gpus), of_gpu in runs.groupby(['device', 'num_devices']):
        of_gpu = of_gpu.set_index('recipe')[['images_per_sec', 'forecast']]
        for recipe in (name for name in RECIPES if name in of_gpu.index):
            speed, forecast = of_gpu.loc[recipe]
            shown = 'defaults, --channels_last' if recipe == 'channels last' else recipe
            row = {'GPU': f'{gpus} x {short_name(device)}', 'recipe': shown, 'images/s': rounded(speed, 1),
                   "over the original's recipe": '', 'forecast': '' if pd.isna(forecast) else rounded(forecast, 1)}
            if 'original.txt' in of_gpu.index:
                row["over the original's recipe"] = f'{speed / of_gpu.loc["original.txt", "images_per_sec"]:.1f} x'
            rows.append(row)
    return text_table(rows, ['GPU', 'recipe'], markdown=True)


if __name__ == '__main__':
    print(measured_table(Path(*sys.argv[1:] or ['results'])))
