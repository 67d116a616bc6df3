"""Suggest the command that trains on a dataset, for convert.py and for warnings. Nothing here needs torch.

Below FEWEST_FROM_RANDOM images the command fine-tunes a trained model. Otherwise it trains from random weights.
"""
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from sdbench.costs import days_to_train
from sdbench.errors import plural
from sdbench.flags.times import to_batches
from sdbench.flags.train import BATCH_SIZE, TINY_MODEL, Train
from sdbench.records.figures import format_days

FINE_TUNED = 'sd15'  # folder into which docs/training.md downloads a trained model
# ImageNet, with 1.28 million images, is the smallest dataset on which diffusion models of this size are usually trained
# from random weights.
FEWEST_FROM_RANDOM = 1_000_000  # images
FEWEST_STEPS = 10_000  # optimizer steps; with fewer, random weights do not learn to generate images
FINE_TUNING_BATCH = 16
# Forecast for fine-tuning SD2 base at 512 px with benchmark.py --dry_run 1 --gpu H100-80GB --batch_size 16.
IMAGES_PER_SEC = 50.6
CARD = 'H100 80GB'


def training_command(out: str, samples: int, model_name: str, pretrained: bool, flags: Sequence[str] = ()) -> str:
    """Return the command that trains on a dataset.

    Args:
        out: folder or URL of the dataset, for --remote.
        samples: number of images in the dataset.
        model_name: value for --model_name.
        pretrained: whether the VAE and the text encoder have trained weights.
        flags: additional flags.
    """
    command = ['composer', 'benchmark.py', '--remote', out, '--model_name', model_name]
    if pretrained:
        command.append('--pretrained')

    # Choose initial weights, learning rate, batch size and length, which depend on each other.
    if pretrained and has_unet(model_name) and samples < FEWEST_FROM_RANDOM:
        batch_size, epochs = fine_tuning_length(samples)
        command += ['--load_weights', model_name, '--learning_rate', '1e-5']  # 1e-4 quickly destroys trained weights
    elif model_name == TINY_MODEL:
        batch_size = min(16, power_of_two(samples))
        epochs = epochs_of(samples, batch_size, 10, 2000)
        command += ['--use_ema', '--learning_rate', '1e-3']
    else:
        # A large dataset has 1,000 batches per epoch, so ten epochs have FEWEST_STEPS.
        batch_size = min(BATCH_SIZE, max(16, power_of_two(samples // 1000)), power_of_two(samples))
        epochs = epochs_of(samples, batch_size, 10, FEWEST_STEPS)
        command.append('--use_ema')
    command += ['--batch_size', str(batch_size), '--max_duration', f'{epochs}ep', *flags, '--caption_drop', '0.1']

    # Keep checkpoints, and generate images if there is a VAE that can decode them.
    save_folder = f'{os.path.basename(out.rstrip("/"))}-checkpoints'
    command += ['--save_folder', save_folder, '--save_num_checkpoints_to_keep', '2', '--autoresume']
    if pretrained:
        command += ['--sample_prompts', 'prompts.txt']
    return shlex.join(command)


def fine_tuning_length(samples: int) -> tuple[int, int]:
    """Return the batch size and the number of epochs for fine-tuning a trained model on this many images.

    Each image is seen 50 times, as in diffusers' example (train_text_to_image.py: 15,000 batches of 4 on 1,221 images).
    Above 10,000 images this falls to 10 times, as in Waifu Diffusion 1.3 (680,000 images). A small dataset gets at
    least 1,000 batches, as in DreamBooth, because fewer hardly change a model at this learning rate.
    """
    batch_size = min(FINE_TUNING_BATCH, power_of_two(samples))
    return batch_size, epochs_of(samples, batch_size, min(50, max(10, 500_000 // samples)), 1000)


def epochs_of(samples: int, batch_size: int, epochs: int, fewest_batches: int) -> int:
    """Return `epochs`, or more if that is needed for `fewest_batches`."""
    return max(epochs, math.ceil(fewest_batches / (samples // batch_size)))


def fine_tuning_time(samples: int) -> str:
    """Describe the forecast duration of fine-tuning on one GPU, such as 49 min on one H100 80GB."""
    batch_size, epochs = fine_tuning_length(samples)
    images = samples // batch_size * batch_size * epochs
    return f'{format_days(days_to_train(IMAGES_PER_SEC, images), " days")} on one {CARD}'


def trains_random_weights(settings: Train) -> bool:
    """Tell whether a run trains random weights on a dataset. The tiny model is only for trials and does not count."""
    is_training = settings.max_duration is not None and not settings.measures and not settings.loader_only
    return bool(is_training and settings.remote and not settings.load_weights and settings.model_name != TINY_MODEL)


def caution_about_steps(settings: Train, samples: int) -> str | None:
    """Return a warning if a training has too few steps for random weights, with what to do instead, or else None.

    Args:
        settings: complete settings of the run.
        samples: number of samples in its dataset.
    """
    steps = to_batches(settings.max_duration)
    if not trains_random_weights(settings) or steps >= FEWEST_STEPS:
        return None
    remedy = 'use a smaller --batch_size, or a longer --max_duration'
    if samples < FEWEST_FROM_RANDOM:
        remedy = f'{fine_tune_instead(settings, samples)}; or {remedy}'
    return (f'{plural(steps, "optimizer step")} will not teach a model with random weights to generate images, which '
            f'takes {FEWEST_STEPS:,} or more; {remedy}')


def fine_tune_instead(settings: Train, samples: int) -> str:
    """Return the advice to fine-tune on the same data, with the same model if it has trained weights."""
    is_trained = settings.pretrained and has_unet(settings.model_name)
    command = training_command(settings.remote, samples, settings.model_name if is_trained else FINE_TUNED, True)
    return f'fine-tune a trained model instead (docs/training.md): {command}'


def has_unet(model_name: str) -> bool:
    """Tell whether a model has trained UNet weights. A model that is not on this machine is assumed to have them."""
    unet = Path(model_name, 'unet')
    return any(unet.glob('diffusion_pytorch_model*')) if unet.is_dir() else model_name != TINY_MODEL


def power_of_two(number: int) -> int:
    """Return the largest power of two up to `number`, and 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)
