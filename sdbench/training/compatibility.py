"""What a checkpoint says of its run, and whether another run, a model or a dataset fits it."""
import hashlib
import inspect
import json

from diffusers import AutoencoderKL, UNet2DConditionModel
from torch.utils.data import Dataset
from transformers import CLIPTextConfig

from sdbench.errors import redacted
from sdbench.flags.complete import TIMES
from sdbench.flags.train import SAME_ON_RESUME, Train
from sdbench.inputs.captions import hash_of_tokenizer
from sdbench.inputs.shards import IMAGES_HASH, hash_of_images
from sdbench.models.loading import ModelFiles

# Among the flags of a checkpoint: the hash of the index of its --remote, and the configuration of its --model_name.
# Weights are in the checkpoint, so that shards and models may move to another address.
DATASET = 'dataset'
MODEL = 'model'  # by part; of earlier versions a hash of it
TOKENIZER = 'tokenizer_sha256'  # `hash_of_tokenizer`
NOT_KEPT_AT_FIRST = ('pretrained', 'ema_half_life')  # by the first versions, which had them

PARTS = {'unet': UNet2DConditionModel, 'vae': AutoencoderKL, 'text_encoder': CLIPTextConfig}
WITHOUT_EFFECT = {'sample_size', 'dtype', 'architectures', 'transformers_version'}  # on what is computed here
SCHEDULER_DEFAULTS = {  # of diffusers, for what noise and target of a training depend on
    'num_train_timesteps': 1000, 'beta_start': 0.0001, 'beta_end': 0.02, 'beta_schedule': 'linear',
    'trained_betas': None, 'rescale_betas_zero_snr': False, 'prediction_type': 'epsilon',
}


class DatasetChanged(ValueError):
    """The dataset of --remote is another than that of the run that is resumed."""


def flags_to_keep(settings: Train, files: ModelFiles, dataset: Dataset) -> dict:
    """Return what a checkpoint says of its run: its flags, without passwords, and what model and data were."""
    flags = {field.name: getattr(settings, field.name) for field in SAME_ON_RESUME}

    # the model and the tokenizer
    flags['model_name'] = settings.model_name
    flags[MODEL] = files.configs
    flags['tokenizer'] = settings.tokenizer
    flags[TOKENIZER] = hash_of_tokenizer(settings.tokenizer or files.tokenizer)

    # the data
    flags['remote'] = None
    if settings.remote:
        flags['remote'] = redacted(settings.remote)
        flags[DATASET] = dataset.index_hash
        flags[IMAGES_HASH] = dataset.images_hash
        if dataset.latents:
            flags['vae_sha256'] = files.vae_sha256  # of the one that encoded them
    return flags


def require_same_run(before: dict, now: dict) -> None:
    """Raise ValueError if the flags of a run that is resumed were others, or DatasetChanged if its data was.

    A flag that a checkpoint does not hold is a newer one, and had its default.
    """
    # the flags
    for field in SAME_ON_RESUME:
        flag = field.name
        if flag not in before and flag in NOT_KEPT_AT_FIRST:
            continue
        was = before.get(flag, field.default)
        if was != now[flag]:
            remedy = ''
            if flag in TIMES and was is not None:  # another --max_duration makes it another number of batches
                remedy = f'; give --{flag} {was}'
            raise ValueError(f'--{flag} was {was}, and is {now[flag]} now{remedy}')

    # the data, the model and the tokenizer
    if DATASET in before and before[DATASET] != now.get(DATASET):
        raise DatasetChanged(f'the hash of its index was {before[DATASET]}, and is {now.get(DATASET)} now')
    difference = difference_of_models(before, now[MODEL])
    if difference:
        raise ValueError(f'--model_name {now["model_name"]} has another configuration: {difference}')
    if kept_tokenizer(before) not in (None, now[TOKENIZER]):
        name = now['tokenizer'] or now['model_name']
        raise ValueError(f'the tokenizer of {name} gives other token ids; give that of the run by --tokenizer, such as '
                         'what export.py makes of the checkpoint')


def kept_tokenizer(flags: dict) -> str | None:
    """Return the hash of the tokenizer that a run was trained with; None: its checkpoint does not tell.

    Earlier versions kept no hash: they had CLIP's own unless --tokenizer named another.
    """
    if TOKENIZER not in flags and flags.get('tokenizer') is None:
        return hash_of_tokenizer()
    return flags.get(TOKENIZER)


def was_trained_on(flags: dict, index: dict) -> bool | None:
    """Tell whether a run was trained on the images of an index.json; None: its checkpoint names no data."""
    images = flags.get(IMAGES_HASH) or flags.get(DATASET)  # earlier versions kept only the hash of what they read
    if images is None:
        return None
    return images == hash_of_images(index)


def difference_of_models(flags: dict, configs: dict[str, dict]) -> str | None:
    """Return in words how a model differs from the one that a run was trained as; None where it does not.

    Args:
        flags: of the checkpoint of that run; without a configuration there is no difference.
        configs: the content of the model's configuration files by part, or of some of them.
    """
    trained = flags.get(MODEL)
    if trained is None:
        return None
    if isinstance(trained, str):  # of an earlier version
        return None if trained == hash_of_configs(configs) else 'the hash of its configuration files is another'
    before, now = arguments_of(trained), arguments_of(configs)
    for (part, name), value in now.items():
        if before[part, name] != value:
            return f'{name} of its {part} was {before[part, name]}, and is {value} now'
    return None


def arguments_of(configs: dict[str, dict]) -> dict[tuple[str, str], str]:
    """Return what the parts of a model are made with, as JSON by part and name; what a file leaves out has its default.

    Of the scheduler only SCHEDULER_DEFAULTS count.
    """
    arguments = {}
    for part, config in configs.items():
        defaults = SCHEDULER_DEFAULTS
        if part in PARTS:
            defaults = {}
            for name, parameter in inspect.signature(PARTS[part]).parameters.items():
                if name not in WITHOUT_EFFECT and parameter.default is not parameter.empty:
                    defaults[name] = parameter.default
        for name, default in defaults.items():
            arguments[part, name] = json.dumps(config.get(name, default), default=str)
    return arguments


def hash_of_configs(configs: dict[str, dict]) -> str:
    """Return the hash by which earlier versions compared models: of all that the files say but for libraries' notes."""
    content = {}
    for part, config in configs.items():
        content[part] = {key: value for key, value in config.items() if not key.startswith('_')}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
