"""The switches that train the same model faster or in less memory: those of the model, and those of the process."""
import contextlib

import torch
import torch.nn.functional as F
from composer import ComposerModel
from composer.utils import dist
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.clip.modeling_clip import CLIPEncoder

from sdbench.errors import UserError, one_line
from sdbench.flags.train import Train

# What torch may use for each --attention: the first of these that can.
SDPA_BACKENDS = {
    'cudnn': [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    'flash': [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    'efficient': [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    'math': [SDPBackend.MATH],
}
UNET_BLOCKS = (ResnetBlock2D, BasicTransformerBlock)
MOST_KINDS_OF_BLOCKS = 64  # Stable Diffusion 2's UNet has 15 kinds of residual blocks and 4 of transformer blocks


def apply_switches(model: ComposerModel, settings: Train) -> None:
    """Train the same model faster or in less memory.

    Raises UserError if xformers is not built for this torch or this GPU.
    """
    # memory format and precision
    convolutional = [model.unet]
    if model.vae is not None:
        convolutional.append(model.vae)
    if settings.channels_last:
        for part in convolutional:
            part.to(memory_format=torch.channels_last)
    if settings.half_precision_norms:
        switch_norms_to_half(model.unet)
        if model.vae is not None:
            switch_norms_to_half(model.vae.encoder)  # which has five times as many elements in its norms as the UNet

    # attention, and activations that are computed again
    if settings.attention == 'xformers':
        try:
            for part in convolutional:
                part.enable_xformers_memory_efficient_attention()
        except Exception as error:  # diffusers tries it once on the GPU, and passes on whatever xformers raises
            raise UserError(f'--attention xformers does not work here ({one_line(error)}); use sdpa') from None
    if settings.gradient_checkpointing:
        model.unet.enable_gradient_checkpointing()

    # kernels that are joined
    if settings.compile:
        compile_model(model, settings)


def compile_model(model: ComposerModel, settings: Train) -> None:
    """Compile the UNet, whole or block by block, the VAE's encoder, and the layers of the text encoder.

    Blocks of one kind and size share a graph.
    """
    # the text encoder's masks and embeddings around its layers are made in other ways in each version of transformers
    modules = [module for module in model.text_encoder.modules() if isinstance(module, CLIPEncoder)]
    if settings.compile_blocks:
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, MOST_KINDS_OF_BLOCKS)  # of one class, for all its sizes
        modules += [module for module in model.unet.modules() if type(module) in UNET_BLOCKS]

        # Attentions that compute alike share a processor, a function without weights. diffusers gives each its own, and
        # torch compiles a block again for each: Stable Diffusion 2's UNet has 34 graphs so, and 22 with shared ones.
        shared = {}
        for processor in model.unet.attn_processors.values():
            shared.setdefault(type(processor), processor)
        model.unet.set_attn_processor({name: shared[type(processor)]
                                       for name, processor in model.unet.attn_processors.items()})
    else:
        modules.append(model.unet)
    if model.vae is not None:
        modules.append(model.vae.encoder)
    compile_in_place(modules, settings.compile)


def compile_in_place(modules: list[torch.nn.Module], mode: bool | str) -> None:
    """Compile each module when it is first called, for the shapes that come. The names in checkpoints stay.

    Args:
        modules: each becomes one graph, or the run fails.
        mode: of torch.compile, as --compile has it; True is torch's default.

    Left alone, torch 2.7.0 makes no single graph of a module in two places:
    - Under DDP it cuts a graph where a bucket of gradients ends, so that they travel while others are computed: the
      UNet of Stable Diffusion 2 in 71 graphs. With gradient checkpointing that crashes (BackendCompilerFailed).
    - After 8 compilations of one function (`recompile_limit`) it goes on without compiling, and only warns.
    """
    config = torch._dynamo.config
    config.optimize_ddp = False
    config.fail_on_recompile_limit_hit = True
    for module in modules:
        module.compile(dynamic=False, mode=None if mode is True else mode)


def process_switches(settings: Train) -> contextlib.AbstractContextManager:
    """Switch cuDNN's search on or off, and make a context in which torch uses the kernel of --attention where it can.

    It does so in backward passes too, where gradient checkpointing computes attention again. SDPA_BACKENDS says what
    takes what it cannot: without that, newer versions of torch put cuDNN's first.
    """
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    if settings.attention in ('sdpa', 'xformers'):
        return contextlib.nullcontext()
    return sdpa_kernel(SDPA_BACKENDS[settings.attention], set_priority=True)


def switch_allreduce(model: torch.nn.Module, settings: Train) -> None:
    """Let DDP send the gradients in bf16, half the bytes between GPUs; the optimizer has them in float32 again."""
    if settings.allreduce_precision == 'bf16' and dist.get_world_size() > 1:
        model.register_comm_hook(None, bf16_compress_hook)


# Norms that move fewer bytes in a step; weights stay

class HalfGroupNorm(torch.nn.GroupNorm):
    """torch's group norm of (B, C, ...), computed in the type of its input."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(image.dtype)
        bias = self.bias.to(image.dtype)
        with torch.autocast(image.device.type, enabled=False):
            return F.group_norm(image, self.num_groups, weight, bias, self.eps)


class HalfLayerNorm(torch.nn.LayerNorm):
    """torch's layer norm, computed in the type of its input."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(states.dtype)
        bias = self.bias.to(states.dtype)
        with torch.autocast(states.device.type, enabled=False):
            return F.layer_norm(states, self.normalized_shape, weight, bias, self.eps)


HALF_NORMS = {torch.nn.GroupNorm: HalfGroupNorm, torch.nn.LayerNorm: HalfLayerNorm}


def switch_norms_to_half(network: torch.nn.Module) -> None:
    """Let all norms of a network compute in the type of their input, which is bf16 or fp16 under autocast.

    Autocast computes norms in float32, makes float32 of what follows them up to the next convolution, and keeps it so
    for the backward pass. The norms stay the same objects with the same weights; only their class changes.
    """
    for norm in network.modules():
        if type(norm) in HALF_NORMS:
            norm.__class__ = HALF_NORMS[type(norm)]
