"""The weights of a checkpoint: what it holds, a training that starts from them, and the pipeline that they make."""
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import init_empty_weights
from composer import ComposerModel
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from sdbench.errors import UserError, one_line
from sdbench.files import parse_json
from sdbench.inputs.tokenizer import hash_of_tokenizer, pipeline_tokenizer
from sdbench.models.generation import build_pipeline
from sdbench.models.loading import (
    RANDOM,
    ModelFiles,
    build_vae,
    find_model,
    load_weights,
    require_no_single_file,
)
from sdbench.paths import EXPORTED
from sdbench.training.checkpoints import callback_state, fetched, load_checkpoint, newest_checkpoint
from sdbench.training.compatibility import TOKENIZER, comparable, data_of, difference_of_models, facts_of_model
from sdbench.training.ranks import on_rank_0, print_on_rank_0

EXTRA_STATE = '_extra_state'  # what torch calls a module's own in its state

# What a checkpoint holds

@dataclass
class TrainedModel:
    """What a checkpoint holds of the model: tensors by the names that they have in each part.

    Attributes:
        batch: how many batches it was trained for; None where it does not say.
        samples: how many images these were.
        flags: of a run of benchmark.py; empty if it was none.
        spent: its `gpu_hours`, and on which `device`; empty where it does not say.
        facts: what the model says of itself (`facts_of_model`); empty if it was not one of this program.
        raw: the UNet's weights that the optimizer updates.
        ema: the UNet's EMA weights; None if the training keeps none.
        young_half_life: of an average that is still near the weights that the training started from, else None.
        ema_state: the state of the EMA algorithm, for its `load_state_dict`; None if the training keeps no EMA.
        vae: None where the run trained on latents.
        text_encoder: as it was held in the run, perhaps in half precision.
    """
    batch: int | None
    samples: int | None
    flags: dict
    spent: dict
    facts: dict
    raw: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor] | None
    young_half_life: str | None
    ema_state: dict | None
    vae: dict[str, torch.Tensor] | None
    text_encoder: dict[str, torch.Tensor]


def read_trained_model(source: str, flag: str) -> TrainedModel:
    """Read the model of a checkpoint, of the newest in a folder, or of either in an object store.

    Files are mapped, not read: the optimizer's moments, most of a checkpoint, never come into memory. All ranks call
    this together.

    Args:
        source: path or URI; what ends with .pt is a checkpoint, and all else a folder of them.
        flag: its name in error messages.

    Raises UserError if there is no such checkpoint, or it cannot be read or trusted.
    """
    if not source.endswith('.pt'):
        require_no_single_file(source, f'{flag} {source}')
    name = source if source.endswith('.pt') else newest_checkpoint(source, flag)
    if name is None:
        raise UserError(f'{flag} {source} is not there, or holds no whole checkpoint; give one, or the --save_folder '
                        'of a run')

    # a file that somebody gives can be any: whatever it lacks is said in one line
    with fetched(name, flag) as path:
        try:
            return trained_model_of(load_checkpoint(path)['state'])
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError, EOFError, OSError) as error:
            raise UserError(f'{flag} {source}: {name} is no checkpoint of a training ({one_line(error, 400)}); use '
                            'another') from None


def trained_model_of(state: dict) -> TrainedModel:
    """Return the model in the state of a checkpoint. Raises KeyError, TypeError or the like if it is none."""
    # the run: what it says of itself, and how far it is
    model = dict(state['model'])
    facts = model.pop(EXTRA_STATE, {})
    flags = callback_state(state, 'flags').get('flags', {})
    spent = callback_state(state, 'gpu_hours')
    timestamp = state.get('timestamp', {}).get('Timestamp', {})

    # The EMA weights, if the EMA has started.
    saved = dict(state.get('algorithms', ())).get('EMA')
    ema = None
    ema_state = None
    young_half_life = None
    if saved is not None and saved['ema_started']:
        if saved['ema_weights_active']:
            raise UserError("Composer's own EMA saved this checkpoint, with the EMA weights stored as the model's "
                            'weights; resume with the EMA of ema.py')
        shadow = saved['ema_model']
        ema = with_prefix_removed(model | shadow['named_parameters_dict'], 'unet.')
        ema_state = {'ema_model': shadow, 'ema_started': True, 'ema_weights_active': False}

        # It is young as long as much of it is still what the training started from. One that started later began as a
        # copy of trained weights.
        half_life = saved['half_life']
        if half_life and saved['from_start']:
            passed = timestamp['batch' if half_life.endswith('ba') else 'epoch']
            if 4 * int(half_life[:-2]) > passed:
                young_half_life = half_life
    return TrainedModel(timestamp.get('batch'), timestamp.get('sample'), flags, spent, facts,
                        with_prefix_removed(model, 'unet.'), ema, young_half_life, ema_state,
                        with_prefix_removed(model, 'vae.') or None, with_prefix_removed(model, 'text_encoder.'))


def about_training(trained: TrainedModel, raw_weights: bool = False) -> dict:
    """Return what a record says about the training of the EMA weights, or of the raw ones without EMA."""
    weights = 'raw' if raw_weights or trained.ema is None else 'EMA'
    return {'weights': weights, 'trained_batches': trained.batch, 'images_seen': trained.samples,
            'training': trained.flags | trained.spent}


def read_exported(folder: str) -> dict:
    """Return what export.py says of the pipeline that it has made in a folder; empty where it has made none."""
    path = Path(folder, EXPORTED)
    return parse_json(path.read_bytes(), str(path)) if path.is_file() else {}


def with_prefix_removed(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose name has the prefix, by their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# A training that starts from it: --load_weights

def load_initial_weights(path: str, model: ComposerModel, files: ModelFiles, tokenizer: str | None = None
                         ) -> tuple[dict | None, list[dict]]:
    """Put the weights of --load_weights into the UNet of `model`. The rest of the training is that of a new run.

    Args:
        path: as `read_trained_model` takes it, or a folder of diffusers with a UNet or with a pipeline.
        model: a StableDiffusion.
        files: of that model.
        tokenizer: of --tokenizer, in the place of the model's own.

    Returns the state of the EMA that the checkpoint holds, for its `load_state_dict`, or None if there is none; and
    what the weights were trained on, as `data_of` returns it.

    Raises UserError if there is nothing of the kind, or it does not fit this model.
    """
    # The weights are in a folder of diffusers, which says of noise and VAE at most the scheduler's part,
    label = f'--load_weights {path}'
    folder = on_rank_0(partial(unet_folder, path))
    if folder is not None:
        unet = load_weights(UNet2DConditionModel, folder, label)
        configs = {'unet': unet.config}
        scheduler = folder.parent / 'scheduler' / 'scheduler_config.json'
        if scheduler.is_file():
            configs['scheduler'] = DDPMScheduler.from_config(parse_json(scheduler.read_bytes(), str(scheduler))).config
        facts = {'configs': comparable(**configs)}
        weights = unet.state_dict()
        ema_state = None
        flags = {}  # which do not say what the weights were trained on
    # or in a checkpoint, with whose text encoder and tokens the training should go on.
    else:
        trained = read_trained_model(path, '--load_weights')
        facts = trained.facts
        weights = trained.raw
        ema_state = trained.ema_state
        flags = trained.flags
        if not are_same_weights(trained.text_encoder, model.text_encoder.state_dict()):
            raise UserError(f'{label} was trained with another text_encoder; give the --model_name, the --pretrained '
                            'and, where its weights are random, the --seed of that run')
        if trained.flags.get(TOKENIZER) not in (None, hash_of_tokenizer(tokenizer or files.tokenizer)):
            print_on_rank_0(f'warning: {label} was trained with another tokenizer, whose token ids differ; --tokenizer '
                            'names the one to train with')

    # They fit a model that computes alike, on latents of the same VAE.
    difference = difference_of_models(facts, model.facts)
    if difference:
        raise UserError(f'{label} was trained as another model than that of --model_name ({difference}); give the '
                        '--model_name that it is of, or, to train it as this one all the same, a copy of the folder '
                        'unet that export.py writes')
    try:
        model.unet.load_state_dict(weights)
    except RuntimeError as error:  # names what is missing, what is foreign, and what has another shape
        raise UserError(f'{label} is of another UNet than that of --model_name ({one_line(error, 300)})') from None
    return ema_state, data_of(flags)


def are_same_weights(trained: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> bool:
    """Tell whether two networks have tensors of the same names, the same but for the rounding to half precision."""
    if trained.keys() != ours.keys():
        return False
    for name, other in ours.items():
        one = trained[name]
        if one.shape != other.shape or not torch.allclose(one.float(), other.cpu().float(), rtol=0.01, atol=1e-6):
            return False
    return True


def unet_folder(path: str) -> Path | None:
    """Return the folder with the UNet in a folder of diffusers, perhaps that of a pipeline; None if there is none."""
    for folder in (Path(path, 'unet'), Path(path)):
        if (folder / 'config.json').is_file():
            return folder
    return None


# The pipeline of diffusers that it makes

def trained_pipeline(trained: TrainedModel, label: str, model_name: str | None = None, tokenizer: str | None = None,
                     raw_weights: bool = False) -> StableDiffusionPipeline:
    """Make the pipeline of a checkpoint, on the CPU. A warning says if its EMA weights are still near the initial ones.

    Args:
        trained: what the checkpoint holds; its tensors in float32 are not copied.
        label: its name in error messages.
        model_name: for the configuration of each part; None: that of the run.
        tokenizer: None: that of the run, which is the model's own unless it had another.
        raw_weights: use the raw (non-EMA) weights, even if there are EMA weights.

    Raises UserError if the checkpoint does not fit `model_name`, or a part cannot be had.
    """
    files = trained_files(trained, label, model_name)

    # Its parts, with the weights that were trained.
    unet_config = dict(files.configs['unet'])
    if 'image_size' in trained.facts:
        unet_config['sample_size'] = files.latent_size(trained.facts['image_size'])
    unet_weights = trained.raw
    if trained.ema is not None and not raw_weights:
        unet_weights = trained.ema
        if trained.young_half_life is not None:
            print_on_rank_0('warning: the EMA weights are still near the initial weights, because their half-life is '
                            f'{trained.young_half_life} and {label} is from batch {trained.batch:,}; export.py '
                            '--raw_weights uses the raw weights')
    text_config = CLIPTextConfig(**files.configs['text_encoder'])
    try:
        unet = with_weights(partial(UNet2DConditionModel.from_config, unet_config), unet_weights)
        text_encoder = with_weights(partial(CLIPTextModel, text_config), trained.text_encoder)
        if trained.vae is None:
            vae = build_vae(files, 'fp32')
        else:
            vae = with_weights(partial(AutoencoderKL.from_config, files.configs['vae']), trained.vae)
    except RuntimeError as error:
        raise UserError(f'--model_name {files.name} is not the model of {label} ({one_line(error, 200)}); give the '
                        'one that was trained') from None

    # The files must be of the model that was trained: its noise, its heads of attention, its VAE where that is theirs.
    scheduler = DDPMScheduler.from_config(files.configs['scheduler'])
    facts = facts_of_model(files, 0, unet, text_encoder, scheduler)
    if trained.vae is not None:
        del facts['vae_sha256']
    difference = difference_of_models(trained.facts, facts)
    if difference:
        raise UserError(f'--model_name {files.name} is not the model of {label} ({difference}); give the one that '
                        'was trained, with its configuration as it was')
    tokenizer = pipeline_tokenizer(trained_tokenizer(trained, files, tokenizer, label))
    return build_pipeline(unet, vae, files.configs['scheduler'], text_encoder, tokenizer)


def trained_files(trained: TrainedModel, label: str, model_name: str | None) -> ModelFiles:
    """Return the files of a checkpoint's model, with the VAE's weights where the checkpoint holds none.

    A run on latents has no VAE in its checkpoints, and says by a hash which one encoded them.

    Args:
        trained: what the checkpoint holds.
        label: its name in error messages.
        model_name: of the model; None: that of the run.

    Raises UserError if there is no such model, or no VAE that can decode.
    """
    name = model_name or trained.facts.get('model_name')
    if name is None:
        raise UserError(f'{label} does not say what model it is of; give --model_name of export.py')
    if trained.vae is None and trained.facts.get('vae_sha256') == RANDOM:
        raise UserError(f'{label} was trained on latents of a VAE with random weights, which cannot decode, so that '
                        'nothing can be drawn with it; train with --pretrained, on what encode.py makes with it')
    if trained.vae is None and 'vae_sha256' not in trained.facts:
        raise UserError(f'{label} holds no VAE, and does not say which one encoded its latents; give one that '
                        'benchmark.py has saved')
    try:
        return find_model(name, pretrained=trained.vae is None)
    except UserError as error:
        if model_name:
            raise
        raise UserError(f'{label} names its model: {error}, or say where it is now by --model_name of '
                        'export.py') from None


def trained_tokenizer(trained: TrainedModel, files: ModelFiles, given: str | None, label: str) -> str | None:
    """Return the name of the tokenizer that a checkpoint was trained with; None: CLIP's own.

    Args:
        trained: what the checkpoint holds.
        files: of its model.
        given: where the tokenizer is now; None: CLIP's own, that of the run's --tokenizer, or that of the model.
        label: its name in error messages.

    Raises UserError if the tokenizer gives other token ids than the one of the training.
    """
    expected = trained.flags.get(TOKENIZER)
    if given is None and expected == hash_of_tokenizer():
        return None
    name = given or trained.flags.get('tokenizer') or files.tokenizer
    if expected not in (None, hash_of_tokenizer(name)):
        raise UserError(f'{label} was trained with another tokenizer than {name or "that of CLIP"}, whose token ids '
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
