"""Convert images per second to days, GPU-hours and dollars, without torch."""

TRAINING_IMAGES = 2_867_200_000  # 1,400,000 steps of 2048 images: Stable Diffusion 2 base, as published
DOLLARS_PER_GPU_HOUR = 2.0
SECONDS_PER_DAY = 86_400


def days_to_train(images_per_sec: float, num_images: int) -> float:
    """Return the days of 24 hours that `num_images` take at `images_per_sec` of all devices together."""
    return num_images / images_per_sec / SECONDS_PER_DAY


def gpu_hours(images_per_sec: float, num_devices: int, num_images: int) -> float:
    """Return the hours that `num_images` take at `images_per_sec`, times the devices."""
    return days_to_train(images_per_sec, num_images) * 24 * num_devices
