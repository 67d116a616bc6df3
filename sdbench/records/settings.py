"""Describe the setup of a record: the settings that decide its speed, and the command that forecasts the same setup.

Reports, plans and summaries use these functions to decide whether two records have the same setup. Nothing here needs
torch.
"""
import json
import math
from dataclasses import fields
from typing import Any

from sdbench.flags.train import ENCODERS, NO_EFFECT_ON_SPEED, SAME_ON_RESUME, SWITCHES, Train
from sdbench.gpus import is_one_nvlink_domain, machines_for
from sdbench.records.versions import PACKAGES

VERSIONS = ['python', 'cuda', *PACKAGES]
# What a training reads, by the encoders in its loop
INPUTS = {ENCODERS[False]: 'images', ENCODERS[True]: 'latents'}
UNSTATED_NETWORK = 'network not stated'

# The settings in the order of the tables. A measurement of the loader has no model settings, and measurements and
# forecasts have no learning settings, which affect only the training result.
LOADER_SETTINGS = ['stage', 'program', 'device', 'image_size', 'input', 'dataset', 'batch_size']
DATA_FLAGS = ['use_synth_data', 'use_synth_latents']  # the settings `dataset` and `input` follow from them
MODEL_FLAGS = ['model_name', *SWITCHES]
LEARNING_SETTINGS = []
for field in SAME_ON_RESUME:
    if field.name in NO_EFFECT_ON_SPEED:
        LEARNING_SETTINGS.append(field.name)
    elif field.name not in (*LOADER_SETTINGS, *MODEL_FLAGS, *DATA_FLAGS):
        MODEL_FLAGS.append(field.name)
MODEL_SETTINGS = [*MODEL_FLAGS, 'network']
EVAL_DATA = ['eval_remote', 'eval_sha256']  # the held-out data, and the hash of their index.json
LEARNING_SETTINGS += ['max_duration', 'load_weights', 'remote', *EVAL_DATA]
SPEED_SETTINGS = [*LOADER_SETTINGS, *MODEL_SETTINGS, 'num_workers', *VERSIONS]
SETTINGS = [*SPEED_SETTINGS, *LEARNING_SETTINGS]


def known_value(value: Any) -> Any:
    """Return a value of a record, with whole numbers as int; None if it is not known.

    'auto' is not known: it is the microbatch of a run that ended before the search did.
    """
    if value == 'auto' or isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def text_of(value: Any) -> str:
    """Return a value of a record as one line of text, without control characters, which a terminal would obey."""
    if value is None or value == []:
        return ''
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    return ' '.join(''.join(char if char.isprintable() else ' ' for char in str(value)).split())


# The default of each flag, in the form that records store it. Records of older versions lack newer flags.
DEFAULTS = {}
for field in fields(Train):
    if field.name in SETTINGS and known_value(field.default) is not None:
        DEFAULTS[field.name] = known_value(json.loads(json.dumps(field.default)))


def has_training_result(record: dict) -> bool:
    """Tell whether a record has a training result: a training with --max_duration, not a measurement."""
    by_default = record.get('by_default', ())
    is_measurement = 'max_duration' in by_default or ('max_duration' not in record and 'measure_batches' in record)
    return record['stage'] == 'train' and not is_measurement


def setup_of(record: dict) -> dict[str, str]:
    """Return the settings of a record as text; '' if the record does not state one or if it has no effect on this run.

    A record that a command has written states every flag, so a flag that it lacks had its default. A flag that the user
    left open (`by_default`) is not a setting. `num_nodes` is the number of machines, rounded up. `network` connects the
    machines; it is '' on one machine, within one NVLink domain, and if the number of machines is not known.

    Args:
        record: values as `known_value` returns them, with `stage`, `status` and `device` among them.
    """
    if record['stage'] == 'train' and 'command' in record:
        record = DEFAULTS | record
    stated = record | record.get('versions', {})
    stated['input'] = INPUTS.get(record.get('encoders'), record.get('encoders'))

    # Gradients travel over a network only between machines that NVLink does not connect.
    nodes = record.get('num_nodes')
    if record.get('gpus_per_node') and 'num_devices' in record:
        nodes = machines_for(record['num_devices'], record['gpus_per_node'])
    stated['num_nodes'] = nodes
    stated['network'] = None
    if nodes and nodes > 1 and not is_one_nvlink_domain(record['device'], record['num_devices']):
        gbits = record.get('network_gbits')
        stated['network'] = UNSTATED_NETWORK if gbits is None else f'{gbits} Gbit/s network'

    # Ignore settings without an effect on this run, because runs that differ only in them have the same setup.
    without_effect = [flag for flag in record.get('by_default', ()) if flag not in LEARNING_SETTINGS]
    if not record.get('compile'):
        without_effect.append('compile_blocks')
    if not has_training_result(record):
        without_effect += LEARNING_SETTINGS
    if record['stage'] == 'loader':
        without_effect += MODEL_SETTINGS
    return {key: '' if key in without_effect else text_of(stated.get(key)) for key in (*SETTINGS, 'num_nodes')}
