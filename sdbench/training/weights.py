"""Read the weights of a checkpoint, start a training from them, and make a diffusers pipeline of them."""
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer import ComposerModel
from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel

from sdbench.errors import UserError, one_line
from sdbench.files import EXPORTED, parse_json
from sdbench.inputs.tokenizer import hash_of_tokenizer, pipeline_tokenizer
from sdbench.models.generation import build_pipeline
from sdbench.models.loading import (
    PRETRAINED_PARTS,
    RANDOM,
    ModelFiles,
    build_text_encoder,
    build_vae,
    find_model,
    load_weights,
    require_no_single_file,
    weight_files,
)
from sdbench.training.checkpoints import load_checkpoint, local_copy, newest_checkpoint
from sdbench.training.ranks import on_rank_0, print_on_rank_0
from sdbench.training.resuming import (
    EXTRA_STATE,
    TOKENIZER,
    Mismatch,
    comparable,
    data_of,
    difference_of_models,
    facts_of_model,
    is_copy,
    is_in_checkpoint,
    kept_in,
)

DDP_PREFIX = 'module.'  # of names in Composer's own EMA on several devices
# Keys of a record about the cost of a training, which does not include the cost of `load_weights`
COST_KEYS = ('gpu_hours', 'gpu_hours_by_device', 'dollars', 'device', 'load_weights')


# Read a checkpoint

@dataclass
class TrainedModel:
    """The model in a checkpoint.

    Attributes:
        kept: what benchmark.py keeps in the checkpoint, from `kept_in`.
        model: the state of the model as the checkpoint holds it: raw (non-EMA) weights, frozen networks that are not in
            the model's folder, and the facts.
        ema: the UNet's EMA weights by name; None if the training has no EMA.
        young_half_life: the half-life of an EMA that is still near the initial weights; None for any other EMA.
        ema_state: the state of the EMA algorithm, for its `load_state_dict`; None if the training has no EMA.
    """
    kept: dict[str, Any]
    model: dict[str, Any]
    ema: dict[str, torch.Tensor] | None
    young_half_life: str | None
    ema_state: dict | None

    @property
    def flags(self) -> dict:
        """Return the flags of the training; empty if benchmark.py has not saved the checkpoint."""
        return self.kept.get('flags', {})

    @property
    def facts(self) -> dict:
        """Return `facts_of_model` of the training; empty if this program has not saved the checkpoint."""
        return self.model.get(EXTRA_STATE, {})


def read_trained_model(source: str, flag: str) -> TrainedModel:
    """Read the model of a checkpoint, whose name ends with .pt, or of the newest one in a folder or an object store.

    Files are memory-mapped, so the optimizer state, most of a checkpoint, is never read. All ranks call this together.
    `flag` is the flag or argument that named `source`, for error messages.

    Raises UserError if there is no such checkpoint, or it cannot be read or trusted.
    """
    if not source.endswith('.pt'):
        require_no_single_file(source, f'{flag} {source}')
    name = source if source.endswith('.pt') else newest_checkpoint(source, flag)
    if name is None:
        raise UserError(f'{flag} {source} does not exist, or holds no complete checkpoint; give a checkpoint, or the '
                        '--save_folder of a run')

    # The file may be anything, so report in one line whatever is missing in it.
    with local_copy(name, flag) as path:
        try:
            return trained_model_of(load_checkpoint(path)['state'])
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError, EOFError, OSError) as error:
            raise UserError(f'{flag} {source}: {name} is not a checkpoint of a training ({one_line(error, 400)}); use '
                            'another file') from None


def trained_model_of(state: dict) -> TrainedModel:
    """Return the model in the state of a checkpoint. Raises KeyError, TypeError or the like if there is none."""
    kept = kept_in(state)

    # The EMA weights, if the EMA has started.
    model = dict(state['model'])
    saved = dict(state.get('algorithms', ())).get('EMA')
    ema = None
    young_half_life = None
    ema_state = None
    if saved is not None and saved['ema_started']:
        if saved['ema_weights_active']:
            raise UserError("Composer's own EMA saved this checkpoint, with the EMA weights stored as the model's "
                            'weights; resume with the EMA of ema.py')
        shadow = saved['ema_model']
        ema = with_prefix_removed(model, 'unet.')
        for name, tensor in shadow['named_parameters_dict'].items():
            ema[name.removeprefix(DDP_PREFIX).removeprefix('unet.')] = tensor

        # An EMA from the start of a training is still near the initial weights for about four half-lives. An EMA that
        # started later, or continues one that was no longer near them, began with trained weights. Composer's own EMA
        # and the first versions of ours do not save these two.
        half_life = saved.get('half_life')
        if half_life and saved.get('from_start'):
            if 4 * int(half_life[:-2]) > kept['batch' if half_life.endswith('ba') else 'epoch']:
                young_half_life = half_life
        ema_state = {'ema_model': shadow, 'ema_started': True, 'ema_weights_active': False,
                     'from_start': young_half_life is not None}
    return TrainedModel(kept, model, ema, young_half_life, ema_state)


def about_training(trained: TrainedModel, raw_weights: bool = False) -> dict:
    """Return the keys of a record that describe the weights of a training: EMA weights, or raw weights without EMA."""
    weights = 'raw' if raw_weights or trained.ema is None else 'EMA'
    spent = {key: trained.kept[key] for key in COST_KEYS if key in trained.kept}
    return {'weights': weights, 'trained_batches': trained.kept['batch'], 'images_seen': trained.kept['sample'],
            'training': trained.flags | spent}


def read_exported(folder: str) -> dict:
    """Return the export.json that export.py writes into a pipeline folder; empty if export.py has not made it."""
    path = Path(folder, EXPORTED)
    return parse_json(path.read_bytes(), str(path)) if path.is_file() else {}


def with_prefix_removed(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# Start a training from a checkpoint: --load_weights

def load_initial_weights(path: str, model: ComposerModel, files: ModelFiles, tokenizer: str | None = None
                         ) -> tuple[dict | None, list[dict]]:
    """Load the weights of --load_weights into `model`. Everything else in the training starts anew.

    Random frozen networks of a checkpoint are loaded, too, because the UNet needs those that it was trained with.
    `path` is a checkpoint or a folder of checkpoints, as for `read_trained_model`, or a diffusers folder with a UNet or
    a pipeline. `tokenizer` is the --tokenizer of the run; None means the model's own.

    Returns the state of the EMA in the checkpoint, for its `load_state_dict`, or None if there is no EMA; and the
    datasets that the weights were trained on, as `data_of` returns them.

    Raises UserError if the path holds no weights, or they do not fit this model.
    """
    # A diffusers folder has a UNet and perhaps the rest of its pipeline, but does not name the data of its training.
    label = f'--load_weights {path}'
    folder = on_rank_0(partial(unet_folder, path))
    if folder is not None:
        unet = load_weights(UNet2DConditionModel, folder, label)
        configs = {'unet': unet.config}
        scheduler = folder.parent / 'scheduler' / 'scheduler_config.json'
        if scheduler.is_file():
            configs['scheduler'] = DDPMScheduler.from_config(parse_json(scheduler.read_bytes(), str(scheduler))).config
        state = {f'unet.{name}': tensor for name, tensor in unet.state_dict().items()}
        state[EXTRA_STATE] = {'configs': comparable(**configs)} | hashes_of_pipeline(folder.parent, files)
        ema_state = None
        flags = {}
    # A checkpoint also has facts about the frozen networks, and the tokenizer's hash.
    else:
        trained = read_trained_model(path, '--load_weights')
        state = trained.model
        ema_state = trained.ema_state
        flags = trained.flags
        if flags.get(TOKENIZER) not in (None, hash_of_tokenizer(tokenizer or files.tokenizer)):
            print_on_rank_0(f'warning: {label} was trained with another tokenizer, whose token ids differ; give that '
                            'tokenizer as --tokenizer to train with the same ids')
    try:
        model.load_state_dict(state)
    except (Mismatch, RuntimeError) as error:  # torch lists missing and unexpected keys, and different shapes
        raise UserError(f'{label} was trained as another model than --model_name {files.name} '
                        f'({one_line(error, 300)}); give the --model_name of that training or, to train it as this '
                        'model anyway, a copy of the folder unet that export.py writes') from None
    return ema_state, data_of(flags)


def hashes_of_pipeline(folder: Path, files: ModelFiles) -> dict[str, str]:
    """Return the hashes of the VAE and the text encoder in a pipeline folder, to compare them with those of `files`.

    A network is left out if the folder lacks its weights, or if the model has random ones.
    """
    if folder.resolve() == files.folder.resolve():  # hashing takes seconds
        return {}
    pipeline = ModelFiles(str(folder), folder, files.configs, pretrained=True)
    hashes = {}
    for part in PRETRAINED_PARTS:
        name = f'{part}_sha256'
        if weight_files(folder / part) and getattr(files, name) != RANDOM:
            hashes[name] = getattr(pipeline, name)
    return hashes


def unet_folder(path: str) -> Path | None:
    """Return the UNet's folder in a pipeline folder of diffusers, or `path` if it is a UNet's folder; else None."""
    for folder in (Path(path, 'unet'), Path(path)):
        if (folder / 'config.json').is_file():
            return folder
    return None


# Make a diffusers pipeline of a checkpoint

def trained_pipeline(trained: TrainedModel, label: str, model_name: str | None = None, tokenizer: str | None = None,
                     raw_weights: bool = False) -> StableDiffusionPipeline:
    """Make a diffusers pipeline of a checkpoint, on the CPU. Warns if its EMA weights are still near the initial ones.

    The UNet's tensors are not copied. `label` is the name of the checkpoint in error messages. `model_name` and
    `tokenizer` replace those of the training.

    Raises UserError if the checkpoint does not fit `model_name`, or a file is missing.
    """
    files = trained_files(trained, label, model_name)

    # Build the UNet with the trained weights, and the frozen networks with those of the checkpoint or the model's
    # folder.
    unet_config = dict(files.configs['unet'])
    if 'image_size' in trained.facts:
        unet_config['sample_size'] = files.latent_size(trained.facts['image_size'])
    unet_weights = with_prefix_removed(trained.model, 'unet.')
    if trained.ema is not None and not raw_weights:
        unet_weights = trained.ema
        if trained.young_half_life is not None:
            print_on_rank_0('warning: the EMA weights are still near the initial weights, because their half-life is '
                            f'{trained.young_half_life} and {label} is from batch {trained.kept["batch"]:,}; export.py '
                            '--raw_weights uses the raw weights')
    vae = build_vae(files, 'fp32')
    text_encoder = build_text_encoder(files, 'fp32')
    try:
        with torch.device('meta'):  # without memory for weights, which the trained ones replace
            unet = UNet2DConditionModel.from_config(unet_config)
        unet.load_state_dict({name: tensor.float() for name, tensor in unet_weights.items()}, assign=True)
        for part, network in (('vae', vae), ('text_encoder', text_encoder)):
            saved = with_prefix_removed(trained.model, f'{part}.')
            if is_in_checkpoint(part, trained.facts) and not is_copy(saved, network.state_dict()):
                network.load_state_dict(saved)
    except RuntimeError as error:
        raise UserError(f'--model_name {files.name} is not the model of {label} ({one_line(error, 200)}); give the '
                        'one that was trained') from None

    # Weights can also fit a configuration that computes something else, for example with another number of attention
    # heads or another noise schedule. Compare the configurations, and the hashes of networks from the folder.
    scheduler = DDPMScheduler.from_config(files.configs['scheduler'])
    difference = difference_of_models(trained.facts, facts_of_model(files, 0, unet, text_encoder, scheduler))
    if difference:
        raise UserError(f'--model_name {files.name} is not the model of {label} ({difference}); give the one that '
                        f'was trained as --model_name ({trained.facts.get("model_name")} then), with its configuration '
                        'and weights as they were')
    tokenizer = pipeline_tokenizer(trained_tokenizer(trained, files, tokenizer, label))
    unet.requires_grad_(False).eval()
    return build_pipeline(unet, vae, files.configs['scheduler'], text_encoder, tokenizer)


def trained_files(trained: TrainedModel, label: str, model_name: str | None) -> ModelFiles:
    """Return the files of a checkpoint's model, with the weights of the frozen networks unless those are random.

    Raises UserError if there is no such model, or no VAE that can decode.
    """
    name = model_name or trained.facts.get('model_name')
    if name is None:
        raise UserError(f'{label} does not name its model; give --model_name to export.py')
    if is_in_checkpoint('vae', trained.facts) and not with_prefix_removed(trained.model, 'vae.'):
        raise UserError(f'{label} holds no VAE, and names none that can decode: it was trained on latents of a VAE '
                        'with random weights, or by another program; train with --pretrained, on latents from '
                        'encode.py --pretrained')
    try:
        return find_model(name, not is_in_checkpoint('vae', trained.facts))
    except UserError as error:
        if model_name:
            raise
        raise UserError(f'{label} was trained as a model that is not found: {error}; if it has moved, give its new '
                        'place as --model_name of export.py') from None


def trained_tokenizer(trained: TrainedModel, files: ModelFiles, given: str | None, label: str) -> str | None:
    """Return the name of the tokenizer that a checkpoint was trained with, or of the `given` one; None for CLIP's own.

    Raises UserError if the tokenizer gives other token ids than the one of the training.
    """
    expected = trained.flags.get(TOKENIZER)
    if given is None and expected == hash_of_tokenizer():
        return None
    name = given or trained.flags.get('tokenizer') or files.tokenizer
    if expected not in (None, hash_of_tokenizer(name)):
        raise UserError(f'{label} was trained with another tokenizer than {name or "the one of CLIP"}, whose token ids '
                        'differ; give the tokenizer of the training as --tokenizer of export.py; to generate images '
                        'with another tokenizer, put it into the exported pipeline')
    return name
