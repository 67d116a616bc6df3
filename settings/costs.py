"""From images per second to days, GPU-hours and dollars: arithmetic alone, which report.py does without torch."""

from dataclasses import dataclass
from typing import NamedTuple

TRAINING_IMAGES = 2_867_200_000  # 1,400,000 steps of 2048 images: Stable Diffusion 2 base, as published
DATASET_IMAGES = 2_900_000_000
DOLLARS_PER_GPU_HOUR = 2.0
DOLLARS_PER_TB_MONTH = 23.0  # the list price of Amazon S3
SECONDS_PER_DAY = 86_400
DAYS_PER_MONTH = 365 / 12


@dataclass(frozen=True)
class Assumptions:
    """What days and dollars rest on besides the throughput."""
    training_images: int = TRAINING_IMAGES
    dataset_images: int = DATASET_IMAGES                # that an encoding goes through once, and the cache holds
    dollars_per_gpu_hour: float = DOLLARS_PER_GPU_HOUR
    dollars_per_tb_month: float = DOLLARS_PER_TB_MONTH  # of storing latents
    image_bytes: float = 0                              # stored bytes of an average sample; 0: not known
    counts_tiny: bool = False                           # whether the model tiny has days and dollars, too


class Phase(NamedTuple):
    """A phase of a plan."""
    images: int
    size: str  # of a side, in pixels


def days_to_train(images_per_sec: float, num_images: int = TRAINING_IMAGES) -> float:
    """Days of 24 hours that `num_images` take at `images_per_sec` over all devices."""
    return num_images / images_per_sec / SECONDS_PER_DAY


def gpu_hours(images_per_sec: float, num_devices: int, num_images: int = TRAINING_IMAGES) -> float:
    """Hours of all devices together."""
    return days_to_train(images_per_sec, num_images) * 24 * num_devices
