"""What a checkpoint says of its model and its run, and whether another model, run or dataset fits it."""
import json
from collections.abc import Mapping
from typing import Any

from composer import Callback
from torch.utils.data import Dataset

from sdbench.complete import TIMES
from sdbench.errors import UserError, redacted
from sdbench.flags.train import SAME_ON_RESUME, Train
from sdbench.inputs.shards import DRAW, IMAGES_HASH, are_two_sides, hash_of_images, index_hash
from sdbench.inputs.tokenizer import hash_of_tokenizer
from sdbench.models.loading import ModelFiles

# Weights are in a checkpoint, so that shards, models and tokenizers may move to another address.
DATASET = 'dataset'  # the hash of the index of --remote
TOKENIZER = 'tokenizer_sha256'  # `hash_of_tokenizer`

WITHOUT_EFFECT = {'sample_size', 'dtype', 'torch_dtype', 'architectures', 'transformers_version'}  # on the arithmetic
OF_THE_SCHEDULER = ('num_train_timesteps', 'beta_start', 'beta_end', 'beta_schedule', 'trained_betas',
                    'rescale_betas_zero_snr', 'prediction_type')  # what noise and target of a training depend on


def facts_of_model(files: ModelFiles, image_size: int, unet: Any, text_encoder: Any, scheduler: Any) -> dict:
    """Return what a checkpoint keeps of a model beside its weights, in plain types.

    Args:
        files: of the model.
        image_size: height and width that it is trained at.
        unet: its UNet.
        text_encoder: its text encoder.
        scheduler: of its noise.
    """
    configs = comparable(unet=unet.config, text_encoder=text_encoder.config.to_dict(), scheduler=scheduler.config)
    return {'model_name': files.name, 'image_size': image_size, 'vae_sha256': files.vae_sha256,
            'scaling_factor': files.scaling_factor, 'configs': configs}


def comparable(**configs: Mapping[str, Any]) -> dict[str, dict]:
    """Return what in configurations decides what is computed, by part and as JSON has it.

    The configuration of a network or scheduler that is made has its defaults in it, where its file may leave them out.
    """
    kept = {}
    for part, config in configs.items():
        kept[part] = {}
        for name, value in config.items():
            matters = name in OF_THE_SCHEDULER if part == 'scheduler' else name not in WITHOUT_EFFECT
            if matters and not name.startswith('_'):
                kept[part][name] = value
    return json.loads(json.dumps(kept, default=str))


def difference_of_models(before: dict, now: dict) -> str | None:
    """Return in words how a model differs from the one that weights were trained as; None where it does not.

    Args:
        before: `facts_of_model` of the training, or some of them; without any there is no difference.
        now: those of the model, or some. What only one version of diffusers or transformers knows is not compared.
    """
    for part, config in now['configs'].items():
        trained = before.get('configs', {}).get(part, {})
        for name in sorted(config.keys() & trained.keys()):
            if trained[name] != config[name]:
                return f'{name} of its {part} was {json.dumps(trained[name])}, and is {json.dumps(config[name])} now'
    for key, name in (('vae_sha256', 'hash'), ('scaling_factor', 'scaling_factor')):
        if key in before and key in now and before[key] != now[key]:
            return f'{name} of its vae was {str(before[key])[:12]}, and is {str(now[key])[:12]} now'
    return None


def flags_to_keep(settings: Train, files: ModelFiles, dataset: Dataset) -> dict:
    """Return what a checkpoint says of its run: its flags, without passwords, and what tokenizer and data were."""
    # what must be the same on a resume, and where model and tokenizer were, which a later command may look up
    flags = {field.name: getattr(settings, field.name) for field in SAME_ON_RESUME}
    flags['model_name'] = settings.model_name
    flags['tokenizer'] = settings.tokenizer
    flags[TOKENIZER] = hash_of_tokenizer(settings.tokenizer or files.tokenizer)

    # what the data was, wherever it lies then
    flags['remote'] = None
    if settings.remote:
        flags['remote'] = redacted(settings.remote)
        flags[DATASET] = index_hash(dataset.index)
        flags[IMAGES_HASH] = hash_of_images(dataset.index)
        flags[DRAW] = dataset.index.get(DRAW)
    return flags


def was_trained_on(flags: dict, index: dict) -> bool | None:
    """Tell whether a run was trained on images of an index.json; None: that is not known.

    It was on all of these, or on none, where they are the other side of the draw of its own.
    """
    if flags.get(IMAGES_HASH) == hash_of_images(index):
        return True
    return False if are_two_sides(flags.get(DRAW), index.get(DRAW)) else None


class SameRun(Callback):
    """Keeps what a run was told in its checkpoints, and lets no other run go on from them.

    Args:
        flags: of `flags_to_keep`.
    """

    def __init__(self, flags: dict):
        self.flags = flags

    def state_dict(self) -> dict:
        return {'flags': self.flags}

    def load_state_dict(self, state: dict) -> None:
        """Raise UserError if a flag of the run that is resumed, its data or its tokenizer was another.

        A flag that a checkpoint does not hold is a newer one, and had its default.
        """
        before = state['flags']
        now = self.flags

        # the flags that decide what is learned: with another value the losses would go on as those of no run
        for field in SAME_ON_RESUME:
            flag = field.name
            was = before.get(flag, field.default)
            if was != now[flag]:
                remedy = ''
                if flag in TIMES and was is not None:  # another --max_duration makes it another number of batches
                    remedy = f'; give --{flag} {was}'
                raise UserError(f'--{flag} was {was}, and is {now[flag]} now{remedy}')

        # data and tokenizer, by what they hold: they may have moved
        if before.get(DATASET) != now.get(DATASET):
            raise UserError(f'the data of --remote has changed since: the hash of its index was '
                            f'{str(before.get(DATASET))[:12]}, and is {str(now.get(DATASET))[:12]} now')
        if before.get(TOKENIZER) != now[TOKENIZER]:
            name = now['tokenizer'] or now['model_name']
            raise UserError(f'the tokenizer of {name} gives other token ids; give that of the run by --tokenizer, '
                            'such as what export.py makes of the checkpoint')
