"""The record of a run, one line of JSON: what explains its figures, how it is kept, and its summary for people."""
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch
from composer.core import DataSpec
from composer.utils import dist
from composer.utils.collect_env import get_cpu_model

from sdbench.costs import days_to_train, gpu_hours, price_of
from sdbench.errors import DataError, plural, redacted
from sdbench.flags.times import is_young, to_batches
from sdbench.flags.train import LOADER_FLAGS, TRAINING_FLAGS, Train
from sdbench.inputs.loader import default_workers
from sdbench.measuring.clock import loader_figures
from sdbench.measuring.figures import OF_A_MEASUREMENT, OF_A_TRAINING, summary_lines
from sdbench.measuring.reliability import remedy, why_unreliable
from sdbench.measuring.versions import git_commit, package_versions
from sdbench.paths import sibling_path

# two kinds of `status`, of runs that no report counts
UNMEASURED = 'unmeasured'  # the run is over, and has no speed
PROFILED = 'profiled'  # the run was traced: its speed is that of a run with a profiler
MUCH_WAITING_FOR_DATA = 0.05


def training_settings(settings: Train, latents: bool, microbatch: int | None = None) -> dict:
    """Return what explains the figures of benchmark.py: when, what, where, and every setting that bears on speed.

    Args:
        settings: of the run.
        latents: whether the run is on latents, so that only the text encoder is in its loop.
        microbatch: the one that was found, where the settings leave it to a search.
    """
    # the flags, as JSON has them and without passwords
    values = dataclasses.asdict(settings)
    values['adam_betas'] = list(settings.adam_betas)
    for flag in ('load_weights', 'eval_remote'):
        if values[flag] is not None:
            values[flag] = redacted(values[flag])
    if microbatch is not None:
        values['device_train_microbatch_size'] = microbatch

    # those of the stage, and what follows from them
    if settings.loader_only:
        stated = run_metadata('loader', values, LOADER_FLAGS)
    else:
        stated = run_metadata('train', values, TRAINING_FLAGS)
    return stated | {
        'num_workers_by_default': settings.num_workers == default_workers(settings),
        'dataset': 'streaming' if settings.remote else 'synthetic',
        'encoders': 'text_in_loop' if latents else 'in_loop',
    }


def run_metadata(stage: str, values: dict[str, Any], flags: Sequence[str]) -> dict:
    """Return what every record says: when, what and where, the libraries, and the `values` of these `flags`."""
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
        'versions': {'python': platform.python_version(),
                     'cuda': torch.version.cuda if torch.cuda.is_available() else None, **package_versions()},
    }


def processor_name() -> str:
    """Return the model name of the CPU, or its architecture where it has none.

    It takes a second, once for this program and Composer.
    """
    name = get_cpu_model()
    return platform.machine() if name == 'CPU' else name


def run_summary(record: dict, settings: Train) -> str:
    """Write the record of a run for people, with three significant digits or whole units."""
    keys = OF_A_MEASUREMENT if settings.measures else OF_A_TRAINING
    values = record | notes_on_training(record, settings) | notes_on_speed(record, settings)
    return '\n'.join(summary_lines(keys, values))


def notes_on_training(record: dict, settings: Train) -> dict[str, Any]:
    """Return what a summary adds to the record on what was trained: how far, and where it is."""
    notes = {}
    if record['trained_epochs']:
        notes['whole_epochs'] = record['trained_epochs']
    if record['first_batch']:
        notes['resumed_after'] = record['first_batch']
    if settings.sample_prompts and os.path.isdir(settings.sample_folder):
        notes['sample_folder'] = settings.sample_folder

    # the average, which export.py exports unless it is too young
    export_flags = ''
    trained = record['trained_batches']
    if settings.ema_start and trained < to_batches(settings.ema_start):
        notes['ema_start_to_come'] = settings.ema_start
    elif is_young(settings.ema_half_life, trained):
        notes['young_half_life'] = settings.ema_half_life
        export_flags = ' --live'

    # the checkpoints, and how they become a pipeline
    if settings.save_folder and record['status'] not in ('failed', 'interrupted'):
        if record['encoders'] == 'text_in_loop':  # no VAE is in the checkpoints
            model = settings.model_name if settings.pretrained else 'FOLDER'
            export_flags += f' --model_name {model} --pretrained'
        notes['save_folder'] = settings.save_folder
        notes['pipeline'] = sibling_path(settings.save_folder, 'model')
        notes['export_flags'] = export_flags
    return notes


def notes_on_speed(record: dict, settings: Train) -> dict[str, Any]:
    """Return what a summary adds to the record on its speed: whether to trust it, and what a training would cost."""
    if not record['images_per_sec']:
        return {'why_no_speed': 'the run was over before the clock started, so that no batch was measured'}
    notes = {'on_waiting': ''}
    if record['data_wait_fraction'] > MUCH_WAITING_FOR_DATA:
        notes['on_waiting'] = '; more --num_workers shorten it, and longer epochs'

    # a caution, or the cost of a whole training
    caution = reliability(record)
    if caution:
        notes['caution'] = caution
    elif settings.training_images and torch.cuda.is_available():
        speed = record['images_per_sec']
        hours = gpu_hours(speed, record['num_devices'], settings.training_images)
        notes['images'] = settings.training_images
        notes['days'] = days_to_train(speed, settings.training_images)
        notes['gpus'] = plural(record['num_devices'], 'GPU')
        notes['gpu_hours'] = hours
        notes['dollars'] = hours * price_of(record['device'], settings.dollars_per_gpu_hour)
    return notes


def reliability(record: dict) -> str | None:
    """Say why these figures should not be trusted yet, and the remedy; None where they can be."""
    if record.get('status') == PROFILED:
        return 'these figures include the cost of the trace, so that no report counts them'
    if why_unreliable(record):
        return f'{why_unreliable(record)}: {remedy(record)}'
    return None


def append_line(line: str, path: str) -> None:
    """Add a line to a file in one write. Raises DataError if it could not be."""
    try:
        content = line.encode() + b'\n'
        with open(path, 'a+b', buffering=0) as file:
            end = file.tell()
            if end and os.pread(file.fileno(), 1, end - 1) != b'\n':  # a full disk has cut the last line
                content = b'\n' + content
            file.write(content)
    except OSError as error:
        raise DataError(f'--results {path} could not be written: {error.strerror}; see the record above') from None


def append_record(record: dict, text: str | None, path: str) -> dict:
    """Append the record to `path` on rank 0, print `text`, unless it is None, and where the record is; return it.

    Where `path` is -, the record itself is printed last. So it is where it cannot be kept; then DataError is raised.
    """
    if dist.get_global_rank() != 0:
        return record
    # keep it
    line = json.dumps(record)
    lines = [line]
    try:
        if path != '-':
            append_line(line, path)
            lines = [f'{"record":<15} appended to {path}']

    # show it, also if it could not be kept
    finally:
        if text is not None:
            lines.insert(0, text)
        with contextlib.suppress(OSError):  # a pipe's reader may have died of the same Ctrl-C
            print(*lines, sep='\n', flush=True)
    return record


def measure_loader(settings: Train, data: DataSpec) -> dict:
    """Measure the loader alone, for --loader_only; keep and print the record, and return it."""
    record = training_settings(settings, data.dataloader.dataset.latents) | {'status': 'complete'}
    record |= loader_figures(data, settings.warmup_batches, settings.measure_batches)
    text = f'loader {record["loader_images_per_sec"]:.4g} images/s'
    caution = reliability(record)
    if caution:
        text += f'\ncaution: {caution}'
    return append_record(record, text, settings.results_file)
