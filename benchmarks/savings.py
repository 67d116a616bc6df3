"""Show what each change since 2022 saves in training Stable Diffusion 2: a table and a waterfall chart.

    python -m benchmarks.savings PICTURE [GPU[=DOLLARS] ...]    # such as mine.png H200=3.2; a few seconds, no GPU
"""
import argparse
import json
import sys
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sdbench.costs import DOLLARS_PER_GPU_HOUR, TRAINING_IMAGES, gpu_hours, last_price, price_of
from sdbench.flags.parser import parse
from sdbench.flags.plan import SD2_IMAGES, SD2_SCHEDULE
from sdbench.flags.train import BATCH_SIZE, Train, price
from sdbench.forecast.forecast import forecast
from sdbench.gpus import CARDS, cards_named, short_name
from sdbench.plan.measured import Speeds
from sdbench.plan.parts import Impossible, Preemptions
from sdbench.plan.prices import ON_DEMAND, Price, read_prices
from sdbench.plan.search import Phase, Training, find_plan
from sdbench.setup import setup_of_record, setup_of_settings

ONE_PHASE = (Phase(512, 1_400_000, TRAINING_IMAGES, SD2_IMAGES[0]),)
TWO_PHASES = tuple(Phase(size, steps, steps * BATCH_SIZE, images)
                   for (steps, size), images in zip(SD2_SCHEDULE, SD2_IMAGES, strict=True))
STEPS = [('gpus', 256, '256 A100 40GB in 2022'), ('gpus', 8, '8 GPUs instead of 256'),
         ('phases', TWO_PHASES, 'first 256 pixels, then 512'), ('base', '', 'larger microbatch, bf16'),
         ('recipe', '@recipes/fastest.txt', 'compiled model'), ('latents', True, 'encode images once')]
# Measured runs on one H100 without and with a step, except runs that slowed down by more than 10 %
PAIRS = {'base': ('batch_size == 64', 'batch_size == 80'), 'recipe': ('batch_size == 80', 'compile == True')}
RECORDS = Path('results/1xH100-torch-2.11.jsonl')
# Colors of the bars
PUBLISHED = '#1f3b73'
FORECAST = '#6aa8e0'
SAVED = '#e3e8f0'
ADDED = '#d9730d'
TEXT = 15  # points; the page shows the chart at half its size


class Setting(NamedTuple):
    """How the model is trained. The defaults are the training of 2022, when a GPU-hour cost $2."""
    prices: tuple[Price, ...] = (Price(None, DOLLARS_PER_GPU_HOUR),)
    gpus: int = 256
    card: str = 'NVIDIA A100-SXM4-40GB'
    phases: tuple[Phase, ...] = ONE_PHASE
    base: str = '@recipes/original.txt'
    recipe: str = ''
    latents: bool = False

    @property
    def dollars(self) -> float:
        return gpu_hours_of(self) * price_of(self.card, self.prices)


@cache
def gpu_hours_of(setting: Setting) -> float:
    """Return the GPU-hours of a plan with these flags: from the published speed, or else by a forecast."""
    # The speed of the training of 2022 was published.
    if setting == Setting(setting.prices, setting.gpus):
        row = pd.read_csv('published.csv').query(f'device == "A100-SXM4-40GB" and num_devices == {setting.gpus}')
        return gpu_hours(row['images_per_sec'].item(), setting.gpus, TRAINING_IMAGES)

    # Plan with exactly these flags: the search changes only the microbatch, and not one that a recipe gives.
    flags = f'--use_ema {setting.base} {setting.recipe} --dry_run 1'
    base = setup_of_settings(parse(Train, '', flags.split(), 'benchmarks.savings'))
    data = 'use_synth_latents' if setting.latents else 'use_synth_data'
    fixed = frozenset({'compile', 'gradient_checkpointing', data})
    training = Training(setting.phases, base, fixed, Preemptions(), 0, 0)
    plan = find_plan(CARDS[setting.card], setting.gpus, training, (), Speeds())
    if isinstance(plan, Impossible):
        sys.exit(f'{plan.name}: {plan.reason}; give a GPU with more memory')
    return plan.gpu_hours.likely


def measured(key: str) -> str:
    """Return the measured speedup of the step `key`, and in brackets the forecast speedup for the same two runs."""
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    records = pd.DataFrame([record | {'record': record} for record in records]).query('drift > -0.1')
    before, after = (records.query(query).iloc[0]['record'] for query in PAIRS[key])
    speeds = [forecast(setup_of_record(record), CARDS[record['device']]).images_per_sec for record in (before, after)]
    return f'{after["images_per_sec"] / before["images_per_sec"]:.2f} ({speeds[1] / speeds[0]:.2f})'


def steps_of(cards: list[str]) -> pd.DataFrame:
    """Return a row for each step: STEPS, a step for each card, such as 'H100-80GB' or 'H200=3.2', and the price."""
    # Read the prices. The last step goes from $2 to the price of the last card, which therefore needs a price.
    given = tuple(price(card) for card in cards if '=' in card)
    prices = read_prices('recipes/prices.csv', ON_DEMAND, given)
    gpus = [cards_named((card.partition('=')[0],))[0].name for card in cards]
    last = last_price(gpus[-1], prices)
    if last is None or last.dollars == 0:
        sys.exit(f'{cards[-1]} is in no price list here; give {cards[-1]}=DOLLARS')
    of_80_gb = price_of('NVIDIA A100-SXM4-80GB', prices)
    prices = (Price('A100-40GB', of_80_gb), *prices)  # no cloud lists the 40GB any more
    steps = [*STEPS, *(('card', gpu, f'on {short_name(gpu)}') for gpu in gpus),
             ('prices', prices, f'at ${last.dollars:.2f} an hour, not $2')]

    # Each plan is the previous one with one more change. Divide the cost without the change by the cost with it: in the
    # previous plan, in the plan of 2022 on 8 GPUs (plans[2]), and in today's plan, which is the last.
    plans = [*accumulate(steps, lambda plan, step: plan._replace(**{step[0]: step[1]}), initial=Setting())]
    rows = []
    for (key, _, name), (before, after) in zip(steps, pairwise(plans), strict=True):
        row = {'step': name, 'GPU-hours': gpu_hours_of(after), 'dollars': after.dollars}
        others_by_column = {'vs. row above': before, 'on its own in 2022': plans[2], 'without it today': plans[-1]}
        for column, others in others_by_column.items():
            without, with_it = (others._replace(**{key: getattr(plan, key)}) for plan in (before, after))
            row[column] = without.dollars / with_it.dollars
        rows.append(row | {'measured (forecast)': measured(key) if key in PAIRS else ''})
    return pd.DataFrame(rows)


def draw(path: str, rows: pd.DataFrame) -> None:
    """Write a chart with a bar for each step: the cost of the training after the step, and in pale what the step saves.

    The first two steps are published, and all others are forecasts.
    """
    # Draw the bars, each with its cost and the ratio to the bar above it.
    figure = Figure(figsize=(11, 2 + 0.52 * len(rows)), layout='constrained')
    axes = figure.subplots()
    first, last = rows['dollars'].iloc[[0, -1]]
    before = first
    for position, row in rows.iterrows():
        after = row['dollars']
        text = f' \\${after:,.0f}'
        if after < before:
            text += f'    {before / after:.2f} times less'
        elif after > before:
            text += f'    {after / before:.2f} times more'
        if row['measured (forecast)']:
            text += f' ({row["measured (forecast)"].split()[0]} measured on an H100)'
        axes.barh(position, max(before, after), color=ADDED if after > before else SAVED, height=0.7)
        axes.barh(position, min(before, after), color=PUBLISHED if position < 2 else FORECAST, height=0.7)
        weight = 'bold' if position in (0, len(rows) - 1) else 'normal'
        axes.text(max(before, after), position, text, va='center', fontsize=TEXT, fontweight=weight)
        before = after

    # Label the bars with the steps, and hide the axes.
    axes.set_yticks(rows.index, rows['step'].str.replace('$', r'\$'), fontsize=TEXT)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.7 * first)
    axes.spines[:].set_visible(False)
    title = (f'Training Stable Diffusion 2 from scratch:\n\\${first:,.0f} in 2022, \\${last:,.0f} by forecast in 2026, '
             f'{first / last:.0f} times less')
    figure.suptitle(title, x=0.01, ha='left', fontsize=TEXT + 4, fontweight='bold')
    kinds = {'published': PUBLISHED, 'forecast': FORECAST, 'saved by the step': SAVED, 'added by the price': ADDED}
    figure.legend(handles=[Patch(color=color, label=label) for label, color in kinds.items()], ncols=4, frameon=False,
                  loc='outside lower left', fontsize=TEXT)
    figure.savefig(path, dpi=140)


if __name__ == '__main__':
    parser = argparse.ArgumentParser('python -m benchmarks.savings', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('picture', metavar='PICTURE', help='file for the waterfall chart')
    parser.add_argument('gpus', metavar='GPU[=DOLLARS]', nargs='*', default=['A100-80GB', 'H100-80GB', 'B200'],
                        help='GPUs of the last steps, with a price per GPU-hour (default: A100-80GB H100-80GB B200)')
    arguments = parser.parse_args()
    table = steps_of(arguments.gpus)
    print(table.to_markdown(index=False, floatfmt=('', ',.0f', ',.0f', '.2f', '.2f', '.2f', '')))
    draw(arguments.picture, table)
