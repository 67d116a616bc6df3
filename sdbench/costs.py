"""Convert images per second to days, GPU-hours and dollars, without torch."""
from sdbench.gpus import has_words

TRAINING_IMAGES = 2_867_200_000  # 1,400,000 steps of 2048 images: Stable Diffusion 2 base, as published
DOLLARS_PER_GPU_HOUR = 2.0
SECONDS_PER_DAY = 86_400

Prices = tuple[tuple[str | None, float], ...]  # the words of a GPU's name, or None for all GPUs, and dollars an hour


def days_to_train(images_per_sec: float, num_images: int) -> float:
    """Return the days of 24 hours that `num_images` take at `images_per_sec` of all devices together."""
    return num_images / images_per_sec / SECONDS_PER_DAY


def gpu_hours(images_per_sec: float, num_devices: int, num_images: int) -> float:
    """Return the hours that `num_images` take at `images_per_sec`, times the devices."""
    return days_to_train(images_per_sec, num_images) * 24 * num_devices


def price_of(device: str, prices: Prices) -> float:
    """Return the dollars of an hour of a GPU: of the first price that names it, or else of the one for all.

    Args:
        device: the GPU's name, as records have it.
        prices: of --dollars_per_gpu_hour. Without any it is DOLLARS_PER_GPU_HOUR.
    """
    for words, dollars in prices:
        if words is not None and has_words(device, words):
            return dollars
    for words, dollars in prices:
        if words is None:
            return dollars
    return DOLLARS_PER_GPU_HOUR


def prices_in_words(prices: Prices) -> str:
    """Return what --dollars_per_gpu_hour says, such as '$2 a GPU-hour' or '$3 a GPU-hour, H100 $2.5'."""
    named = [f'{words} ${dollars:g}' for words, dollars in prices if words is not None]
    for_all = price_of('', prices)
    return ', '.join([f'${for_all:g} a GPU-hour', *named])


def storage_in_words(nbytes: float) -> str:
    """Return a number of bytes in GB or TB, such as '51.8 TB'."""
    unit, size = ('TB', 1e12) if nbytes >= 1e12 else ('GB', 1e9)
    amount = nbytes / size
    return f'{amount:.3g} {unit}' if amount < 100 else f'{amount:,.0f} {unit}'
