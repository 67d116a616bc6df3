"""Keep in a checkpoint what identifies its training and its model, compare it where it is used, and resume exactly.

A training gets a random id when it starts from random weights or from --load_weights. Its checkpoints carry the id, so
a resume has the same one, and each of its records has it. Records with the same id are one training.

A VAE or text encoder whose weights are in the folder of the model is not in a checkpoint. The checkpoint has its hash
and the name of the model, and a program that loads it takes the weights from there. Random networks exist nowhere else,
so they are in the checkpoint. The text encoder of `tiny` is one of them: its random weights are not the same in each
version of transformers. Checkpoints of earlier versions have all networks, perhaps rounded to half precision.
"""
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from composer import Callback
from composer.utils import dist
from torch.utils.data import Dataset

from sdbench.errors import UserError, redacted
from sdbench.flags.train import SAME_ON_RESUME, Run
from sdbench.inputs.shards import DRAW, IMAGES_HASH, hash_of_images, index_hash
from sdbench.inputs.stream import VerifiedDataset
from sdbench.inputs.tokenizer import hash_of_tokenizer
from sdbench.models.loading import RANDOM, ModelFiles
from sdbench.training.ranks import on_rank_0, print_on_rank_0

# Callbacks whose state is what `kept_in` returns. Earlier versions had several of them.
KEEPERS = ('Measurement', 'Spending', 'IdentityKeeper', 'Safeguard', 'SameRun', 'AtomicCheckpointSaver', 'EndOfBatch')

# Keys in the flags of a checkpoint. Datasets and tokenizers are compared by hash, because they may move.
DATASET = 'dataset'  # hash of the index.json of --remote
DATA = 'data'  # a list with IMAGES_HASH and DRAW of each dataset that the weights were trained on
TOKENIZER = 'tokenizer_sha256'  # the result of `hash_of_tokenizer`

FROZEN = ('vae', 'text_encoder')
EXTRA_STATE = '_extra_state'  # torch's key for the result of `get_extra_state`

# Keys of network configurations that do not change the computation, and keys of schedulers that do: only these affect
# the noise and the target in training.
WITHOUT_EFFECT = {'sample_size', 'dtype', 'torch_dtype', 'architectures', 'transformers_version'}
SCHEDULER_KEYS = ('num_train_timesteps', 'beta_start', 'beta_end', 'beta_schedule', 'trained_betas',
                  'rescale_betas_zero_snr', 'prediction_type')


class Mismatch(UserError):
    """The checkpoint is from another run or model than the one that loads it."""


# The training: its identity and its flags

def kept_in(state: dict) -> dict[str, Any]:
    """Return what benchmark.py keeps in a checkpoint besides weights and moments.

    The keys are `training_id`, `beginning`, `load_weights` and `flags`, as in `facts_to_keep`; `gpu_hours`,
    `gpu_hours_by_device`, `dollars` and `device`; `saved`, the names of checkpoints; `loss`; and the `batch`, `sample`
    and `epoch` that the training has reached. Earlier versions did not keep all of them, and other programs keep only
    the last three.
    """
    timestamp = state.get('timestamp', {}).get('Timestamp', {})
    kept = {unit: timestamp.get(unit) for unit in ('batch', 'sample', 'epoch')}
    for keeper in KEEPERS:
        kept |= dict(state.get('callbacks', ())).get(keeper, {})
    if 'all_saved_checkpoints_to_timestamp' in kept:  # an earlier form of `saved`, with whole paths
        kept['saved'] = [os.path.basename(path) for path, _ in kept.pop('all_saved_checkpoints_to_timestamp')]
    if 'flags' in kept and kept['flags'].get('ema_half_life') is None:  # a default was once only in the EMA
        ema = dict(state.get('algorithms', ())).get('EMA', {})
        kept['flags'] = kept['flags'] | {'ema_half_life': ema.get('half_life')}
    return kept


def with_kept_defaults(settings: Run, before: dict) -> Run:
    """Return the settings of a run in which a default that depends on its length is that of the resumed run.

    A longer --max_duration would otherwise change the half-life of the EMA, and the resume would be refused. `before`
    is from `kept_in`.
    """
    half_life = before.get('flags', {}).get('ema_half_life')
    if half_life and settings.use_ema and 'ema_half_life' in settings.by_default:
        return replace(settings, ema_half_life=half_life)
    return settings


def facts_to_keep(settings: Run, files: ModelFiles, dataset: Dataset, before: dict, data_before: list[dict]
                  ) -> dict[str, Any]:
    """Return what all checkpoints of a training keep: its identity, and the flags that a resume compares.

    The identity is `training_id`, a letter and 11 more random hexadecimal digits; `beginning`, the readable part of its
    name, which is the last part of --save_folder; and `load_weights`, the origin of its first weights without
    passwords, or None.

    `before` is what the checkpoint to resume from has kept, and is empty for a new training. `data_before` are the
    datasets that the weights of --load_weights were trained on.
    """
    # A resumed training keeps its identity. Characters that a folder name should not have become hyphens.
    beginning = os.path.basename(os.path.abspath(settings.save_folder or 'run').rstrip('/'))
    origin = redacted(settings.load_weights) if settings.load_weights else None
    # A spreadsheet would read an id such as 12e345678901 as a number, so it begins with a letter.
    kept = {'training_id': on_rank_0(lambda: secrets.choice('abcdef') + secrets.token_hex(6)[1:]),
            'beginning': re.sub(r'[^\w.-]+', '-', beginning).strip('-.') or 'run', 'load_weights': origin}
    kept |= {key: before[key] for key in kept if key in before}
    if origin and kept['load_weights'] != origin:
        print_on_rank_0(f'warning: --load_weights {origin} has no effect, because this resumes a training from '
                        f'{kept["load_weights"] or "random weights"}')

    # Keep the flags that must be the same on a resume, and the names of model and tokenizer, which export.py looks up.
    flags = {field.name: getattr(settings, field.name) for field in SAME_ON_RESUME}
    flags |= {'model_name': settings.model_name, 'tokenizer': settings.tokenizer, 'remote': None,
              TOKENIZER: hash_of_tokenizer(settings.tokenizer or files.tokenizer), DATA: data_before}
    if settings.remote:  # random images do not count as training data
        flags['remote'] = redacted(settings.remote)
        flags[DATASET] = index_hash(dataset.index)
        flags[DATA] = [*data_before, {IMAGES_HASH: hash_of_images(dataset.index), DRAW: dataset.index.get(DRAW)}]
    if 'flags' in before:
        flags[DATA] = data_of(before['flags'])  # of earlier phases, too: a resume does not load --load_weights again
    return kept | {'flags': flags}


def data_of(flags: dict) -> list[dict]:
    """Return the datasets that weights were trained on, phase by phase, from their flags.

    An entry without keys means an unknown dataset, as for weights from another program or an older version.
    """
    return flags.get(DATA, [{}])


def require_same_flags(before: dict, now: dict) -> None:
    """Raise Mismatch if a resumed run has another value of a flag, other data or another tokenizer than before.

    A flag that the checkpoint does not have was added in a newer version, so it had its default.
    """
    for field in SAME_ON_RESUME:
        was = before.get(field.name, field.default)
        if field.name == 'caption_weights':  # compare probabilities: order and scale do not matter
            is_same = probabilities(was) == probabilities(now[field.name])
        else:
            is_same = was == now[field.name]
        if not is_same:
            raise Mismatch(f'--{field.name} was {was}, and is {now[field.name]} now')

    # Compare data and tokenizer by hash: they may have moved. The first versions kept no hashes.
    if DATASET in before and before[DATASET] != now.get(DATASET):
        raise Mismatch(f'the data of --remote has changed since: the hash of its index was '
                       f'{str(before.get(DATASET))[:12]}, and is {str(now.get(DATASET))[:12]} now')
    if before.get(TOKENIZER, now[TOKENIZER]) != now[TOKENIZER]:
        name = now['tokenizer'] or now['model_name']
        raise Mismatch(f'the tokenizer of {name} gives other token ids; give the tokenizer of the run as '
                       '--tokenizer, for example a pipeline that export.py makes of the checkpoint')


def probabilities(weights: Iterable[tuple[str, float]]) -> dict[str, float]:
    total = sum(weight for _, weight in weights)
    return {name: round(weight / total, 9) for name, weight in weights if weight}


# The model: its configuration and its frozen networks

def facts_of_model(files: ModelFiles, image_size: int, unet: Any, text_encoder: Any, scheduler: Any) -> dict:
    """Return the facts about a model that a checkpoint keeps besides the weights, in plain types."""
    configs = comparable(unet=unet.config, text_encoder=text_encoder.config.to_dict(), scheduler=scheduler.config)
    return {'model_name': files.name, 'image_size': image_size, 'vae_sha256': files.vae_sha256,
            'text_encoder_sha256': files.text_encoder_sha256, 'scaling_factor': files.scaling_factor,
            'configs': configs}


def comparable(**configs: Mapping[str, Any]) -> dict[str, dict]:
    """Return the settings in configurations that change the computation, by part, converted to JSON types.

    Take each configuration from the network or the scheduler and not from its file, which may lack defaults.
    """
    kept = {}
    for part, config in configs.items():
        kept[part] = {}
        for name, value in config.items():
            matters = name in SCHEDULER_KEYS if part == 'scheduler' else name not in WITHOUT_EFFECT
            if matters and not name.startswith('_'):
                kept[part][name] = value
    return json.loads(json.dumps(kept, default=str))


def difference_of_models(before: dict, now: dict) -> str | None:
    """Describe the first difference between the model that weights were trained as and another one; None if equal.

    Only facts and settings that both sides have are compared, because each version of diffusers and transformers knows
    other settings. Both are from `facts_of_model`.
    """
    for part, config in now['configs'].items():
        trained = before.get('configs', {}).get(part, {})
        for name in sorted(config.keys() & trained.keys()):
            if trained[name] != config[name]:
                return f'{name} of its {part} was {json.dumps(trained[name])}, and is {json.dumps(config[name])} now'
    for key, name in (('vae_sha256', 'hash of its vae'), ('text_encoder_sha256', 'hash of its text_encoder'),
                      ('scaling_factor', 'scaling_factor of its vae')):
        if key in before and key in now and before[key] != now[key]:
            return f'{name} was {str(before[key])[:12]}, and is {str(now[key])[:12]} now'
    return None


def is_in_checkpoint(part: str, facts: dict) -> bool:
    """Tell whether a checkpoint with these facts has the weights of a frozen network, and not only their hash."""
    return facts.get(f'{part}_sha256', RANDOM) == RANDOM


def omit_networks_of_folder(model: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: dict) -> None:
    """Remove the networks of a StableDiffusion whose weights come from files from its state; a hook of torch."""
    for part in FROZEN:
        if not is_in_checkpoint(part, model.facts):
            for name in [name for name in state if name.startswith(f'{prefix}{part}.')]:
                del state[name]


def add_missing_networks(model: torch.nn.Module, state: dict[str, Any], prefix: str = '', *_) -> None:
    """Add whatever a checkpoint lacks to the state that a StableDiffusion loads, in place; a hook of torch.

    The model then compares the facts of the checkpoint with its own in `set_extra_state`, among them the hashes. A
    network without a hash is that of the checkpoint, which the model then keeps in its own checkpoints, unless it is a
    copy of the one in the folder, whose weights are not rounded.
    """
    facts = state.setdefault(f'{prefix}{EXTRA_STATE}', {})  # the first versions did not save any facts
    for part in FROZEN:
        network = getattr(model, part)
        weights = {} if network is None else network.state_dict()
        saved = {name.removeprefix(f'{prefix}{part}.'): tensor for name, tensor in state.items()
                 if name.startswith(f'{prefix}{part}.')}
        is_kept = is_in_checkpoint(part, facts) or is_in_checkpoint(part, model.facts)
        if network is not None and saved and is_kept and not is_copy(saved, weights):
            if f'{part}_sha256' not in facts:
                model.facts.pop(f'{part}_sha256', None)
            continue
        for name in saved:
            del state[f'{prefix}{part}.{name}']
        state |= {f'{prefix}{part}.{name}': tensor for name, tensor in weights.items()}


def is_copy(saved: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> bool:
    """Tell whether the tensors that a checkpoint has of a network are its weights, perhaps rounded."""
    return saved.keys() == weights.keys() and all(torch.equal(tensor, weights[name].to(tensor))
                                                  for name, tensor in saved.items())


# An exact resume

class ExactResume(Callback):
    """Resumes the noise, the data and the optimizer of a training exactly.

    Composer restores the random state in the middle of an epoch only if it iterates over the skipped batches itself,
    which it does not do with StreamingDataLoader. Therefore every batch gets a seed from run, batch and rank.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def before_load(self, state, logger) -> None:
        for optimizer in state.optimizers:
            optimizer.register_load_state_dict_pre_hook(keep_arguments)

    def fit_start(self, state, logger) -> None:
        """Continue the data at the right sample, and bring the optimizer state into the right memory layout."""
        dataset = state.train_dataloader.dataset
        if state.timestamp.batch.value and isinstance(dataset, VerifiedDataset):
            dataset.resume_at(state.timestamp.epoch.value, state.timestamp.sample_in_epoch.value)

        # A checkpoint has the moments in the memory format of its run. A fused optimizer needs them in the format of
        # the weights, because it pairs both by their position in memory.
        for optimizer in state.optimizers:
            for parameter, moments in optimizer.state.items():
                for name, moment in moments.items():
                    if isinstance(moment, torch.Tensor) and moment.shape == parameter.shape:
                        moments[name] = torch.empty_like(parameter, dtype=moment.dtype).copy_(moment)

    def batch_start(self, state, logger) -> None:
        seeds = np.random.SeedSequence((self.seed, state.timestamp.batch.value, dist.get_global_rank()))
        torch.manual_seed(int(seeds.generate_state(1)[0]))


def keep_arguments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the saved state of an optimizer with the arguments of the new optimizer, such as `fused`.

    Without this, a resumed optimizer would have all arguments of the saved one, whatever the flags are now. Only the
    learning rate comes from the saved state, because the schedule has changed it.
    """
    groups = []
    for group, saved in zip(optimizer.param_groups, state['param_groups'], strict=True):
        groups.append({**saved, **group, 'params': saved['params'], 'lr': saved['lr']})
    return {**state, 'param_groups': groups}
