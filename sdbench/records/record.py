"""Write the record of a run, one line of JSON: what it was told, what was found, and what follows from these."""
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
from typing import Any

import torch
from composer.utils import dist
from composer.utils.collect_env import get_cpu_model

from sdbench.errors import DataError, redacted
from sdbench.flags.train import DataLoading
from sdbench.gpus import machines_for, peak_of
from sdbench.records.versions import git_commit, package_versions


def make_record(stage: str, settings: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a run: when, what and where, all flags, what was found, and what follows from these.

    Args:
        stage: `train`, `loader`, `encode` or `evaluate`.
        settings: of the command. Passwords and the like are left out.
        found: its figures, by the keys that docs/measuring.md explains, and what else the run says: of one that has
            ended, its `status`. It counts where a flag or a line below has the same name.
    """
    # when, how and where
    on_gpu = torch.cuda.is_available()
    record = {
        'stage': stage,
        'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'command': shlex.join(map(redacted, sys.argv)),
        'git_commit': git_commit(),
        'device': torch.cuda.get_device_name() if on_gpu else processor_name(),
        'device_type': 'cuda' if on_gpu else 'cpu',
        'num_devices': dist.get_world_size(),
        'num_nodes': machines_for(dist.get_world_size(), dist.get_local_world_size()),
        'versions': {'python': platform.python_version(), 'cuda': torch.version.cuda if on_gpu else None,
                     **package_versions()},
    }

    # what it was told, and what was found
    for field in dataclasses.fields(settings):
        record[field.name] = as_json_has_it(getattr(settings, field.name))
    if isinstance(settings, DataLoading):
        record['dataset'] = 'streaming' if settings.remote else 'synthetic'
    record |= found

    # what follows from a speed: that of each device, its arithmetic, and the share of the peak
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


def as_json_has_it(value: Any) -> Any:
    """Return the value of a flag with lists for tuples, and without passwords."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, tuple):
        return [as_json_has_it(item) for item in value]
    return value


def processor_name() -> str:
    """Return the model name of the CPU, or its architecture where it has none.

    It takes a second, once for this program and Composer.
    """
    name = get_cpu_model()
    return platform.machine() if name == 'CPU' else name


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
