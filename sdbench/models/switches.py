"""Apply the flags that train the same model faster or in less memory, to the model and to the process."""
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

# For each --attention, torch uses the first of these backends that supports the inputs.
SDPA_BACKENDS = {
    'cudnn': [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    'flash': [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    'efficient': [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    'math': [SDPBackend.MATH],
}
UNET_BLOCKS = (ResnetBlock2D, BasicTransformerBlock)
MOST_KINDS_OF_BLOCKS = 64  # Stable Diffusion 2's UNet has 15 kinds of residual blocks and 4 of transformer blocks


def apply_switches(model: ComposerModel, settings: Train) -> None:
    """Apply the switches to the model, in place. Raises UserError if xformers does not work here."""
    # Set memory format and precision first: compiling sees the result.
    convolutional = [model.unet]
    if model.vae is not None:
        convolutional.append(model.vae)
    if settings.channels_last:
        for part in convolutional:
            part.to(memory_format=torch.channels_last)
    if settings.half_precision_norms:
        switch_norms_to_half(model.unet)
        if model.vae is not None:
            switch_norms_to_half(model.vae.encoder)  # its norms have five times as many elements as the UNet's

    # Replace attention, and recompute activations to save memory.
    if settings.attention == 'xformers':
        try:
            for part in convolutional:
                part.enable_xformers_memory_efficient_attention()
        except Exception as error:  # diffusers runs it once on the GPU, and xformers raises many kinds of errors
            raise UserError(f'--attention xformers does not work here ({one_line(error)}); use sdpa') from None
    if settings.gradient_checkpointing:
        model.unet.enable_gradient_checkpointing()

    # Compile last.
    if settings.compile:
        compile_model(model, settings)


def compile_model(model: ComposerModel, settings: Train) -> None:
    """Compile the UNet (whole or block by block), the VAE's encoder, and the layers of the text encoder.

    Blocks of the same kind and size share a graph.
    """
    # Compile only the layers of the text encoder. The code around them differs between versions of transformers.
    modules = [module for module in model.text_encoder.modules() if isinstance(module, CLIPEncoder)]
    if settings.compile_blocks:
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, MOST_KINDS_OF_BLOCKS)  # per class, for all sizes of blocks
        modules += [module for module in model.unet.modules() if type(module) in UNET_BLOCKS]

        # Let all attentions of a kind share one processor, an object without weights. diffusers gives each attention a
        # separate one, and torch would compile equal blocks again for each: 34 graphs instead of 22 for the UNet of
        # Stable Diffusion 2.
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
    """Compile each module when it is first called, for fixed shapes. The names of tensors in checkpoints do not change.

    Each module becomes a single graph, or the run fails. `mode` is the value of --compile: a mode of torch.compile, or
    True for the default mode.

    By default torch 2.7.0 would not make single graphs in two cases:
    - Under DDP it cuts a graph at the end of each bucket of gradients, to start the bucket's all-reduce earlier. The
      UNet of Stable Diffusion 2 becomes 71 graphs, and gradient checkpointing crashes (BackendCompilerFailed).
    - After 8 compilations of one function (`recompile_limit`) it continues uncompiled, and only prints a warning.
    """
    config = torch._dynamo.config
    config.optimize_ddp = False
    config.fail_on_recompile_limit_hit = True
    for module in modules:
        module.compile(dynamic=False, mode=None if mode is True else mode)


def process_switches(settings: Train) -> contextlib.AbstractContextManager:
    """Switch cuDNN's search on or off, and return a context that makes torch use the kernel of --attention.

    The context also covers backward passes, because gradient checkpointing computes attention again there. Inputs that
    the kernel does not support go to the next one in SDPA_BACKENDS. Newer versions of torch would otherwise try cuDNN
    first.
    """
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    if settings.attention in ('sdpa', 'xformers'):
        return contextlib.nullcontext()
    return sdpa_kernel(SDPA_BACKENDS[settings.attention], set_priority=True)


def switch_allreduce(model: torch.nn.Module, settings: Train) -> None:
    """Make DDP all-reduce the gradients in bf16, which halves the traffic; the optimizer gets them in float32 again."""
    if settings.allreduce_precision == 'bf16' and dist.get_world_size() > 1:
        model.register_comm_hook(None, bf16_compress_hook)


# Norms in half precision, which read and write fewer bytes. Their weights stay in float32.

class HalfGroupNorm(torch.nn.GroupNorm):
    """torch's group norm for (B, C, ...), computed in the type of its input."""

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
    """Make all norms of a network compute in the type of their input, which is bf16 or fp16 under autocast.

    By default autocast computes norms in float32. Their outputs stay in float32 up to the next convolution, and are
    kept so for the backward pass. The norms stay the same objects with the same weights, and only their class changes.
    """
    for norm in network.modules():
        if type(norm) in HALF_NORMS:
            norm.__class__ = HALF_NORMS[type(norm)]
