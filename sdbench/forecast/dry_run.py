"""What the dry runs of benchmark.py and encode.py share: which GPUs, what a record says, how it is shown and kept."""
import json
import math

import pandas as pd

from sdbench.errors import plural
from sdbench.forecast.speed import can_forecast
from sdbench.gpus import Card, cards_named
from sdbench.records.keys import FORECAST
from sdbench.records.record import append_line

GPUS_A_NODE = 8


def cards_to_forecast(names: tuple[str, ...], precision: str) -> list[Card]:
    """Return the cards that --gpu names; without it those whose speed can be forecast, if there are any.

    Raises ValueError for a name that is no card's.
    """
    cards = cards_named(names)
    if not names:
        cards = [card for card in cards if can_forecast(card, precision)] or cards
    return cards


def forecast_figures(card: Card, num_devices: int, gib: float, speed: float | None, least: float | None = None,
                     most: float | None = None, encoding: float | None = None) -> dict:
    """Return what a record says that was calculated and not measured.

    | key                                     | meaning                                                         |
    |-----------------------------------------|-----------------------------------------------------------------|
    | status                                  | forecast                                                        |
    | images_per_sec                          | None where the GPU is not NVIDIA's, or the precision is float32 |
    | images_per_sec_least, _most             | its range; None where the forecast is not tested                |
    | encode_images_per_sec                   | that encode.py would make latents of, on all devices together   |
    | peak_memory_gib                         | of the card, with what is added to what is counted              |
    """
    return {
        'status': FORECAST,
        'device': card.name,
        'device_type': 'cuda',
        'num_devices': num_devices,
        'num_nodes': math.ceil(num_devices / GPUS_A_NODE),
        'images_per_sec': speed,
        'images_per_sec_least': least,
        'images_per_sec_most': most,
        'encode_images_per_sec': encoding,
        'peak_memory_gib': gib,
    }


def nothing_fits(label: str, gib: float, cards: list[Card], changes: list[str]) -> ValueError:
    """Return the error of a run that no GPU that was asked for holds.

    Args:
        label: in error messages, what goes through the model at once.
        gib: that it takes.
        cards: that were asked for.
        changes: of which each would let it fit.
    """
    remedy = 'choose a GPU with more memory by --gpu'
    if changes:
        remedy += f', or take {" or ".join(changes)}'
    return ValueError(f'{label} takes {gib:.1f} GiB, and the largest GPU asked for has '
                      f'{max(card.gib for card in cards):g}; {remedy}')


def show_forecasts(text: str, records: list[dict], without_room: list[Card], results: str | None) -> list[dict]:
    """Print a forecast; append its records that have a speed to the file of --results, or print them; return these."""
    print(text)
    if without_room:
        print(f'\nNo room on {", ".join(card.name for card in without_room)}.')
    forecasts = [record for record in records if record['images_per_sec'] is not None]
    if results == '-':
        print(*map(json.dumps, forecasts), sep='\n')
    elif results is not None:
        for record in forecasts:
            append_line(json.dumps(record), results)
        print(f'\n{plural(len(forecasts), "forecast")} appended to {results}')
    return forecasts


def time_in_words(seconds: dict[str, float]) -> str:
    """Return the share of the time of a step by kind of operator, the largest first, down to one in a hundred."""
    total = sum(seconds.values())
    shares = []
    for kind, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        if spent >= 0.005 * total:
            shares.append(f'{kind} {spent / total:.0%}')
    return f'Where the time goes: {", ".join(shares)}.'


def aligned(table: pd.DataFrame) -> str:
    """Return a table as text: the first column to the left, figures to the right."""
    alignment = ['left', *['right'] * (len(table.columns) - 1)]
    return table.to_markdown(index=False, tablefmt='plain', disable_numparse=True, colalign=alignment)
