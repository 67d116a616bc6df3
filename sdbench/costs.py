"""Convert images per second to days, GPU-hours and dollars, without torch."""
import math
from collections.abc import Collection, Iterable, Sequence

from sdbench.errors import UserError
from sdbench.gpus import CARDS, gpus_named, short_name, unknown_gpu

TRAINING_IMAGES = 2_867_200_000  # 1,400,000 steps of 2048 images: Stable Diffusion 2 base, as published
DOLLARS_PER_GPU_HOUR = 2.0
SECONDS_PER_DAY = 86_400

Prices = tuple[tuple[str | None, float], ...]  # (GPU name, or None for all GPUs; dollars per GPU-hour) of each price


def days_to_train(images_per_sec: float, num_images: int) -> float:
    """Return the days that training on `num_images` takes at `images_per_sec`, the throughput of all devices."""
    return num_images / images_per_sec / SECONDS_PER_DAY


def gpu_hours(images_per_sec: float, num_devices: int, num_images: int) -> float:
    """Return the GPU-hours that training on `num_images` takes at `images_per_sec`, the throughput of all devices."""
    return days_to_train(images_per_sec, num_images) * 24 * num_devices


def last_price(device: str, prices: Sequence[tuple]) -> tuple | None:
    """Return the last price that applies to a GPU; None if there is none.

    A price begins with a GPU name, or None for all GPUs, and the dollars per GPU-hour. It applies to each GPU that its
    name means. `device` is the name in a record: a hand-written record may say just H100, which means several GPUs, and
    then the price must apply to all of them.
    """
    for price in reversed(prices):
        if price[0] is None or gpus_named(device) <= gpus_named(price[0]):
            return price
    return None


def price_of(device: str, prices: Prices) -> float:
    """Return the dollars per GPU-hour of a GPU; NaN if there are prices, but none for it.

    Without any prices, every GPU costs DOLLARS_PER_GPU_HOUR.
    """
    if not prices:
        return DOLLARS_PER_GPU_HOUR
    price = last_price(device, prices)
    return math.nan if price is None else price[1]


def cost_of(record: dict, prices: Prices) -> float:
    """Return the dollars of the GPU-hours that a record of a training states; NaN if one of its GPUs has no price."""
    return sum(float(hours) * price_of(device, prices) for device, hours in hours_by_device(record).items())


def hours_by_device(record: dict) -> dict[str, float]:
    """Return the GPU-hours in a record of a training by the name of the GPU. Earlier versions recorded only a sum."""
    return record.get('gpu_hours_by_device') or {record['device']: record['gpu_hours']}


def require_named(devices: Collection[str], prices: Prices) -> None:
    """Raise UserError for a price whose name means neither a known GPU nor one of these devices of records."""
    known = frozenset(CARDS).union(*map(gpus_named, devices))
    for name, dollars in prices:
        if name is not None and known.isdisjoint(gpus_named(name)):
            no_record = 'no record has this GPU, and ' if devices else ''
            raise UserError(f'--dollars_per_gpu_hour {name}={dollars:g}: {no_record}{unknown_gpu(name)}')


def describe_prices(prices: Iterable[tuple[str, float]]) -> str:
    """Return the prices per GPU-hour as text, from pairs of a GPU name and its price.

    Examples are '$2 per GPU-hour for every GPU' and 'A100 80GB $2, H100 80GB $3.50 per GPU-hour'.
    """
    dollars = {}
    for device, price in prices:
        dollars[short_name(device)] = 'no price' if math.isnan(price) else f'${price:.2f}'.removesuffix('.00')
    if len(set(dollars.values())) > 1:
        return ', '.join(f'{name} {price}' for name, price in dollars.items()) + ' per GPU-hour'
    price = next(iter(dollars.values()))
    return f'{price} per GPU-hour' + (' for every GPU' if len(dollars) > 1 else '')
