"""Cache what every training in a process would compute again, which takes a tenth of a second or more for each item."""
import functools

import cpuinfo
import torch
from composer.utils import collect_env

import benchmark
import data
from sdbench.inputs.tokenizer import build_tokenizer, pipeline_tokenizer
from sdbench.models import flops, loading
from sdbench.training import weights

clip_tokenizer = functools.cache(build_tokenizer)  # CLIP's tokenizer
clip_pipeline_tokenizer = functools.cache(pipeline_tokenizer)
composer_commit = functools.cache(collect_env.get_composer_commit_hash)  # for each checkpoint
known_flops: dict[str, dict[str, int]] = {}


def known_tokenizer(name: str | None = None):
    return build_tokenizer(name) if name else clip_tokenizer()  # a tokenizer in a folder may change


def known_pipeline_tokenizer(name: str | None = None):
    if name:
        return pipeline_tokenizer(name)
    tokenizer = clip_pipeline_tokenizer()
    tokenizer.backend_tokenizer.no_padding()  # calls set these, and they would be exported
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def known_flops_of_an_image(model: benchmark.StableDiffusion, count=flops.flops_of_an_image) -> dict[str, int]:
    configs = [part.config for part in (model.unet, model.text_encoder, model.vae) if part is not None]
    key = repr((configs, model.image_size, model.latent_size))
    if key not in known_flops:
        known_flops[key] = count(model)
    return known_flops[key].copy()


def take() -> None:
    """Let the program use the cached results in this process."""
    benchmark.flops_of_an_image = flops.flops_of_an_image = known_flops_of_an_image
    clip_tokenizer()  # before the workers of a loader are forked
    data.build_tokenizer = loading.build_tokenizer = known_tokenizer
    weights.pipeline_tokenizer = known_pipeline_tokenizer
    collect_env.get_composer_commit_hash = composer_commit
    cpuinfo.get_cpu_info = dict  # empty: looking up the CPU's name is slow
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.1  # not 5 s, which leaving a loader takes for each worker
