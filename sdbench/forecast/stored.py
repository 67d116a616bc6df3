"""Find the trace of a training step: in the package for Stable Diffusion 2, in the user's cache, or by tracing it once.

A trace is stored under everything that it depends on: the switches that change a step, the configuration of the model,
and the code that makes and counts the step. So a trace of other code or another model is never used.
`python -m benchmarks.forecast.traces` writes the file of the package. Only tracing needs torch.
"""
import ast
import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdbench.files import atomic_write
from sdbench.forecast.step import Step
from sdbench.models.folders import BUILT_IN, CONFIG_FILES
from sdbench.setup import Setup

ROOT = Path(__file__).parents[2]
PACKAGED = Path(__file__).with_name('stable-diffusion-2-base.json.gz')
# The code that makes and counts a step: files, and the functions in them that matter (None: all)
TRACED_CODE = {'benchmark.py': ('__init__', 'forward', 'encode', 'text_states', 'encoder_autocast', 'loss',
                                'build_model', 'build_optimizer'),
               'sdbench/forecast/count.py': None, 'sdbench/forecast/trace.py': None}
TRACING_PACKAGES = ('torch', 'diffusers', 'transformers')
# The attributes of a setup that do not change the trace of an eager step. A new attribute of Setup is not among them.
NOT_TRACED = ('device', 'num_devices', 'gpus_per_node', 'network_gbits', 'latents', 'batch_size', 'microbatch',
              'compile', 'compile_blocks', 'fused_optimizer', 'cudnn_benchmark', 'allreduce_precision', 'use_ema',
              'ema_start', 'clip_grad_norm')
USUAL = Setup(num_devices=1, batch_size=1).with_defaults()


def step_of(setup: Setup) -> Step:
    """Return the eager step from which the step of a run with this setup, which has defaults, is calculated.

    compiling.py derives compiled steps from one kind of eager step. All fused attention, such as xformers', is counted
    in the same way, and so are both half precisions.
    """
    traced = replace(setup, **{name: getattr(USUAL, name) for name in NOT_TRACED})
    if setup.compile:
        traced = replace(traced, channels_last=True, half_precision_norms=True)
    return find_step(replace(traced, attention='math' if setup.attention == 'math' else 'sdpa',
                             precision='fp32' if setup.precision == 'fp32' else 'amp_bf16',
                             encoder_precision='fp32' if setup.encoder_precision == 'fp32' else 'bf16'))


@functools.cache
def find_step(traced: Setup) -> Step:
    """Return a step that is in the package or in the cache, or trace it and put it into the cache."""
    name = name_of(traced)
    identity = [hash_of_model(traced.model_name), hash_of_code()]
    packaged = read_packaged()
    if packaged['identity'] == identity and name in packaged['steps']:
        return Step.of_json(packaged['steps'][name])

    versions = [importlib.metadata.version(package) for package in TRACING_PACKAGES]
    key = hashlib.sha256(json.dumps([*identity, *versions, name]).encode()).hexdigest()
    path = Path(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'), 'sdbench', f'{key[:32]}.json')
    with contextlib.suppress(OSError, ValueError):  # no such file, or not one of ours
        return Step.of_json(json.loads(path.read_bytes()))
    print(f'tracing a step of {traced.model_name} at {traced.image_size} pixels once; later forecasts find it in '
          f'{path.parent}', file=sys.stderr, flush=True)
    step = traced_now(traced)
    with contextlib.suppress(OSError):  # a cache that cannot be written: the next forecast traces again
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(step.to_json().encode())
    return step


def traced_now(traced: Setup) -> Step:
    # These are imported here, because they take seconds.
    from benchmark import build_model, build_optimizer
    from sdbench.forecast.trace import trace
    return trace(traced, build_model, build_optimizer)


def name_of(traced: Setup) -> str:
    """Return a name for a trace of a model: the values that are not the usual ones."""
    values = {name: value for name, value in vars(traced).items() if value != getattr(USUAL, name)}
    values.pop('model_name', None)  # the hash of its configuration replaces it
    return json.dumps(values, sort_keys=True)


@functools.cache
def configs_of(name: str) -> dict[str, dict]:
    """Return the configuration of each network of a model. Raises UserError if there is no such model."""
    if name in BUILT_IN:
        return {part: json.loads((BUILT_IN[name] / part / file).read_bytes()) for part, file in CONFIG_FILES.items()}
    from sdbench.models.loading import find_model  # needs torch, to check the configuration
    return find_model(name).configs


def hash_of_model(name: str) -> str:
    return hashlib.sha256(json.dumps(configs_of(name), sort_keys=True).encode()).hexdigest()


def has_same_unet(name: str, other: str) -> bool:
    """Tell whether the UNets of two models have the same shape. A value that one does not state is the usual one."""
    first, second = (configs_of(each)['unet'] for each in (name, other))
    stated = (first.keys() & second.keys()) - {'_class_name', '_diffusers_version', '_name_or_path', 'sample_size'}
    return all(first[key] == second[key] for key in stated)


@functools.cache
def hash_of_code() -> str:
    """Return a hash of TRACED_CODE that does not depend on comments, docstrings and the layout of the text."""
    digest = hashlib.sha256()
    for file, names in TRACED_CODE.items():
        tree = ast.parse((ROOT / file).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node):
                del node.body[0]
        for node in ast.walk(tree) if names else [tree]:
            if not names or isinstance(node, ast.FunctionDef) and node.name in names:
                digest.update(ast.unparse(node).encode())
    return digest.hexdigest()


@functools.cache
def read_packaged() -> dict[str, Any]:
    """Return the traces in the package: `identity` as `find_step` has it, and `steps` by name."""
    return json.loads(gzip.decompress(PACKAGED.read_bytes()))
