"""Make the record of a run, which is one line of JSON, and append it to a file."""
import contextlib
import dataclasses
import json
import os
import platform
import shlex
import sys
from typing import Any

import torch
from composer.utils import dist
from composer.utils.collect_env import get_cpu_model

from sdbench import process
from sdbench.errors import DataError, redacted
from sdbench.gpus import machines_for, peak_of
from sdbench.records.versions import git_commit, package_versions

# Of the code that this process has loaded: the files may change while it runs
COMMIT = git_commit()
VERSIONS = package_versions()


def make_record(stage: str, settings: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a run: date, command, machine, all flags, results, and metrics calculated from results.

    Args:
        stage: `train`, `loader`, `encode` or `evaluate`.
        settings: flags of the command. Passwords and keys in them are replaced by asterisks.
        found: results of the run, by the keys that docs/record.md explains. They replace values with the same keys.
    """
    on_gpu = torch.cuda.is_available()
    record = {
        'stage': stage,
        'date': process.began_at.isoformat(timespec='seconds'),
        'command': shlex.join(map(redacted, sys.argv)),
        'git_commit': COMMIT,
        'device': torch.cuda.get_device_name() if on_gpu else processor_name(),
        'device_type': 'cuda' if on_gpu else 'cpu',
        'num_devices': dist.get_world_size(),
        'num_nodes': machines_for(dist.get_world_size(), dist.get_local_world_size()),
        'versions': {'python': platform.python_version(), 'cuda': torch.version.cuda if on_gpu else None,
                     **VERSIONS},
    }

    # Results may replace flags: the microbatch that the search found replaces 'auto'.
    for field in dataclasses.fields(settings):
        record[field.name] = json_value(getattr(settings, field.name))
    if stage != 'evaluate':
        record['dataset'] = 'streaming' if settings.remote else 'synthetic'
    record |= found

    # Calculate the speed of each device, and its MFU if the peak of the GPU is known.
    speed = record.get('images_per_sec')
    if 'images_per_sec' in record:
        record['images_per_sec_per_device'] = None if speed is None else speed / record['num_devices']
    if 'tflops_per_image' in record:
        record |= {'tflops_per_sec_per_device': None, 'mfu': None}
        peak = peak_of(record['device'], record.get('precision') or record['encoder_precision'])
        if speed is not None:
            record['tflops_per_sec_per_device'] = record['images_per_sec_per_device'] * record['tflops_per_image']
            if peak is not None:
                record['mfu'] = record['tflops_per_sec_per_device'] / peak
    return record


def json_value(value: Any) -> Any:
    """Return the value of a flag as JSON can store it, with lists for tuples, and without passwords."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, tuple):
        return [json_value(item) for item in value]
    return value


def processor_name() -> str:
    """Return the model name of the CPU, or its architecture if it has no name.

    The first call takes a second. Composer caches the result.
    """
    name = get_cpu_model()
    return platform.machine() if name == 'CPU' else name


def append_line(line: str, path: str) -> None:
    """Append a line to a file in one write, because several runs may share the file. Raises DataError on failure."""
    try:
        content = line.encode() + b'\n'
        with open(path, 'a+b', buffering=0) as file:
            end = file.tell()
            if end and os.pread(file.fileno(), 1, end - 1) != b'\n':  # a full disk cut the last line
                content = b'\n' + content
            file.write(content)
    except OSError as error:
        raise DataError(f'--results {path} could not be written: {error.strerror}; see the record above') from None


def append_record(record: dict, text: str | None, path: str) -> dict:
    """Append a record to the file `path` on rank 0, and print `text` (unless it is None) and where the record is.

    If `path` is - or cannot be written, print the record itself. Returns the record. Raises DataError if `path` cannot
    be written.
    """
    if dist.get_global_rank() != 0:
        return record
    line = json.dumps(record)
    lines = [line]
    try:
        if path != '-':
            append_line(line, path)
            lines = [f'{"record":<15} appended to {path}']
    finally:  # print the result even if the record could not be written
        if text is not None:
            lines.insert(0, text)
        with contextlib.suppress(OSError):  # the program that reads the pipe may have ended at the same Ctrl-C
            print(*lines, sep='\n', flush=True)
    return record
