"""Convert images per second to days, GPU-hours and dollars, without torch."""
import math
from collections.abc import Iterable
from functools import cache

from sdbench.errors import UserError
from sdbench.gpus import cards_named, short_name, unknown_gpu, words_in

TRAINING_IMAGES = 2_867_200_000  # 1,400,000 steps of 2048 images: Stable Diffusion 2 base, as published
DOLLARS_PER_GPU_HOUR = 2.0
SECONDS_PER_DAY = 86_400
ONE_PRICE = ('Every GPU has the same price here, so the cheapest is the one that needs the fewest GPU-hours; '
             'recipes/prices-on-demand.txt has a price for each.')

Prices = tuple[tuple[str | None, float], ...]  # the words of a GPU's name, or None for all GPUs, and dollars an hour


def days_to_train(images_per_sec: float, num_images: int) -> float:
    """Return the days of 24 hours that `num_images` take at `images_per_sec` of all devices together."""
    return num_images / images_per_sec / SECONDS_PER_DAY


def gpu_hours(images_per_sec: float, num_devices: int, num_images: int) -> float:
    """Return the hours that `num_images` take at `images_per_sec`, times the devices."""
    return days_to_train(images_per_sec, num_images) * 24 * num_devices


@cache
def names_of_cards(words: str) -> frozenset[str]:
    """Return the names of the GPUs that some words name, as --gpu takes them; none where they name no known one."""
    try:
        return frozenset(card.name for card in cards_named((words,)))
    except UserError:
        return frozenset()


def price_of(device: str, prices: Prices) -> float:
    """Return the dollars of an hour of a GPU; NaN where there are prices, and none is for it.

    A price is for the GPUs that --gpu would pick by its name, or for the one device of just this name that no document
    describes, such as a part of a GPU. The last that is for this one counts.

    Args:
        device: the GPU's name, as records have it.
        prices: of --dollars_per_gpu_hour. Without any it is DOLLARS_PER_GPU_HOUR.
    """
    if not prices:
        return DOLLARS_PER_GPU_HOUR
    for words, dollars in reversed(prices):
        if words is None or is_named(device, words):
            return dollars
    return math.nan


def is_named(device: str, words: str) -> bool:
    """Tell whether some words name a GPU: as --gpu takes them, or word by word where no document describes it."""
    cards = names_of_cards(device)  # several, where a record written by hand says only H100
    if cards:
        return cards <= names_of_cards(words)
    return words_in(short_name(device)) == words_in(short_name(words))


def require_named(devices: Iterable[str], prices: Prices) -> None:
    """Raise UserError for a price whose name is neither a known GPU nor one of these devices."""
    devices = list(devices)
    for words, dollars in prices:
        if words and not names_of_cards(words) and not any(is_named(device, words) for device in devices):
            raise UserError(f'--dollars_per_gpu_hour {words}={dollars:g}: no record has this GPU, and '
                            f'{unknown_gpu(words)}')


def costs_in_words(prices: Iterable[tuple[str, float]]) -> str:
    """Return in words what an hour costs of GPUs, by their names.

    Such as '$2 a GPU-hour' or 'a GPU-hour $2 for A100 80GB, $3 for H100 80GB'.
    """
    names_at = {}  # of GPUs, by price
    for device, price in dict.fromkeys(prices):
        words = 'no price' if math.isnan(price) else f'${price:g}'
        names_at.setdefault(words, {})[short_name(device)] = None
    if len(names_at) == 1:
        return f'{next(iter(names_at))} a GPU-hour'
    return 'a GPU-hour ' + ', '.join(f'{words} for {" and ".join(names)}' for words, names in names_at.items())
