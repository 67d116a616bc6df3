"""--load_weights: a training that starts from the weights of an earlier one, or of a diffusers model.

Optimizer, counters, random state and data are those of a new run.
"""
import contextlib
import json
import os
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from inputs.errors import one_line
from models.diffusion_model import DiffusionModel
from training.checkpoint_files import no_weights_error, unet_folder
from training.checkpoints import checkpoints, from_storage, load_checkpoint, newest_sound, sound_checkpoint
from training.ranks import on_rank_0

OF_NO_WEIGHT = ('sample_size', 'upcast_attention')  # entries of it that weights do not depend on
ENCODERS = ('vae', 'text_encoder')


def load_initial_weights(path: str, model: DiffusionModel) -> dict | None:
    """Put the weights of `path` into the UNet of `model`.

    Args:
        path: a checkpoint of Composer's, a folder of them, of which the newest is taken, either of the two in an object
            store, or a folder of diffusers with a UNet or with a pipeline.
        model: a StableDiffusion.

    Returns the state of the EMA that the checkpoint holds, for its `load_state_dict`; None if there is none.

    Raises ValueError on all ranks if there is nothing of the kind, or it does not fit this model.
    """
    place = f'--load_weights {path}'
    folder = on_rank_0(partial(unet_folder, path))
    if folder is not None:
        require_same_prediction(Path(folder), model, place)
        load_unet(model.unet, unet_of_folder(folder, model, place), place)
        return None
    with checkpoint_in(path, '--load_weights') as found:
        if found is None:
            raise no_weights_error(place)
        return load_from_checkpoint(found, model, place)


@contextlib.contextmanager
def checkpoint_in(place: str, flag: str) -> Iterator[str | None]:
    """The path of a checkpoint: `place`, or the newest sound one in it, fetched from its store; None if there is none.

    Nothing in `place` is renamed or removed: it is another run's. Raises ValueError on all ranks if it cannot be
    read or trusted.
    """
    is_checkpoint = on_rank_0(partial(names_one_checkpoint, place))
    if is_checkpoint:
        found = sound_checkpoint(place, f'{flag} {place}')
    else:
        found = newest_sound(on_rank_0(partial(from_storage, checkpoints, place, flag)), f'{flag} {place}')
    with found as path:
        yield path


def names_one_checkpoint(place: str) -> bool:
    """Whether a path or URI names a checkpoint, and not a folder of them."""
    if '://' in place:
        return place.endswith('.pt')
    return os.path.isfile(place)


def load_from_checkpoint(path: str, model: DiffusionModel, place: str) -> dict | None:
    """Put the weights of a checkpoint into the UNet of `model`; returns the state of its EMA, None if there is none."""
    weights, average = weights_of_checkpoint(path, place)
    require_same_encoders(weights, model, place)
    load_unet(model.unet, with_prefix_removed(weights, 'unet.'), place)
    if average:
        require_same_shapes(with_prefix_removed(average['ema_model']['named_parameters_dict'], 'unet.'),
                            dict(model.unet.named_parameters()), f'{place}: its average')
    return average


def weights_of_checkpoint(path: str, place: str) -> tuple[dict[str, torch.Tensor], dict | None]:
    """The weights of a whole model, and the state of their average, None if there is none.

    Raises ValueError if there are no weights.
    """
    try:
        state = load_checkpoint(path, mmap=True)['state']
        weights = dict(state['model'])
        algorithms = dict(state.get('algorithms', ()))
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f'{place}: {path} is no checkpoint of a training ({one_line(error)[:200]})') from None
    consume_prefix_in_state_dict_if_present(weights, 'module.')
    average = algorithms.get('EMA')
    if not average or not average['ema_started']:
        return weights, None
    shadow = average['ema_model']['named_parameters_dict']
    consume_prefix_in_state_dict_if_present(shadow, 'module.')
    if average.get('ema_weights_active'):  # saved within an evaluation, when the two were exchanged
        for name in shadow:
            weights[name], shadow[name] = shadow[name], weights[name]
        average['ema_weights_active'] = False
    return weights, average


def unet_of_folder(folder: str, model: DiffusionModel, place: str) -> dict[str, torch.Tensor]:
    """The weights of the UNet in a folder of diffusers. Raises ValueError if it has none, or another configuration."""
    try:
        unet = UNet2DConditionModel.from_pretrained(folder, use_safetensors=True)
    except Exception as error:  # diffusers and safetensors raise many kinds for files that are not there or damaged
        raise ValueError(f'{place} holds no UNet that diffusers loads ({one_line(error)[:200]})') from None
    for key, ours in model.unet.config.items():
        theirs = unet.config.get(key)
        if not key.startswith('_') and key not in OF_NO_WEIGHT and theirs != ours:
            raise ValueError(f'{place} has a UNet with {key} {theirs}, and that of --model_name has {ours}; give the '
                             '--model_name that it is of')
    return unet.state_dict()


def require_same_prediction(folder: Path, model: DiffusionModel, place: str) -> None:
    """Raises ValueError if the scheduler of the pipeline that a UNet is of predicts something else than `model`."""
    scheduler = folder.parent / 'scheduler' / 'scheduler_config.json'
    if not scheduler.is_file():
        return
    predicts = json.loads(scheduler.read_text()).get('prediction_type', 'epsilon')
    if predicts != model.prediction_type:
        raise ValueError(f'{place} predicts {predicts}, and --model_name {model.prediction_type}; give the '
                         '--model_name that it is of')


def require_same_encoders(weights: dict[str, torch.Tensor], model: DiffusionModel, place: str) -> None:
    """Raises ValueError if the UNet was trained with another VAE or text encoder than `model`, in any precision."""
    for part in ENCODERS:
        module = getattr(model, part)
        if module is None:  # latents need no VAE
            continue
        theirs = with_prefix_removed(weights, f'{part}.')
        for name, ours in module.state_dict().items():
            if name in theirs and not nearly_equal(theirs[name], ours):
                raise ValueError(f'{place} was trained with another {part}; give the --model_name, the --pretrained '
                                 'and, where its weights are random, the --seed of that run')


def nearly_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same but for the rounding to half precision."""
    if one.shape != other.shape:
        return False
    return torch.allclose(one.float(), other.cpu().float(), rtol=0.01, atol=1e-6)


def load_unet(unet: UNet2DConditionModel, weights: dict[str, torch.Tensor], place: str) -> None:
    """Copy weights into a UNet. Raises ValueError if they are of another."""
    require_same_shapes(weights, unet.state_dict(), place)
    unet.load_state_dict(weights)


def require_same_shapes(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], place: str) -> None:
    """Raises ValueError if a name or a shape is in one of the two and not in the other."""
    different = {(name, tensor.shape) for name, tensor in theirs.items()} ^ \
                {(name, tensor.shape) for name, tensor in ours.items()}
    if different:
        names = sorted({name for name, _ in different})
        raise ValueError(f'{place} is of another UNet than that of --model_name: {len(names)} of its parameters '
                         f'differ, first {names[0]}')


def with_prefix_removed(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Those whose name has the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
