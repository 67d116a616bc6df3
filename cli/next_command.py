"""The command that trains on what another has just made, so that it runs as it is printed. Nothing here needs torch."""
import os
import shlex

LARGEST_BATCH = 2048  # the benchmark's own


def training_command(remote: str, samples: int, flags: list[str] = ()) -> str:
    """A training on `samples` samples at `remote`, of the size of this machine, with `flags` for the model.

    Without a GPU it is the tiny model, unless `flags` name another.
    """
    batch_size = min(LARGEST_BATCH, 1 << (samples.bit_length() - 1))
    gpus = number_of_gpus()
    command = ['composer', 'benchmark.py']
    if gpus:
        batch_size = batch_size // gpus * gpus or gpus  # that they can share
    else:
        command = ['python', 'benchmark.py']
        if '--model_name' not in flags:
            flags = ['--model_name', 'tiny', '--image_size', '64', *flags]
    return shlex.join([*command, '--remote', remote, '--use_ema', '--batch_size', str(batch_size), *flags])


def number_of_gpus() -> int:
    """NVIDIA's GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible."""
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    if visible is not None:
        return len([device for device in visible.split(',') if device.strip() not in ('', '-1')])
    import pynvml
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:  # no driver
        return 0
