"""Name the settings that tell the rows of a report apart, and read their values from a record.

They follow from the flags, so a new flag appears in reports by itself. Nothing here needs torch.
"""
import math
from typing import Any

from sdbench.flags.train import ENCODERS, NO_EFFECT_ON_SPEED, SAME_ON_RESUME, SWITCHES
from sdbench.records.versions import PACKAGES
from sdbench.setup import setup_of_record, with_flag_defaults

VERSIONS = ['python', 'cuda', *PACKAGES]
# What a training reads, by the encoders in its loop
INPUTS = {ENCODERS[False]: 'images', ENCODERS[True]: 'latents'}
UNSTATED_NETWORK = 'network not stated'

# The settings in the order of the tables. A measurement of the loader has no model settings, and a measurement has no
# learning settings, which affect only the training result.
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
# The settings of an evaluation. Scores are on one line of a figure only if all of these agree.
EVALUATION_SETTINGS = ['model', 'weights', 'data', 'samples', 'image_size', 'steps', 'caption', 'network',
                       'inception_sha256', 'clip', 'clip_sha256']
# Losses on --eval_remote are ranked and plotted together only if these settings agree: losses on other latents or other
# samples do not compare.
LOSS_SETTINGS = ['image_size', 'input', 'model_name', 'pretrained', *EVAL_DATA]


def known_value(value: Any) -> Any:
    """Return a value of a record, with whole numbers as int; None if it is not known.

    'auto' is not known: it is the microbatch of a run that ended before the search did.
    """
    if value == 'auto' or isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def one_line_of(text: str) -> str:
    """Return a text of a record as one line without control characters, which a terminal would obey."""
    return ' '.join(''.join(char if char.isprintable() else ' ' for char in text).split())


def comparable(value: Any) -> Any:
    """Return the value of a setting in a form that can be compared, with lists as text; None if it is not known."""
    if isinstance(value, (list, tuple, dict)):
        return str([*value]) if value else None
    value = known_value(value)
    return one_line_of(value) if isinstance(value, str) else value


def has_training_result(record: dict) -> bool:
    """Tell whether a record has a training result: a training with --max_duration, not a measurement."""
    by_default = record.get('by_default', ())
    is_measurement = 'max_duration' in by_default or ('max_duration' not in record and 'measure_batches' in record)
    return record['stage'] == 'train' and not is_measurement


def settings_of(record: dict) -> dict[str, Any]:
    """Return the value of each setting of a record; None if it does not state one or if it has no effect on this run.

    A flag that the user left open (`by_default`) is not a setting. `num_nodes` is the number of machines, rounded up.
    `network` connects the machines; it is None on one machine, within one NVLink domain, and if the number of machines
    is not known.
    """
    stated = with_flag_defaults(record) | record.get('versions', {})
    stated['input'] = INPUTS.get(record.get('encoders'), record.get('encoders'))
    stated['num_nodes'] = stated['network'] = None
    if record.get('num_nodes') or record.get('gpus_per_node'):
        setup = setup_of_record(record)
        stated['num_nodes'] = setup.machines
        if setup.needs_network:
            gbits = known_value(setup.network_gbits)
            stated['network'] = UNSTATED_NETWORK if gbits is None else f'{gbits} Gbit/s network'

    # Ignore settings without an effect on this run, because runs that differ only in them have the same setup.
    without_effect = [flag for flag in record.get('by_default', ()) if flag not in LEARNING_SETTINGS]
    if not stated.get('compile'):
        without_effect.append('compile_blocks')
    if not has_training_result(record):
        without_effect += LEARNING_SETTINGS
    if record['stage'] == 'loader':
        without_effect += MODEL_SETTINGS
    return {key: None if key in without_effect else comparable(stated.get(key)) for key in (*SETTINGS, 'num_nodes')}
