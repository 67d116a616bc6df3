"""Show what each change since 2022 saves in training Stable Diffusion 2: a table and a waterfall chart.

    python -m benchmarks.savings PICTURE [GPU[=DOLLARS] ...]    # such as mine.png H200=3.2; three minutes, no GPU
"""
import sys
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import pandas as pd

from benchmark import build_model, build_optimizer
from benchmarks.waterfall import draw
from sdbench.complete import complete
from sdbench.costs import TRAINING_IMAGES, Prices, gpu_hours, price_of
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.forecast.dry_run import Forecast
from sdbench.forecast.trace import Estimate
from sdbench.gpus import CARDS, cards_named, short_name

TWO_PHASES = (('@recipes/phase-1.txt', 790_000_000), ('@recipes/phase-2.txt', 300_000_000))  # and images to encode
STEPS = [('gpus', 256, '256 A100 40GB in 2022'), ('gpus', 8, '8 GPUs instead of 256'),
         ('phases', TWO_PHASES, 'first 256 pixels, then 512'), ('base', '', 'larger microbatch, bf16'),
         ('recipe', '@recipes/fastest.txt', 'compiled model'), ('latents', '--use_synth_latents', 'encode images once')]
# Measured runs on one H100 without and with a step, except runs that slowed down by more than 10 %
PAIRS = {'base': ('batch_size == 64', 'batch_size == 80'), 'recipe': ('batch_size == 80', 'compile == True')}


class Plan(NamedTuple):
    """How the model is trained. The defaults are the training of 2022, when a GPU-hour cost $2."""
    prices: Prices = ()
    gpus: int = 256
    card: str = 'NVIDIA A100-SXM4-40GB'
    phases: tuple[tuple[str, int], ...] = (('@recipes/phase-2.txt --max_duration 1400000ba', 790_000_000),)
    base: str = '@recipes/original.txt'
    recipe: str = ''
    latents: str = ''

    @property
    def dollars(self) -> float:
        return gpu_hours_of(self) * price_of(self.card, self.prices)


@cache
def gpu_hours_of(plan: Plan) -> float:
    """Return the GPU-hours of a plan: from the published speed on these GPUs, or else by a forecast."""
    # The speed of the training of 2022 was published.
    if plan == Plan(plan.prices, plan.gpus):
        row = pd.read_csv('published.csv').query(f'device == "A100-SXM4-40GB" and num_devices == {plan.gpus}')
        return gpu_hours(row['images_per_sec'].item(), plan.gpus, TRAINING_IMAGES)

    # Add up the phases. A plan on latents also encodes the images of each phase once.
    total = 0
    for phase, to_encode in plan.phases:
        record = forecast(f'--no-pretrained {phase} {plan.base} {plan.recipe} {plan.latents}', plan.gpus, plan.card)
        total += gpu_hours(record['images_per_sec'], plan.gpus, record['training_images'])
        if plan.latents:
            total += gpu_hours(record['encode_images_per_sec'], plan.gpus, to_encode)
    return total


def forecast(flags: str, gpus: int, card: str) -> dict:
    """Return the record of a dry run. The card is not among the flags, so all cards share a trace."""
    run = complete(parse(Train, '', [*flags.split(), '--dry_run', str(gpus)], 'benchmark.py'), None)
    estimate = Estimate.of(run, build_model, build_optimizer)
    if estimate.microbatch_on(CARDS[card]) is None:
        sys.exit(f'{short_name(card)} has too little memory for a step with {flags}; give a GPU with more memory')
    return Forecast.of(estimate, CARDS[card]).record


def measured(key: str) -> str:
    """Return the measured speedup of the step `key`, and in brackets the forecast speedup for the same two runs."""
    runs = pd.read_json('results/1xH100-torch-2.11.jsonl', lines=True).query('drift > -0.1')
    pair = pd.concat(map(runs.query, PAIRS[key]))
    flags = pair['command'].str.replace('benchmark.py', '--channels_last')  # the default at that time
    forecasts = [forecast(each, 1, 'NVIDIA H100 80GB HBM3')['images_per_sec'] for each in flags]
    before, after = pair['images_per_sec']
    forecast_before, forecast_after = forecasts
    return f'{after / before:.2f} ({forecast_after / forecast_before:.2f})'


def steps_of(cards: list[str]) -> pd.DataFrame:
    """Return a row for each step: STEPS, a step for each card, such as 'H100-80GB' or 'H200=3.2', and the price."""
    # Read the prices. The last step goes from $2 to the price of the last card, which therefore needs a price.
    flags = ['@recipes/prices-on-demand.txt', *(card for card in cards if '=' in card)]
    prices = parse(Train, __doc__, ['--dry_run', *flags], 'benchmarks.savings').dollars_per_gpu_hour
    prices = (('A100-40GB', price_of('NVIDIA A100-SXM4-80GB', prices)), *prices)  # no cloud lists the 40GB any more
    gpus = [cards_named((card.partition('=')[0],))[0].name for card in cards]
    if not price_of(gpus[-1], prices) > 0:
        sys.exit(f'{cards[-1]} is in no price list here; give {cards[-1]}=DOLLARS')
    steps = [*STEPS, *(('card', gpu, f'on {short_name(gpu)}') for gpu in gpus),
             ('prices', prices, f'at ${price_of(gpus[-1], prices):.2f} an hour, not $2')]

    # Each plan is the previous one with one more change. Divide the cost without the change by the cost with it: in the
    # previous plan, in the plan of 2022 on 8 GPUs (plans[2]), and in today's plan, which is the last.
    plans = [*accumulate(steps, lambda plan, step: plan._replace(**{step[0]: step[1]}), initial=Plan())]
    rows = []
    for (key, _, name), (before, after) in zip(steps, pairwise(plans), strict=True):
        row = {'step': name, 'GPU-hours': gpu_hours_of(after), 'dollars': after.dollars}
        others_by_column = {'vs. row above': before, 'on its own in 2022': plans[2], 'without it today': plans[-1]}
        for column, others in others_by_column.items():
            without, with_it = (others._replace(**{key: getattr(plan, key)}) for plan in (before, after))
            row[column] = without.dollars / with_it.dollars
        rows.append(row | {'measured (forecast)': measured(key) if key in PAIRS else ''})
    return pd.DataFrame(rows)


if __name__ == '__main__':
    table = steps_of(sys.argv[2:] or ['A100-80GB', 'H100-80GB', 'B200'])
    print(table.to_markdown(index=False, floatfmt=('', ',.0f', ',.0f', '.2f', '.2f', '.2f', '')))
    draw(sys.argv[1], table)
