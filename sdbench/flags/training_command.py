"""Suggest the command that trains on a dataset, as convert.py and encode.py print it. Nothing here needs torch."""
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from sdbench.flags.train import BATCH_SIZE, TINY_MODEL

FEWEST_SAMPLES = 10_000  # from which a model learns from random weights; of fewer, one that is trained already


def training_command(out: str, samples: int, model_name: str, pretrained: bool, flags: Sequence[str] = ()) -> str:
    """Return the command that trains on a dataset: from random weights on many samples, from trained ones on few."""
    # the data and the model
    command = ['composer', 'benchmark.py', '--remote', out, '--model_name', model_name]
    if pretrained:
        command.append('--pretrained')

    # length, batch and learning rate, by the number of samples and the model
    unet = Path(model_name, 'unet')
    has_weights = any(unet.glob('diffusion_pytorch_model*')) if unet.is_dir() else model_name != TINY_MODEL
    if pretrained and has_weights and samples < FEWEST_SAMPLES:
        command += ['--load_weights', model_name, '--learning_rate', '1e-5']  # which changes trained weights gently
    else:
        # without an average the loss jumps from one evaluation to the next
        command += ['--use_ema', '--learning_rate', '1e-3' if model_name == TINY_MODEL else '1e-4']
    if samples < FEWEST_SAMPLES:
        batch_size = min(16, power_of_two(samples))
        command += ['--max_duration', '2000ba']
    else:
        batch_size = min(BATCH_SIZE, power_of_two(samples // 100))  # an epoch has a hundred batches at least
        command += ['--ema_half_life', '1ep', '--max_duration', '10ep']
    if batch_size != BATCH_SIZE:
        command += ['--batch_size', str(batch_size)]

    # the checkpoints
    save_folder = f'{os.path.basename(out.rstrip("/"))}-checkpoints'
    return shlex.join([*command, *flags, '--caption_drop', '0.1', '--save_folder', save_folder, '--autoresume'])


def power_of_two(number: int) -> int:
    """Return the largest power of two that is no larger than a number from 1 on."""
    return 1 << (number.bit_length() - 1)
