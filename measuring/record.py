"""The record of a run, one line of JSON: what explains its figures, how it is kept, and its summary for people."""
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import re
import shlex
import string
import sys
from collections.abc import Sequence
from typing import Any

import torch
from composer.core import DataSpec
from composer.utils import dist
from composer.utils.collect_env import get_cpu_model

from inputs.errors import DataError
from inputs.words import counted
from settings.caution import doubt, remedy
from measuring.measurement import EXCLUDED, loader_figures
from measuring.tracing import PROFILED
from settings.costs import days_to_train, gpu_hours
from settings.train import LOADER_FLAGS, TRAINING_FLAGS, Train
from settings.versions import git_commit, package_versions

# such as ;AccountKey=... in a connection string of Azure
SECRET_SETTING = re.compile(r"\b(\w*(?:key|secret|password|token|signature|credential))=[^;&\s'\"]+", re.IGNORECASE)
UNMEASURED = 'unmeasured'  # the status of a run that is over and has no speed: no report counts it
MUCH_WAITING = 0.05
SUMMARY = {  # a line is left out where the record has no value for it
    'images/s': '{images_per_sec:.4g} on {num_devices} x {device}, {images_per_sec_per_device:.4g} each',
    'batch': '{batch_seconds_median:.3g} s median of {measured_batches}, 10th to 90th percentile '
             '{batch_seconds_p10:.3g} to {batch_seconds_p90:.3g} s',
    'drift': '{drift:+.1%} in speed from the first to the last third',
    'wait for data': '{data_wait_fraction:.1%} of the time{on_waiting}',
    'peak memory': '{peak_memory_gib:.3g} GiB, microbatch {device_train_microbatch_size}',
    'arithmetic': '{tflops_per_sec_per_device:.3g} TFLOP/s each',
    'of the peak': '{mfu:.1%}',
    'trained': 'up to batch {trained_batches:,}',
    'epochs': '{trained_epochs:,}',
    'resumed': 'after batch {first_batch:,}',
    'loss': '{loss:.3g}, mean of the measured batches {loss_mean:.3g}',
    'held-out loss': '{eval_loss:.4g} after batch {eval_batch:,}',
    'checkpoint': '{checkpoint_seconds:,.0f} s beside the batches, in no other figure',
    'evaluation': '{evaluation_seconds:,.0f} s beside the batches, in no other figure',
    'sampling': '{sampling_seconds:,.0f} s beside the batches, in no other figure',
    'caution': '{caution}',
    'full training': 'training on {images:,} images would take {days:,.1f} days on {place}{cost}',
}


def training_settings(settings: Train, latents: bool, microbatch: int | None = None) -> dict:
    """What explains the figures of benchmark.py: when, what, where, and every setting that bears on speed.

    Args:
        settings: of the run.
        latents: whether the run is on latents, so that only the text encoder is in its loop.
        microbatch: the one that was found, where the settings leave it to a search.
    """
    values = dataclasses.asdict(settings)
    if settings.loader_only:
        stated = circumstances('loader', values, LOADER_FLAGS)
    else:
        places = {flag: redacted(values[flag] or '') or None for flag in ('load_weights', 'eval_remote')}
        if microbatch is not None:
            values['device_train_microbatch_size'] = microbatch
        stated = circumstances('train', values, TRAINING_FLAGS) | places
        stated['measure_batches'] = settings.measure_batches  # None: to the end of --max_duration
    return stated | {
        'dataset': 'streaming' if settings.remote else 'synthetic',
        'encoders': 'text_in_loop' if latents else 'in_loop',
    }


def circumstances(stage: str, values: dict[str, Any], flags: Sequence[str]) -> dict:
    """The part of a record that a training shares with an encoding, and of the `values` of flags those of `flags`."""
    return {
        'stage': stage,
        'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'command': shlex.join(map(redacted, sys.argv)),
        'git_commit': git_commit(),
        'device': torch.cuda.get_device_name() if torch.cuda.is_available() else processor_name(),
        'device_type': 'cuda' if torch.cuda.is_available() else 'cpu',
        'num_devices': dist.get_world_size(),
        'num_nodes': dist.get_world_size() // dist.get_local_world_size(),
        'model_name': redacted(values['model_name']),
        'image_size': values['image_size'],
        **{flag: values[flag] for flag in flags},
        'num_workers_by_default': values.get('num_workers_by_default'),
        'versions': versions(),
    }


def uses_tf32() -> bool | None:
    """Whether a GPU multiplies float32 numbers as TF32, with 10 bits after the point for 23; None without a GPU.

    Composer allows it, so ask when its Trainer is there.
    """
    if not torch.cuda.is_available():
        return None
    if not torch.cuda.is_tf32_supported():
        return False
    if hasattr(torch.backends.cuda.matmul, 'fp32_precision'):  # torch 2.9 and later raise where both ways are mixed
        return 'tf32' in (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    return torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32


def redacted(text: str) -> str:
    """A text without the passwords, keys and signatures that addresses and connection strings can carry."""
    without_users = re.sub(r'://([^/@:\s]*:\S*|[^/@\s]+)@', '://***@', text)  # a password may hold a /
    without_queries = re.sub(r"\?[^\s']*=[^\s']*", '?***', without_users)
    return re.sub(SECRET_SETTING, r'\1=***', without_queries)


def processor_name() -> str:
    """The model name of the CPU, or its architecture where it has none. It takes a second, once for us and Composer."""
    name = get_cpu_model()
    return platform.machine() if name == 'CPU' else name


def versions() -> dict[str, str | None]:
    """Python, CUDA and the libraries that bear on speed; None where one is not installed."""
    return {'python': platform.python_version(), 'cuda': torch.version.cuda, **package_versions()}


def summary(record: dict, num_images: int | None, dollars_per_gpu_hour: float) -> str:
    """The record of a training for people; three significant digits or whole units.

    Args:
        record: of benchmark.py.
        num_images: of the whole training, for its cost; None leaves that line out.
        dollars_per_gpu_hour: price of one GPU.
    """
    if not record['images_per_sec']:
        end = 'over' if record['status'] == UNMEASURED else record['status']
        return f'no batch was measured: the run was {end} before the clock started'
    values = record | {'caution': caution_sentence(record), 'on_waiting': ''}
    if record['data_wait_fraction'] > MUCH_WAITING:
        values['on_waiting'] = '; more --num_workers shorten it'
        if record['encoders'] == 'in_loop':
            values['on_waiting'] = '; more --num_workers, smaller images or latents (encode.py) shorten it'
    for key in ('trained_epochs', 'first_batch'):
        values[key] = record[key] or None
    for name in EXCLUDED:
        if record[f'{name}_seconds'] < 1:
            values[f'{name}_seconds'] = None
    if num_images and not values['caution']:
        values |= cost_in_words(record, num_images, dollars_per_gpu_hour)
    lines = []
    for name, template in SUMMARY.items():
        keys = [key for _, key, _, _ in string.Formatter().parse(template) if key]
        if all(values.get(key) is not None for key in keys):
            lines.append(f'{name:<15} {template.format_map(values)}')
    return '\n'.join(lines)


def caution_sentence(record: dict) -> str | None:
    """Why these figures should not be trusted yet, and the remedy; None where they can be."""
    if record.get('status') == PROFILED:
        return 'these figures include the cost of the trace, so that no report counts them'
    if doubt(record):
        return f'{doubt(record)}: {remedy(record)}'
    return None


def cost_in_words(record: dict, num_images: int, dollars_per_gpu_hour: float) -> dict[str, Any]:
    """What training on `num_images` would take at this speed, for the summary; a CPU has no price."""
    devices = record['num_devices']
    values = {'images': num_images, 'days': days_to_train(record['images_per_sec'], num_images),
              'place': 'this CPU', 'cost': ''}
    if torch.cuda.is_available():
        hours = gpu_hours(record['images_per_sec'], devices, num_images)
        values['place'] = counted(devices, 'GPU')
        values['cost'] = f', {hours:,.0f} GPU-hours, ${hours * dollars_per_gpu_hour:,.0f}'
    return values


def append(line: str, path: str) -> None:
    """Add a line to a file in one write. Raises DataError if it could not be."""
    try:
        with open(path, 'a+b', buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            last_byte = file.read(1)
            content = line.encode() + b'\n'
            if last_byte not in (b'', b'\n'):  # a full disk has cut the last line
                content = b'\n' + content
            file.write(content)
    except OSError as error:
        raise DataError(f'--results {path} could not be written: {error.strerror}; see the record above') from None


def keep(record: dict, text: str, path: str) -> dict:
    """On rank 0: append the record to `path`, then print `text` and, last, the record.

    On a terminal, where the record would bury the text, its last line says where the record is instead. It is printed
    also where it cannot be kept, for which DataError is raised.
    """
    if dist.get_global_rank() != 0:
        return record
    line = json.dumps(record)
    last_line = line
    try:
        append(line, path)
        if sys.stdout.isatty():
            last_line = f'{"record":<15} appended to {path}'
    finally:
        with contextlib.suppress(OSError):  # a pipe's reader may have died of the same Ctrl-C
            print(text, last_line, sep='\n', flush=True)
    return record


def measure_loader(settings: Train, data: DataSpec) -> dict:
    """The record of --loader_only, which is also kept and printed."""
    record = training_settings(settings, data.dataloader.dataset.latents) | {'status': 'complete'}
    record |= loader_figures(data, settings.warmup_batches, settings.measure_batches)
    text = f'loader {record["loader_images_per_sec"]:.4g} images/s'
    caution = caution_sentence(record)
    if caution:
        text += f'\ncaution: {caution}'
    return keep(record, text, settings.results)
