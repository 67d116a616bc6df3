"""The weights that a training starts from: --load_weights."""
import json
import sys
from functools import partial
from pathlib import Path

import torch
from composer import ComposerModel
from composer.utils import dist
from diffusers import UNet2DConditionModel

from sdbench.errors import one_line
from sdbench.inputs.captions import hash_of_tokenizer
from sdbench.models.loading import ModelFiles, load_weights
from sdbench.training.kept import MODEL, difference_of_models, kept_tokenizer
from sdbench.training.ranks import on_rank_0
from sdbench.training.trained import Trained, read_trained


def load_initial_weights(path: str, model: ComposerModel, files: ModelFiles, tokenizer: str | None = None
                         ) -> dict | None:
    """Put the weights of --load_weights into the UNet of `model`. The rest of the training is that of a new run.

    Args:
        path: as `read_trained` takes it, or a folder of diffusers with a UNet or with a pipeline.
        model: a StableDiffusion.
        files: of that model.
        tokenizer: of --tokenizer, in the place of the model's own.

    Returns the state of the EMA that the checkpoint holds, for its `load_state_dict`; None if there is none.

    Raises ValueError if there is nothing of the kind, or it does not fit this model.
    """
    label = f'--load_weights {path}'
    folder = on_rank_0(partial(unet_folder, path))
    if folder is not None:
        weights, ema = weights_of_folder(folder, files, label), None
    else:
        trained = read_trained(path, '--load_weights')
        require_same_model(trained.flags, files.configs, label)
        require_same_encoders(trained, model, label)
        warn_of_another_tokenizer(trained, tokenizer or files.tokenizer, label)
        weights, ema = trained.live, trained.ema
    try:
        model.unet.load_state_dict(weights)
    except RuntimeError as error:  # names what is missing, what is foreign, and what has another shape
        raise ValueError(f'{label} is of another UNet than that of --model_name ({one_line(error, 300)})') from None
    return ema


def unet_folder(path: str) -> Path | None:
    """The folder with the UNet in a folder of diffusers, itself or that of a pipeline; None if it is none."""
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
        configs['scheduler'] = json.loads(scheduler.read_text())
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


def warn_of_another_tokenizer(trained: Trained, name: str | None, label: str) -> None:
    """Say on rank 0 where the training goes on with other token ids than the weights have learned."""
    if dist.get_global_rank() == 0 and kept_tokenizer(trained.flags) not in (None, hash_of_tokenizer(name)):
        print(f'warning: {label} was trained with another tokenizer, whose token ids differ; --tokenizer names the one '
              'to train with', file=sys.stderr)


def require_same_encoders(trained: Trained, model: ComposerModel, label: str) -> None:
    """Raises ValueError if the UNet was trained with another VAE or text encoder than `model`, in any precision."""
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
    """Whether two tensors are the same but for the rounding to half precision."""
    if one.shape != other.shape:
        return False
    return torch.allclose(one.float(), other.cpu().float(), rtol=0.01, atol=1e-6)
