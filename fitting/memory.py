"""What a training needs in memory, item by item, and what there is; said before anything large is built.

It is counted on a model without memory, which the switches of the run have been applied to, so that a switch changes
what is counted by what it does. What lasts follows from the parameters; a step is traced (fitting/fake_step.py).
"""
import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from composer.utils import dist
from torch.overrides import TorchFunctionMode

from fitting.fake_step import FakeModel, StepMemory, trace_step
from inputs.captions import CAPTION_LENGTH
from inputs.shards import LATENTS
from measuring.gpu_monitor import GIB
from models.diffusion_model import DiffusionModel
from models.loading import ModelFiles
from settings.train import Train

# What a GPU takes beside the tensors that are counted: CUDA itself, its libraries' workspaces, and memory that the
# allocator holds in pieces. milabench's H200, by NVML: 55 GiB where 49.7 are counted, 115.6 where 106.2 are.
UNCOUNTED_SHARE = 0.12
ADAM_MOMENTS = 2  # that the optimizer keeps of each weight
DRAWS = {torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_, torch.nn.init.normal_, torch.Tensor.normal_}


def build_outline(settings: Train, files: ModelFiles, latents: bool,
                  build_model: Callable[..., DiffusionModel]) -> DiffusionModel:
    """The model of a run with its switches on the meta device: shapes and types alone. Random state stays as it is.

    Args:
        settings: of the run.
        files: of the model.
        latents: the training needs no VAE.
        build_model: makes the real one.
    """
    # sizes need no weights, and xformers, which asks for a GPU, keeps what torch's fused attention keeps
    settings = dataclasses.replace(settings, attention='sdpa')
    files = dataclasses.replace(files, pretrained=False)
    with torch.random.fork_rng(devices=[]), NothingIsDrawn():
        return build_model(settings, latents, torch.device('meta'), files)


class NothingIsDrawn(TorchFunctionMode):
    """Leaves out the first values of weights, of which an outline has none: on the meta device, too, they take time."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in DRAWS:
            return kwargs['tensor'] if 'tensor' in kwargs else args[0]
        return function(*args, **kwargs)


def refuse_too_little_memory(settings: Train, outline: DiffusionModel) -> None:
    """Raises ValueError if the training surely needs more memory than its GPU has, or its ranks find on this host.

    Nothing is counted that depends on the microbatch, which can be made smaller.
    """
    needed = lasting_bytes(settings, outline, dist.get_world_size())
    if torch.cuda.is_available():
        there = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        place = 'this GPU'
    else:
        there = memory_of_host()
        place = 'this machine'
        needed = {item: number * dist.get_local_world_size() for item, number in needed.items()}
    total = sum(needed.values())
    if total > there:
        raise ValueError(f'this training needs at least {total / GIB:.1f} GiB of memory ({in_words(needed)}), and '
                         f'{place} has {there / GIB:.1f}; the same with a tiny model runs here: '
                         f'{tiny_command(settings.remote, latents=outline.vae is None)}')


def lasting_bytes(settings: Train, model: DiffusionModel, num_devices: int) -> dict[str, int]:
    """Bytes of a device, by item, that stay from step to step, whatever the microbatch, and the gradients.

    Args:
        settings: of the run.
        model: one without memory will do.
        num_devices: that share the batch.
    """
    unet = parameter_bytes(model.unet)
    needed = {'weights': unet, 'gradients': unet}
    for item, copies in copies_of_weights(settings.use_ema).items():
        needed[item] = copies * unet
    needed['text encoder'] = parameter_bytes(model.text_encoder)
    if model.vae is not None:
        needed['VAE'] = parameter_bytes(model.vae)
    if not torch.cuda.is_available() and settings.dry_run is None:  # where a batch stays on the host
        needed['batch'] = synthetic_batch_bytes(settings, num_devices)
    return needed


def copies_of_weights(use_ema: bool) -> dict[str, int]:
    """How many tensors as large as a weight a run holds beside it and its gradient, whatever the microbatch."""
    copies = {'Adam moments': ADAM_MOMENTS}
    if use_ema:
        copies['average of the weights'] = 1
    return copies


def has_buckets(microbatch: int, share: int, num_devices: int) -> bool:
    """Whether DistributedDataParallel holds a copy of all gradients in its buckets.

    Where a device's share of the batch is one microbatch, the gradients lie in them (fitting/switches.py).
    """
    return num_devices > 1 and microbatch < share


def parameter_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def synthetic_batch_bytes(settings: Train, num_devices: int) -> int:
    """Of a rank's share of a synthetic batch; a streamed one may be smaller than `image_size`, so that it is 0."""
    device_batch = settings.batch_size // num_devices
    if settings.use_synth_data:
        return device_batch * 3 * settings.image_size ** 2  # uint8
    if settings.use_synth_latents:
        return device_batch * 8 * (settings.image_size // 8) ** 2 * 2  # float16
    return 0


def trace_training(settings: Train, fake: FakeModel, fused_attention: bool = True) -> StepMemory:
    """The memory of a step of the run, encoders included, on a device, for any microbatch."""
    def make_batch(size: int) -> dict[str, torch.Tensor]:
        batch = {'caption': torch.zeros(size, CAPTION_LENGTH, dtype=torch.long)}
        side = settings.image_size
        if fake.model.vae is None:
            batch[LATENTS] = torch.zeros(size, 8, side // 8, side // 8, dtype=torch.half)
        else:
            batch['image'] = torch.zeros(size, 3, side, side)
        return batch
    return trace_step(fake, make_batch, settings.precision, fused_attention)


def needed_bytes(settings: Train, lasting: dict[str, int], step: StepMemory, microbatch: int,
                 num_devices: int) -> dict[str, int]:
    """Bytes of a device, by item, at the peak of a step: within a microbatch, or while the optimizer works.

    Args:
        settings: of the run.
        lasting: of `lasting_bytes`.
        step: of `trace_training`.
        microbatch: images that go through the model at once.
        num_devices: that share the batch.
    """
    share = settings.batch_size // num_devices
    if has_buckets(microbatch, share, num_devices):
        lasting = lasting | {'gradient buckets': lasting['gradients']}
    within = lasting | step.peak(microbatch, accumulated=microbatch < share)
    updating = dict(lasting)
    if not settings.fused_optimizer:
        updating['working memory'] = lasting['weights']  # what Adam divides by, of all weights at once
    return max(within, updating, key=lambda items: sum(items.values()))


def taken_on_a_gpu(needed: dict[str, int]) -> float:
    """Bytes that a GPU needs for these items, with what cannot be counted."""
    return sum(needed.values()) * (1 + UNCOUNTED_SHARE)


def memory_of_host(cgroups: Path = Path('/sys/fs/cgroup'), membership: Path = Path('/proc/self/cgroup')) -> int:
    """Bytes that the processes of this host may take: its memory, or less where a control group limits them."""
    return min([psutil.virtual_memory().total, *cgroup_limits(cgroups, membership)])


def cgroup_limits(cgroups: Path, membership: Path) -> list[int]:
    """The limits of memory, in bytes, of this process's control groups, as containers and SLURM set them.

    Args:
        cgroups: where the control groups are mounted.
        membership: names this process's groups, a line `id:controllers:path` each, without controllers in version 2.
    """
    if not membership.is_file():
        return []
    limits = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(':', 2)
        if not controllers:
            root, name = cgroups, 'memory.max'
        elif 'memory' in controllers.split(','):
            root, name = cgroups / 'memory', 'memory.limit_in_bytes'
        else:
            continue
        group = root / path.lstrip('/')
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / name).is_file():
                limits.append((folder / name).read_text().strip())
    return [int(limit) for limit in limits if limit != 'max']


def in_words(needed: dict[str, int]) -> str:
    """The items in GiB; what is less than a tenth of one is left out."""
    return ', '.join(f'{item} {number / GIB:.1f}' for item, number in needed.items() if number >= 0.05 * GIB)


def tiny_command(remote: str | None, latents: bool) -> str:
    """The command that trains the tiny model on the same data; latents are another model's, and drawn instead."""
    source = '--use_synth_data'
    if latents:
        source = '--use_synth_latents'
    elif remote:
        source = f'--remote {shlex.quote(remote)}'
    return f'python benchmark.py --use_ema {source} --model_name tiny --image_size 64 --batch_size 4'
