"""The command that trains on what another has just made, so that it runs as it is printed."""
import shlex

import torch

LARGEST_BATCH = 2048  # the benchmark's own


def training_command(remote: str, samples: int, flags: list[str] = ()) -> str:
    """A training on `samples` samples at `remote`, of the size of this machine, with `flags` for the model.

    Without a GPU it is the tiny model, unless `flags` name another.
    """
    batch_size = min(LARGEST_BATCH, 1 << (samples.bit_length() - 1))
    gpus = torch.cuda.device_count()
    if gpus:
        batch_size = batch_size // gpus * gpus or gpus  # that they can share
    launcher = ['composer']
    if not torch.cuda.is_available():
        launcher += ['-n', '1']
        if '--model_name' not in flags:
            flags = ['--model_name', 'tiny', '--image_size', '64', *flags]
    return shlex.join([*launcher, 'benchmark.py', '--remote', remote, '--use_ema', '--batch_size', str(batch_size),
                       *flags])
