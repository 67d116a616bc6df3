"""Keep facts about the model, the run and the data in checkpoints, and compare them when a checkpoint is used again."""
import json
from collections.abc import Mapping
from typing import Any

from composer import Callback
from torch.utils.data import Dataset

from sdbench.errors import UserError, redacted
from sdbench.flags.train import SAME_ON_RESUME, TIMES, Run
from sdbench.inputs.shards import DRAW, IMAGES_HASH, are_two_sides, hash_of_images, index_hash
from sdbench.inputs.tokenizer import hash_of_tokenizer
from sdbench.models.loading import ModelFiles

# Keys in the flags of a checkpoint. Datasets and tokenizers are compared by hash, because they may move.
DATASET = 'dataset'  # hash of the index.json of --remote
DATA = 'data'  # a list with IMAGES_HASH and DRAW of each dataset that the weights were trained on
TOKENIZER = 'tokenizer_sha256'  # the result of `hash_of_tokenizer`

# Keys of network configurations that do not change the computation, and keys of schedulers that do: only these affect
# the noise and the target in training.
WITHOUT_EFFECT = {'sample_size', 'dtype', 'torch_dtype', 'architectures', 'transformers_version'}
SCHEDULER_KEYS = ('num_train_timesteps', 'beta_start', 'beta_end', 'beta_schedule', 'trained_betas',
                  'rescale_betas_zero_snr', 'prediction_type')


def facts_of_model(files: ModelFiles, image_size: int, unet: Any, text_encoder: Any, scheduler: Any) -> dict:
    """Return the facts about a model that a checkpoint keeps besides the weights, in plain types.

    Args:
        files: the files of the model.
        image_size: height and width of the training images.
        unet: the UNet.
        text_encoder: the text encoder.
        scheduler: the noise scheduler.
    """
    configs = comparable(unet=unet.config, text_encoder=text_encoder.config.to_dict(), scheduler=scheduler.config)
    return {'model_name': files.name, 'image_size': image_size, 'vae_sha256': files.vae_sha256,
            'text_encoder_sha256': files.text_encoder_sha256, 'scaling_factor': files.scaling_factor,
            'configs': configs}


def comparable(**configs: Mapping[str, Any]) -> dict[str, dict]:
    """Return the settings in configurations that change the computation, by part, converted to JSON types.

    Args:
        configs: the configuration of each part. Take it from the network or the scheduler and not from its file, which
            may lack defaults.
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
    other settings.

    Args:
        before: `facts_of_model` from the training, or a part of it.
        now: `facts_of_model` of the other model, or a part of it.
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


def flags_to_keep(settings: Run, files: ModelFiles, dataset: Dataset, data_before: list[dict]) -> dict:
    """Return the flags that a checkpoint keeps, without passwords, and the hashes of the tokenizer and the data.

    `data_before` is the DATA of the weights that the run starts from.
    """
    # Keep the flags that must be the same on a resume, and the names of model and tokenizer, which export.py looks up.
    flags = {field.name: getattr(settings, field.name) for field in SAME_ON_RESUME}
    flags['model_name'] = settings.model_name
    flags['tokenizer'] = settings.tokenizer
    flags[TOKENIZER] = hash_of_tokenizer(settings.tokenizer or files.tokenizer)

    # Keep hashes of the dataset, which may move. Random images do not count as training data.
    flags['remote'] = None
    flags[DATA] = [*data_before]
    if settings.remote:
        flags['remote'] = redacted(settings.remote)
        flags[DATASET] = index_hash(dataset.index)
        flags[DATA].append({IMAGES_HASH: hash_of_images(dataset.index), DRAW: dataset.index.get(DRAW)})
    return flags


def data_of(flags: dict) -> list[dict]:
    """Return the datasets that weights were trained on, phase by phase, from their flags.

    An entry without keys means an unknown dataset, as for weights from another program or an older version.
    """
    return flags.get(DATA, [{}])


def was_trained_on(flags: dict, index: dict) -> bool | None:
    """Tell whether weights were trained on the images of an index.json; None if unknown.

    The answer is yes if one phase of their training used this dataset. It is no if every phase used one side of a
    `convert.py --held_out`, and this dataset is the other side of the same conversion. Otherwise it is unknown.
    """
    data = data_of(flags)
    if any(phase.get(IMAGES_HASH) == hash_of_images(index) for phase in data):
        return True
    return False if all(are_two_sides(phase.get(DRAW), index.get(DRAW)) for phase in data) else None


class Mismatch(UserError):
    """The checkpoint is from another run or model than the one that loads it."""


class SameRun(Callback):
    """Keeps the flags of a run in its checkpoints, and refuses to resume with flags that train another model.

    Args:
        flags: the result of `flags_to_keep`.
    """

    def __init__(self, flags: dict):
        self.flags = flags

    def state_dict(self) -> dict:
        return {'flags': self.flags}

    def load_state_dict(self, state: dict) -> None:
        """Raise Mismatch if the resumed run had another value of a flag, other data or another tokenizer.

        A flag that the checkpoint does not have was added in a newer version, so it had its default.
        """
        before = state.get('flags', {})
        now = self.flags

        # Compare the flags that decide the result of training. The remedy for a time is its length in batches, because
        # a longer --max_duration changes the default, and a time in epochs or as a fraction of the run.
        for field in SAME_ON_RESUME:
            flag = field.name
            was = before.get(flag, field.default)
            if was is None and flag == 'ema_half_life':  # earlier versions did not keep a default that they computed
                continue
            if comparable_value(flag, was) != comparable_value(flag, now[flag]):
                remedy = ''
                if flag in TIMES and was is not None:
                    remedy = f'; give --{flag} {was}'
                raise Mismatch(f'--{flag} was {was}, and is {now[flag]} now{remedy}')

        # Compare data and tokenizer by hash: they may have moved.
        # Compare only what the checkpoint states: the first versions kept no hashes.
        if DATASET in before and before[DATASET] != now.get(DATASET):
            raise Mismatch(f'the data of --remote has changed since: the hash of its index was '
                           f'{str(before.get(DATASET))[:12]}, and is {str(now.get(DATASET))[:12]} now')
        if before.get(TOKENIZER, now[TOKENIZER]) != now[TOKENIZER]:
            name = now['tokenizer'] or now['model_name']
            raise Mismatch(f'the tokenizer of {name} gives other token ids; give the tokenizer of the run as '
                           '--tokenizer, for example a pipeline that export.py makes of the checkpoint')

        # Take over the data of earlier phases, because a resume does not load --load_weights again.
        now[DATA] = data_of(before)


def comparable_value(flag: str, value: Any) -> Any:
    """Return a flag's value for comparison: caption weights as probabilities, because order and scale do not matter."""
    if flag != 'caption_weights':
        return value
    weights = {name: weight for name, weight in dict(value).items() if weight}
    return {name: round(weight / sum(weights.values()), 9) for name, weight in weights.items()}
