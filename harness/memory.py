"""What a training needs in memory at least, item by item, and what there is; said before anything large is built."""
import argparse
import dataclasses
from pathlib import Path

import psutil
import torch
from composer.utils import dist
from diffusers import UNet2DConditionModel
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CLIPTextConfig

from inputs.captions import CAPTION_LENGTH
from models.loading import ModelFiles, build_text_encoder, build_vae

GIB = 2 ** 30
HALF_DTYPES = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}


def refuse_too_little_memory(args: argparse.Namespace, files: ModelFiles, latents: bool) -> None:
    """ValueError: the training surely needs more memory than its GPU has, or than its ranks find on this host.

    On a GPU nothing is counted that depends on the microbatch, which can be made smaller; nor where it is searched for.
    """
    needed = lasting_bytes(args, files, latents)
    if torch.cuda.is_available():
        there = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        place = 'this GPU'
    else:
        if not args.microbatch_search:
            add_activations(needed, args, files)
        needed = {item: number * dist.get_local_world_size() for item, number in needed.items()}
        there = memory_of_host()
        place = 'this machine'
    total = sum(needed.values())
    if total > there:
        raise ValueError(f'this training needs at least {total / GIB:.1f} GiB of memory ({in_words(needed)}), and '
                         f'{place} has {there / GIB:.1f}; the same with a tiny model runs here: {tiny_command(args)}')


def add_activations(needed: dict[str, int], args: argparse.Namespace, files: ModelFiles) -> None:
    """Add what a microbatch takes at its peak to the items of `lasting_bytes`."""
    needed['activations'] = args.device_train_microbatch_size * activation_bytes(args, files)
    if args.device_train_microbatch_size == args.batch_size // dist.get_world_size():
        smaller = min('gradients', 'activations', key=needed.get)
        del needed[smaller]  # with a single microbatch the gradients come as the activations go


def lasting_bytes(args: argparse.Namespace, files: ModelFiles, latents: bool) -> dict[str, int]:
    """Bytes of a device, by item, that stay from step to step, whatever the microbatch. No parameter is allocated.

    Args:
        args: the flags of benchmark.py, with their defaults filled in.
        files: of the model.
        latents: the training needs no VAE.
    """
    files = dataclasses.replace(files, pretrained=False)  # sizes need no weights
    with torch.device('meta'):
        unet = parameter_bytes(UNet2DConditionModel.from_config(files.configs['unet']))
        text_encoder = parameter_bytes(build_text_encoder(files, args.encoder_precision))
        vae = 0
        if not latents:
            vae = parameter_bytes(build_vae(files, args.encoder_precision))
    needed = {'weights': unet, 'gradients': unet, 'Adam moments': 2 * unet}
    if args.use_ema:
        needed['average of the weights'] = unet
    if dist.get_world_size() > 1:
        needed['gradient buckets'] = unet  # DistributedDataParallel's, beside the gradients themselves
    needed['text encoder'] = text_encoder
    needed['VAE'] = vae
    needed['batch'] = synthetic_batch_bytes(args)
    return needed


def parameter_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def synthetic_batch_bytes(args: argparse.Namespace) -> int:
    """Of a device's share of a synthetic batch; a streamed one may be smaller than `image_size`, so that it is 0."""
    device_batch = args.batch_size // dist.get_world_size()
    if args.use_synth_data:
        return device_batch * 3 * args.image_size ** 2  # uint8
    if args.use_synth_latents:
        return device_batch * 8 * (args.image_size // 8) ** 2 * 2  # float16
    return 0


def activation_bytes(args: argparse.Namespace, files: ModelFiles) -> int:
    """What autograd keeps of one image between the UNet's forward and its backward.

    The UNet runs on fake tensors, which have shapes but no memory, and for which torch chooses its kernels as for real
    ones; on meta tensors attention would take the slow path and keep its matrices, twice as much in all.

    In float32 on a CPU, what `tiny` held at its peak was 1.03 times this. Its resident memory grew by up to 2.1 times
    this, because malloc keeps what is freed. With --gradient_checkpointing the block that is computed again comes on
    top. Of mixed precision this is a lower bound: all is in half precision, where autocast leaves the norms in float32.
    """
    text = CLIPTextConfig(**files.configs['text_encoder'])
    side = args.image_size // 8
    dtype = HALF_DTYPES.get(args.precision, torch.float32)
    kept = {}  # bytes of each storage

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode():
        unet = UNet2DConditionModel.from_config(files.configs['unet']).train()
        torch.nn.Module.to(unet, dtype)  # diffusers' own `to` warns of parts that stay in fp32
        if args.gradient_checkpointing:
            unet.enable_gradient_checkpointing()
        latents = torch.empty(1, unet.config.in_channels, side, side, dtype=dtype)
        states = torch.empty(1, CAPTION_LENGTH, text.hidden_size, dtype=dtype)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            prediction = unet(latents, torch.zeros(1, dtype=torch.long), states).sample  # keeps the graph alive
        weights = {parameter.untyped_storage()._cdata for parameter in unet.parameters()}
    del prediction
    return sum(number for storage, number in kept.items() if storage not in weights)


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


def tiny_command(args: argparse.Namespace) -> str:
    """The command that trains the tiny model on the same data."""
    source = '--use_synth_data'
    if args.use_synth_latents:
        source = '--use_synth_latents'
    if args.remote:
        source = f'--remote {args.remote}'
    return f'composer -n 1 benchmark.py --use_ema {source} --model_name tiny --image_size 64 --batch_size 4'
