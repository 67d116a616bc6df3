"""The record of a run, one line of JSON: what explains its figures, how it is kept, and its summary for people."""
import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer.utils import dist
from composer.utils.collect_env import get_cpu_model

from inputs.words import counted
from measuring.caution import FEWEST_BATCHES, MUCH_DRIFT, QUEUES_IN_WINDOW, doubt, load_of_others
from settings.costs import days_to_train, gpu_hours
from measuring.measurement import EXCLUDED
from measuring.tracing import PROFILED
from settings.versions import git_commit, package_versions
from settings.train import LOADER_FLAGS, TRAINING_FLAGS, Train

# such as ;AccountKey=... in a connection string of Azure
SECRET_SETTING = re.compile(r"\b(\w*(?:key|secret|password|token|signature|credential))=[^;&\s'\"]+", re.IGNORECASE)
UNMEASURED = 'unmeasured'  # the status of a run that is over and has no speed: no report counts it
MUCH_WAITING = 0.05


class ResultsError(ValueError):
    """The record could not be kept."""


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
        return f'no batch was measured: the run was {end} within --warmup_batches {record["warmup_batches"]}'
    devices = record['num_devices']
    share_of_peak = 'peak of this device not known'
    if record['mfu']:
        share_of_peak = f'{record["mfu"]:.1%} of the peak'
    caution = caution_sentence(record)
    rows = {
        'images/s': f'{record["images_per_sec"]:.4g} on {devices} x {record["device"]}, '
                    f'{record["images_per_sec_per_device"]:.4g} each',
        'batch': f'{record["batch_seconds_median"]:.3g} s median of {record["measured_batches"]}, 10th to 90th '
                 f'percentile {record["batch_seconds_p10"]:.3g} to {record["batch_seconds_p90"]:.3g} s',
        'drift': drift_sentence(record, has_remedy=caution is None),
        'wait for data': wait_sentence(record, has_remedy=caution is None),
        'peak memory': f'{record["peak_memory_gib"]:.3g} GiB, microbatch {record["device_train_microbatch_size"]}',
        'arithmetic': f'{record["tflops_per_sec_per_device"]:.3g} TFLOP/s each, {share_of_peak}',
        'trained': trained_sentence(record),
    }
    if caution:
        rows['caution'] = caution
    if record.get('eval_loss') is not None:
        rows['held-out loss'] = f'{record["eval_loss"]:.4g} after batch {record["eval_batch"]:,}'
    for name in EXCLUDED:
        if record[f'{name}_seconds'] >= 1:
            rows[name] = f'{record[f"{name}_seconds"]:,.0f} s beside the batches, in no other figure'
    if num_images and (caution or doubt(record)):
        rows['full training'] = f'not worked out from a speed to mistrust: see {"caution" if caution else "drift"}'
    elif num_images:
        rows['full training'] = cost_sentence(record, num_images, dollars_per_gpu_hour)
    return '\n'.join(f'{name:<15} {text}' for name, text in rows.items())


def drift_sentence(record: dict, has_remedy: bool = True) -> str:
    """How the speed changed within the window, and what to do where it has not settled. Where the record has a caution,
    that says what to do."""
    drift = record['drift']
    if drift is None:
        return 'too few batches to tell'
    sentence = f'{drift:+.1%} in speed from the first to the last third'
    if not has_remedy:
        return sentence
    if drift > MUCH_DRIFT:
        sentence += ': the start was slow; use more --warmup_batches'
    elif drift < -MUCH_DRIFT and record['measure_batches'] is None:  # the window is the rest of the run
        sentence += ': it has not settled; use a longer --max_duration'
    elif drift < -MUCH_DRIFT:
        sentence += ': it has not settled; use more --measure_batches'
    return sentence


def wait_sentence(record: dict, has_remedy: bool = True) -> str:
    """How long the run waited for its loader, and what to do where that is much. Where the record has a caution, the
    wait may not be the loader's, and the caution says what to do."""
    sentence = f'{record["data_wait_fraction"]:.1%} of the time'
    if record['data_wait_fraction'] <= MUCH_WAITING or not has_remedy:
        return sentence
    workers = record['num_workers'] * record['num_devices'] // record['num_nodes']  # of this machine
    remedies = []
    if workers < len(os.sched_getaffinity(0)):
        remedies.append('more --num_workers')
    if record['encoders'] == 'in_loop':
        remedies += ['smaller images', 'or latents (encode.py)']
    if not remedies:
        return f'{sentence}; its {counted(workers, "worker")} have all cores of this machine'
    return f'{sentence}; use {", ".join(remedies)}'


def trained_sentence(record: dict) -> str:
    """How much was trained in all, and the loss."""
    sentence = counted(record['trained_batches'], 'batch', 'batches')
    if record['trained_epochs']:
        sentence += ', ' + counted(record['trained_epochs'], 'whole epoch', 'whole epochs')
    if record['first_batch']:
        sentence += f', {record["first_batch"]:,} of them before this run resumed'
    if record['loss_mean'] is not None:
        sentence += f'; loss {record["loss"]:.3g}, mean of the measured batches {record["loss_mean"]:.3g}'
    return sentence


def caution_sentence(record: dict) -> str | None:
    """Why these figures should not be trusted yet, and the remedy; None where they can be."""
    if record.get('status') == PROFILED:
        return 'these figures include the cost of the trace, so that no report counts them'
    batches = record['measured_batches']
    least_window = QUEUES_IN_WINDOW * record.get('queue_batches', 0)
    if batches < least_window:
        return (f'{record["queue_batches"]} batches had been loaded before the clock started, and so few show these, '
                f'not the loader; {longer_window(least_window)}')
    if batches < FEWEST_BATCHES:
        few = counted(batches, 'measured batch', 'measured batches')
        return f'only {few}, too few to rely on; {longer_window(FEWEST_BATCHES)}'
    others = load_of_others(record)
    if others:
        return f'{others}; these figures are of a busy machine: measure again without them'
    return None


def longer_window(batches: int) -> str:
    """How to measure that many."""
    return f'use --measure_batches {batches} or more, and where --max_duration is given, a longer one'


def cost_sentence(record: dict, num_images: int, dollars_per_gpu_hour: float) -> str:
    """What training on `num_images` would take at this speed; a CPU has no price."""
    days = days_to_train(record['images_per_sec'], num_images)
    sentence = f'training on {num_images:,} images would take {days:,.1f} days on '
    if not torch.cuda.is_available():
        return sentence + 'this CPU'
    devices = record['num_devices']
    hours = gpu_hours(record['images_per_sec'], devices, num_images)
    place = f'these {devices} GPUs' if devices > 1 else 'this GPU'
    return sentence + f'{place}, {hours:,.0f} GPU-hours, ${hours * dollars_per_gpu_hour:,.0f}'


def append(line: str, path: str) -> None:
    """Add a line to a file, whole also when others do so at once. Raises ResultsError if it could not be."""
    try:
        with open(path, 'a+b', buffering=0) as file:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            last_byte = file.read(1)
            content = line.encode() + b'\n'
            if last_byte not in (b'', b'\n'):  # a full disk has cut the last line
                content = b'\n' + content
            file.write(content)
    except OSError as error:
        raise ResultsError(f'--results {path} could not be written: {error.strerror}; see the record above') from None


def keep(record: dict, text: str, path: str, save_state: Callable[[], None] | None = None) -> dict:
    """On rank 0: append the record to `path`, call `save_state`, then print `text` and, last, the record.

    On a terminal, where the record would bury the text, its last line says where the record is instead. Each is done
    also where the one before it fails. Raises ResultsError if the record could not be kept.
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
        try:
            if save_state:
                save_state()
        finally:
            print_and_flush(text, last_line)
    return record


def print_and_flush(*lines: str) -> None:
    with contextlib.suppress(OSError):  # a pipe's reader may have died of the same Ctrl-C
        print(*lines, sep='\n', flush=True)
