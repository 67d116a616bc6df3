"""Suggest the command that trains on a dataset, for convert.py and for warnings. Nothing here needs torch.

Below FEWEST_FROM_RANDOM images the command fine-tunes a trained model. Otherwise it trains from random weights.
"""
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sdbench.errors import plural
from sdbench.flags.times import to_batches
from sdbench.flags.train import BATCH_SIZE, TINY_MODEL, Run, power_of_two

FINE_TUNED = 'sd15'  # folder into which docs/photographs.md downloads a trained model
# ImageNet, with 1.28 million images, is the smallest dataset on which diffusion models of this size are usually trained
# from random weights.
FEWEST_FROM_RANDOM = 1_000_000  # images
FEWEST_STEPS = 10_000  # optimizer steps; with fewer, random weights do not learn to generate images
FEWEST_FOR_WHOLE_MODEL = 300  # images; fewer are usually trained as a LoRA
# Compiling takes a few minutes. Training on this many images takes half an hour or more on any GPU so far, a third of
# which the compiler saves by the forecast.
FEWEST_COMPILED = 100_000  # images seen


class Recipe(NamedTuple):
    batch_size: int
    batches: int
    learning_rate: str

    @property
    def images_seen(self) -> int:
        """The number of images that the training sees, counting repetitions."""
        return self.batch_size * self.batches


def fine_tuning_recipe(samples: int) -> Recipe:
    """Return the recipe for fine-tuning a trained model on this many images. The number of images seen decides it.

    Each image is seen 50 times, as in diffusers' example for text to image, which trains 15,000 steps of 4 images on
    1,221 images. At least 400 images are seen, as in diffusers' example for DreamBooth on five images. Above 10,000
    images each image is seen less often, down to 10 times, as in Waifu Diffusion 1.3 (680,000 images).

    The batch grows from 1 to 16 where at least 1,000 steps remain. The learning rates are those of the same two
    examples: 5e-6 for DreamBooth with a batch of 1, and 1e-5 with a batch of 4.
    """
    seen = max(400, min(50 * samples, max(500_000, 10 * samples)))
    batch_size = min(16, power_of_two(seen // 1000))
    return Recipe(batch_size, math.ceil(seen / batch_size), '1e-5' if batch_size >= 4 else '5e-6')


def random_weights_recipe(samples: int, is_tiny: bool = False) -> Recipe:
    """Return the recipe for training random weights: ten epochs, with 1,000 batches each for a large dataset."""
    largest, batches, learning_rate = (16, 2000, '1e-3') if is_tiny else (BATCH_SIZE, FEWEST_STEPS, '1e-4')
    batch_size = min(largest, max(16, power_of_two(samples // 1000)), power_of_two(samples))
    return Recipe(batch_size, max(batches, math.ceil(10 * samples / batch_size)), learning_rate)


def training_command(out: str, samples: int, model_name: str, pretrained: bool, flags: Sequence[str] = ()) -> str:
    """Return the command that trains on the dataset in `out`, with additional `flags`.

    It is for one GPU, unless it trains a large model from random weights. `pretrained` tells whether the VAE and the
    text encoder have trained weights.
    """
    # Choose the launcher, the initial weights and the flags that suit them. One GPU needs no launcher, which would end
    # a run 30 seconds after Ctrl-C, even while it saves a checkpoint. FINE_TUNED may still be downloading, so it is
    # assumed to have trained UNet weights, as is a model that is not on this machine.
    is_tiny = model_name == TINY_MODEL
    unet = Path(model_name, 'unet')
    has_unet = model_name == FINE_TUNED or not unet.is_dir() or any(unet.glob('diffusion_pytorch_model*'))
    launcher = 'python'
    if pretrained and not is_tiny and has_unet and samples < FEWEST_FROM_RANDOM:
        recipe = fine_tuning_recipe(samples)
        chosen = ['--load_weights', model_name, '--clip_grad_norm', '1']  # both examples of diffusers clip to 1
    else:
        recipe = random_weights_recipe(samples, is_tiny)
        chosen = ['--use_ema']
        if not is_tiny:
            launcher = 'composer'
    if not is_tiny and recipe.images_seen >= FEWEST_COMPILED:
        chosen.append('--compile')

    command = [launcher, 'benchmark.py', '--remote', out, '--model_name', model_name]
    if pretrained:
        command.append('--pretrained')
    command += [*chosen, '--learning_rate', recipe.learning_rate, '--batch_size', str(recipe.batch_size),
                '--max_duration', f'{recipe.batches}ba', *flags, '--caption_drop', '0.1']

    # Keep checkpoints in a folder for this dataset and model, and generate images if a trained VAE can decode them.
    save_folder = '-'.join(os.path.basename(path.rstrip('/')) for path in (out, model_name))
    command += ['--save_folder', save_folder, '--save_num_checkpoints_to_keep', '2', '--autoresume']
    if pretrained:
        command += ['--sample_prompts', 'prompts.txt']
    return shlex.join(command)


def forecast_command(command: str, samples: int) -> str:
    """Return a training command with the flags that forecast its time and cost, for one GPU or for eight."""
    flags = '--dry_run 1 --gpu 4090 --dollars_per_gpu_hour 4090=0.69'  # an example; no list here has its price
    if samples >= FEWEST_FROM_RANDOM:
        flags = '--dry_run 8 --gpu H100-80GB'
    _, _, arguments = command.partition(' ')  # without its launcher
    return f'python {arguments} {flags}'


def trains_random_weights(run: Run) -> bool:
    """Tell whether a run trains random weights on a dataset. The tiny model is only for trials and does not count."""
    return bool(run.remote and not run.measures and not run.load_weights and run.model_name != TINY_MODEL)


def caution_about_steps(run: Run, samples: int) -> str | None:
    """Return a warning if a training has too few steps for random weights, with what to do instead, or else None."""
    steps = to_batches(run.max_duration)
    if not trains_random_weights(run) or steps >= FEWEST_STEPS:
        return None
    remedy = 'use a smaller --batch_size, or a longer --max_duration'
    if samples < FEWEST_FROM_RANDOM:
        remedy = f'{fine_tune_instead(run, samples)}; or {remedy}'
    return (f'{plural(steps, "optimizer step")} will not teach a model with random weights to generate images, which '
            f'takes {FEWEST_STEPS:,} or more; {remedy}')


def fine_tune_instead(run: Run, samples: int) -> str:
    command = training_command(run.remote, samples, FINE_TUNED, True)
    return f'fine-tune a trained model instead (docs/photographs.md): {command}'
