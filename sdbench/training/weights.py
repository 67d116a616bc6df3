"""The weights of a checkpoint: what it holds, a training that starts from them, and the pipeline that they make."""
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import init_empty_weights
from composer import ComposerModel
from composer.utils import dist, get_file
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from ema import DDP_PREFIX
from sdbench.errors import one_line
from sdbench.inputs.captions import hash_of_tokenizer, pipeline_tokenizer
from sdbench.models.drawing import build_pipeline
from sdbench.models.loading import ModelFiles, build_vae, find_model, load_weights
from sdbench.training.checkpoints import load_checkpoint, newest_checkpoint
from sdbench.training.compatibility import MODEL, difference_of_models, kept_tokenizer
from sdbench.training.ranks import on_rank_0

# What a checkpoint holds

@dataclass
class TrainedModel:
    """What a checkpoint holds of the model: tensors by the names that they have in each part.

    Attributes:
        batch: how many batches it was trained for; None where it does not say.
        samples: how many images these were.
        flags: of the run, such as model_name and image_size; empty if it was not one of benchmark.py.
        live: the weights of the UNet that the optimizer moves.
        averaged: those of the average; None where there is none.
        ema: the state of the algorithm that keeps the average, for its `load_state_dict`; None where there is none.
        vae: None where the run trained on latents.
        text_encoder: as it was held in the run, perhaps in half precision.
    """
    batch: int | None
    samples: int | None
    flags: dict
    live: dict[str, torch.Tensor]
    averaged: dict[str, torch.Tensor] | None
    ema: dict | None
    vae: dict[str, torch.Tensor] | None
    text_encoder: dict[str, torch.Tensor]


def read_trained_model(source: str, flag: str) -> TrainedModel:
    """Read the model of a checkpoint, of the newest in a folder, or of either in an object store.

    Files are mapped, not read: the optimizer's moments, most of a checkpoint, never come into memory. All ranks call
    this together.

    Args:
        source: path or URI; what ends with .pt is a checkpoint, and all else a folder of them.
        flag: its name in error messages.

    Raises ValueError if there is no such checkpoint, or it cannot be read or trusted.
    """
    name = source if source.endswith('.pt') else newest_checkpoint(source, flag)
    if name is None:
        raise ValueError(f'{flag} {source} is not there, or holds no whole checkpoint; give one, or the --save_folder '
                         'of a run')
    with fetched(name, flag) as path:
        try:
            return trained_model_of(load_checkpoint(path)['state'])
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError, EOFError, OSError) as error:
            raise ValueError(f'{flag} {source}: {name} is no checkpoint of a training ({one_line(error, 400)}); use '
                             'another') from None


def trained_model_of(state: dict) -> TrainedModel:
    """Return the model in the state of a checkpoint. Raises KeyError, TypeError or the like if it is none."""
    # the weights
    model = state['model']
    ema = dict(state.get('algorithms', ())).get('EMA')
    if ema is not None:
        model, ema = live_and_averaged(model, ema)
    live = with_prefix_removed(model, 'unet.')
    averaged = None
    if ema is not None:
        averaged = live | with_prefix_removed(ema['ema_model']['named_parameters_dict'], 'unet.')

    # the run
    flags = {}
    for callback in dict(state.get('callbacks', ())).values():
        flags = callback.get('flags', flags)
    timestamp = state.get('timestamp', {}).get('Timestamp', {})
    return TrainedModel(timestamp.get('batch'), timestamp.get('sample'), flags, live, averaged, ema,
                   with_prefix_removed(model, 'vae.') or None, with_prefix_removed(model, 'text_encoder.'))


def live_and_averaged(model: dict[str, torch.Tensor], ema: dict) -> tuple[dict[str, torch.Tensor], dict | None]:
    """Return the live weights of a checkpoint, and the state of its average or None where that has not started.

    Composer's own EMA saves while the average is in the model, and the live weights are in its shadow. Of a run on
    several devices, the names in its shadow have DDP's prefix.

    Args:
        model: the tensors of the model, by name.
        ema: the state of the algorithm, this program's or Composer's.
    """
    if not ema['ema_started']:
        return model, None
    live = dict(model)
    shadow = {}
    for group, tensors in ema['ema_model'].items():  # parameters and buffers
        shadow[group] = {name.removeprefix(DDP_PREFIX): tensor for name, tensor in tensors.items()}
    if ema['ema_weights_active']:
        for tensors in shadow.values():
            for name in tensors.keys() & model.keys():
                live[name] = tensors[name]
                tensors[name] = model[name]
    return live, {'ema_model': shadow, 'ema_started': True, 'ema_weights_active': False}


@contextlib.contextmanager
def fetched(name: str, flag: str) -> Iterator[str]:
    """Give the path of a checkpoint; for an object in a store that of a copy, one on each node.

    What is mapped of the copy stays readable when it has gone with the context.
    """
    if '://' not in name:
        yield name
        return

    # the first rank of a node fetches it for all
    with tempfile.TemporaryDirectory() as folder:
        first_of_node = dist.get_global_rank() - dist.get_local_rank()
        path = os.path.join(dist.all_gather_object(folder)[first_of_node], 'checkpoint.pt')
        with dist.run_local_rank_zero_first():
            try:
                if dist.get_local_rank() == 0:
                    get_file(name, path, progress_bar=False)
            except Exception as error:  # every storage client has its own exceptions
                raise ValueError(f'{flag}: {name} cannot be fetched ({type(error).__name__}: {one_line(error, 200)}); '
                                 f'check its name, your credentials, and the room in {folder}') from None
        yield path
        dist.barrier()  # the other ranks of this node may still open it


def with_prefix_removed(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose name has the prefix, by their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# A training that starts from it: --load_weights

def load_initial_weights(path: str, model: ComposerModel, files: ModelFiles, tokenizer: str | None = None
                         ) -> dict | None:
    """Put the weights of --load_weights into the UNet of `model`. The rest of the training is that of a new run.

    Args:
        path: as `read_trained_model` takes it, or a folder of diffusers with a UNet or with a pipeline.
        model: a StableDiffusion.
        files: of that model.
        tokenizer: of --tokenizer, in the place of the model's own.

    Returns the state of the EMA that the checkpoint holds, for its `load_state_dict`; None if there is none.

    Raises ValueError if there is nothing of the kind, or it does not fit this model.
    """
    # the weights, of a folder of diffusers or of a checkpoint
    label = f'--load_weights {path}'
    folder = on_rank_0(partial(unet_folder, path))
    if folder is not None:
        weights, ema = weights_of_folder(folder, files, label), None
    else:
        trained = read_trained_model(path, '--load_weights')
        require_same_model(trained.flags, files.configs, label)
        require_same_encoders(trained, model, label)
        warn_of_another_tokenizer(trained, tokenizer or files.tokenizer, label)
        weights, ema = trained.live, trained.ema

    # their place in the model
    try:
        model.unet.load_state_dict(weights)
    except RuntimeError as error:  # names what is missing, what is foreign, and what has another shape
        raise ValueError(f'{label} is of another UNet than that of --model_name ({one_line(error, 300)})') from None
    return ema


def unet_folder(path: str) -> Path | None:
    """Return the folder with the UNet in a folder of diffusers, perhaps that of a pipeline; None if there is none."""
    for folder in (Path(path, 'unet'), Path(path)):
        if (folder / 'config.json').is_file():
            return folder
    return None


def weights_of_folder(folder: Path, files: ModelFiles, label: str) -> dict[str, torch.Tensor]:
    """Return the weights of the UNet in a folder of diffusers.

    Raises ValueError if it has none, or they were trained as another model than that of `files`.
    """
    unet = load_weights(UNet2DConditionModel, folder, label)
    configs = {'unet': dict(unet.config)}
    scheduler = folder.parent / 'scheduler' / 'scheduler_config.json'
    if scheduler.is_file():
        configs['scheduler'] = json.loads(scheduler.read_bytes())
    compared = {part: files.configs[part] for part in configs}
    require_same_model({MODEL: configs}, compared, label)
    return unet.state_dict()


def require_same_model(flags: dict, configs: dict[str, dict], label: str) -> None:
    """Raise ValueError if weights were trained as another model than that of these configuration files."""
    difference = difference_of_models(flags, configs)
    if difference:
        raise ValueError(f'{label} was trained as another model than that of --model_name ({difference}); give the '
                         '--model_name that it is of, or, to train it as this one all the same, a copy of the folder '
                         'unet that export.py writes')


def warn_of_another_tokenizer(trained: TrainedModel, name: str | None, label: str) -> None:
    """Say on rank 0 where the training goes on with other token ids than the weights have learned."""
    if dist.get_global_rank() == 0 and kept_tokenizer(trained.flags) not in (None, hash_of_tokenizer(name)):
        print(f'warning: {label} was trained with another tokenizer, whose token ids differ; --tokenizer names the one '
              'to train with', file=sys.stderr)


def require_same_encoders(trained: TrainedModel, model: ComposerModel, label: str) -> None:
    """Raise ValueError if the UNet was trained with another VAE or text encoder than `model`, in any precision."""
    for part in ('vae', 'text_encoder'):
        theirs = getattr(trained, part)
        module = getattr(model, part)
        if theirs is None or module is None:  # latents need no VAE
            continue
        for name, ours in module.state_dict().items():
            if name in theirs and not nearly_equal(theirs[name], ours):
                raise ValueError(f'{label} was trained with another {part}; give the --model_name, the --pretrained '
                                 'and, where its weights are random, the --seed of that run')


def nearly_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are the same but for the rounding to half precision."""
    if one.shape != other.shape:
        return False
    return torch.allclose(one.float(), other.cpu().float(), rtol=0.01, atol=1e-6)


# The pipeline of diffusers that it makes

def trained_pipeline(trained: TrainedModel, label: str, model_name: str | None = None, tokenizer: str | None = None,
                     pretrained: bool = False, live: bool = False) -> StableDiffusionPipeline:
    """Make the pipeline of a checkpoint, on the CPU.

    Args:
        trained: what the checkpoint holds; its tensors in float32 are not copied.
        label: its name in error messages.
        model_name: for the configuration of each part; None: that of the run.
        tokenizer: None: that of the run, which is the model's own unless it had another.
        pretrained: take the VAE from `model_name` where the checkpoint has none, instead of a random one.
        live: draw with the live weights, also where there is an average.

    Raises ValueError if the checkpoint does not fit `model_name`, or a part cannot be had.
    """
    name = model_name or trained.flags.get('model_name')
    if name is None:
        raise ValueError(f'{label} does not say what model it is of; give --model_name of export.py')

    # the model's files, which must be of what was trained
    files = find_model(name, pretrained and trained.vae is None)
    difference = difference_of_models(trained.flags, files.configs)
    if difference:
        raise ValueError(f'--model_name {name} is not the model of {label} ({difference}); give the one that was '
                         'trained, with its configuration as it was')
    encoded_by = trained.flags.get('vae_sha256')  # of a run on latents
    if files.pretrained and encoded_by not in (None, files.vae_sha256):
        raise ValueError(f'--model_name {name} has another VAE than the one that encoded the latents of {label}; give '
                         'the model of the encoding')

    # the parts with their weights
    unet_config = dict(files.configs['unet'])
    if 'image_size' in trained.flags:
        unet_config['sample_size'] = files.latent_size(trained.flags['image_size'])
    unet_weights = trained.live
    if trained.averaged is not None and not live:
        unet_weights = trained.averaged
    text_config = CLIPTextConfig(**files.configs['text_encoder'])
    try:
        unet = with_weights(partial(UNet2DConditionModel.from_config, unet_config), unet_weights)
        text_encoder = with_weights(partial(CLIPTextModel, text_config), trained.text_encoder)
        if trained.vae is None:
            vae = build_vae(files, 'fp32')  # random unless `files` are pretrained
        else:
            vae = with_weights(partial(AutoencoderKL.from_config, files.configs['vae']), trained.vae)
    except RuntimeError as error:
        raise ValueError(f'--model_name {name} is not the model of {label} ({one_line(error, 200)}); give the one '
                         'that was trained') from None
    tokenizer = pipeline_tokenizer(trained_tokenizer(trained, files, tokenizer, label))
    return build_pipeline(unet, vae, files.configs['scheduler'], text_encoder, tokenizer)


def trained_tokenizer(trained: TrainedModel, files: ModelFiles, given: str | None, label: str) -> str | None:
    """Return the name of the tokenizer that a checkpoint was trained with; None: CLIP's own.

    Args:
        trained: what the checkpoint holds.
        files: of its model.
        given: where the tokenizer is now; None: CLIP's own, that of the run's --tokenizer, or that of the model.
        label: its name in error messages.

    Raises ValueError if the tokenizer gives other token ids than the one of the training.
    """
    expected = kept_tokenizer(trained.flags)
    if given is None and expected == hash_of_tokenizer():
        return None
    name = given or trained.flags.get('tokenizer') or files.tokenizer
    if expected not in (None, hash_of_tokenizer(name)):
        raise ValueError(f'{label} was trained with another tokenizer than {name or "that of CLIP"}, whose token ids '
                         'differ; give the one of the training as --tokenizer of export.py; to draw with another one, '
                         'put it into the exported pipeline')
    return name


def with_weights(make: Callable[[], torch.nn.Module], weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return the module that `make` gives, with `weights` in float32 as its parameters, which are made without memory.

    Raises RuntimeError if they do not fit.
    """
    with init_empty_weights(include_buffers=False):  # positions of tokens are buffers, and no weights
        module = make()
    module.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return module.requires_grad_(False).eval()
