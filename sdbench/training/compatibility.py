"""What a checkpoint says of its model and its run, and whether another model, run or dataset fits it."""
import json
from collections.abc import Mapping
from typing import Any

from composer import Callback
from torch.utils.data import Dataset

from sdbench.errors import UserError, redacted
from sdbench.flags.train import SAME_ON_RESUME, TIMES, Train
from sdbench.inputs.shards import DRAW, IMAGES_HASH, are_two_sides, hash_of_images, index_hash
from sdbench.inputs.tokenizer import hash_of_tokenizer
from sdbench.models.loading import ModelFiles

# Weights are in a checkpoint, so that shards, models and tokenizers may move to another address.
DATASET = 'dataset'  # the hash of the index of --remote
DATA = 'data'  # all that the weights were trained on: of each dataset IMAGES_HASH and DRAW
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


def flags_to_keep(settings: Train, files: ModelFiles, dataset: Dataset, data_before: list[dict]) -> dict:
    """Return what a checkpoint says of its run: its flags, without passwords, and what tokenizer and data were.

    `data_before` is the DATA of the weights that the run starts from.
    """
    # what must be the same on a resume, and where model and tokenizer were, which a later command may look up
    flags = {field.name: getattr(settings, field.name) for field in SAME_ON_RESUME}
    flags['model_name'] = settings.model_name
    flags['tokenizer'] = settings.tokenizer
    flags[TOKENIZER] = hash_of_tokenizer(settings.tokenizer or files.tokenizer)

    # what the data was, wherever it lies then; random images are no data
    flags['remote'] = None
    flags[DATA] = [*data_before]
    if settings.remote:
        flags['remote'] = redacted(settings.remote)
        flags[DATASET] = index_hash(dataset.index)
        flags[DATA].append({IMAGES_HASH: hash_of_images(dataset.index), DRAW: dataset.index.get(DRAW)})
    return flags


def data_of(flags: dict) -> list[dict]:
    """Return what weights were trained on, phase by phase, from `flags_to_keep`. An empty entry is unknown data."""
    return flags.get(DATA, [{}])  # weights of another program or an older version do not say


def was_trained_on(flags: dict, index: dict) -> bool | None:
    """Tell whether weights were trained on the images of an index.json; None: that is not known.

    They were if one phase of their training was on this dataset. They were not if each phase was on one side of a
    conversion, and this dataset is the other side of that conversion. All else is not known.
    """
    data = data_of(flags)
    if any(phase.get(IMAGES_HASH) == hash_of_images(index) for phase in data):
        return True
    return False if all(are_two_sides(phase.get(DRAW), index.get(DRAW)) for phase in data) else None


class Mismatch(UserError):
    """A checkpoint is of another run or model than the one that loads it."""


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
        """Raise Mismatch if a flag of the run that is resumed, its data or its tokenizer was another.

        A flag that a checkpoint does not hold is a newer one, and had its default.
        """
        before = state['flags']
        now = self.flags

        # the flags that decide what is learned: with another value the losses would go on as those of no run
        for field in SAME_ON_RESUME:
            flag = field.name
            was = before.get(flag, field.default)
            if comparable_value(flag, was) != comparable_value(flag, now[flag]):
                remedy = ''
                if flag in TIMES and was is not None:  # another --max_duration makes it another number of batches
                    remedy = f'; give --{flag} {was}'
                raise Mismatch(f'--{flag} was {was}, and is {now[flag]} now{remedy}')

        # data and tokenizer, by what they hold: they may have moved
        if before.get(DATASET) != now.get(DATASET):
            raise Mismatch(f'the data of --remote has changed since: the hash of its index was '
                           f'{str(before.get(DATASET))[:12]}, and is {str(now.get(DATASET))[:12]} now')
        if before.get(TOKENIZER) != now[TOKENIZER]:
            name = now['tokenizer'] or now['model_name']
            raise Mismatch(f'the tokenizer of {name} gives other token ids; give that of the run by --tokenizer, '
                           'such as what export.py makes of the checkpoint')

        # what the weights were trained on before, which the command of a resume need not say again
        now[DATA] = data_of(before)


def comparable_value(flag: str, value: Any) -> Any:
    """Return a flag's value as a resume compares it: caption weights as chances, since order and scale do nothing."""
    if flag != 'caption_weights':
        return value
    weights = {name: weight for name, weight in dict(value).items() if weight}
    return {name: round(weight / sum(weights.values()), 9) for name, weight in weights.items()}
