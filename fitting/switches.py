"""The switches that train the same model faster or in less memory: those of the model, and those of the process."""
import contextlib
import functools
from collections.abc import Iterator

import torch
from composer import Callback
from composer.core import State
from composer.trainer import trainer
from composer.utils import dist, get_device
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from transformers.models.clip.modeling_clip import CLIPEncoder

from fitting.compiling import compile_blocks, compile_in_place, compile_mode
from inputs.errors import one_line
from models.diffusion_model import DiffusionModel
from models.norms import switch_norms_to_half
from settings.train import Train

SDPA_BACKENDS = {'flash': SDPBackend.FLASH_ATTENTION, 'efficient': SDPBackend.EFFICIENT_ATTENTION,
                 'math': SDPBackend.MATH, 'cudnn': SDPBackend.CUDNN_ATTENTION}
UNET_BLOCKS = (ResnetBlock2D, BasicTransformerBlock)


def apply_switches(model: DiffusionModel, settings: Train) -> None:
    """Train the same model faster or in less memory.

    Raises ValueError if xformers is not built for this torch or this GPU.
    """
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
    if orders_kernels(settings.attention):
        model.encoders_attention = torchs_attention_order
    if settings.attention == 'xformers':
        try:
            for part in convolutional:
                part.enable_xformers_memory_efficient_attention()
        except Exception as error:  # diffusers tries it once on the GPU, and passes on whatever xformers raises
            raise ValueError(f'--attention xformers does not work here ({one_line(error)}); use sdpa') from None
    if settings.gradient_checkpointing:
        model.unet.enable_gradient_checkpointing()
    if settings.compile:
        compile_model(model, settings)


def compile_model(model: DiffusionModel, settings: Train) -> None:
    """Compile the UNet, whole or block by block, the VAE's encoder, and the layers of the text encoder."""
    mode = compile_mode(settings.compile)
    # the text encoder's masks and embeddings around its layers are made in other ways in each version of transformers
    whole = [module for module in model.text_encoder.modules() if isinstance(module, CLIPEncoder)]
    if settings.compile_blocks:
        compile_blocks(model.unet, UNET_BLOCKS, mode)
    else:
        whole.append(model.unet)
    if model.vae is not None:
        whole.append(model.vae.encoder)
    compile_in_place(whole, mode)


@contextlib.contextmanager
def process_switches(settings: Train) -> Iterator[None]:
    """A context with the switches of the whole process: the order of attention's kernels, and cuDNN's search.

    They stay on in backward passes too, where gradient checkpointing computes attention again, and must do so by the
    same kernels. The frozen encoders leave the order alone, by `torchs_attention_order`.
    """
    searched_before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark or searched_before
    try:
        with attention_order(settings.attention):
            yield
    finally:
        torch.backends.cudnn.benchmark = searched_before


def orders_kernels(attention: str) -> bool:
    """Whether --attention is an order of torch's kernels."""
    return attention not in ('sdpa', 'xformers')


def attention_order(attention: str):
    """A context in which torch tries its kernels of attention in the order of --attention, the others after them.

    cuDNN's come last unless they are named: its version is checked for their faults only then.
    """
    if not orders_kernels(attention):
        return contextlib.nullcontext()
    torchs_order()  # before it is changed
    order = dict.fromkeys([*attention.split(','), *SDPA_BACKENDS])
    return sdpa_kernel([SDPA_BACKENDS[name] for name in order], set_priority=True)


@functools.cache
def torchs_order() -> list[SDPBackend]:
    """torch's own order of the kernels of attention, asked for once, before anyone changes it.

    Newer torch settles it when attention first runs on a GPU, and puts cuDNN's first on some; so a tiny one runs here.
    """
    tiny = torch.ones(1, 1, 64, 64, dtype=torch.half, device=get_device()._device)
    torch.nn.functional.scaled_dot_product_attention(tiny, tiny, tiny)
    return [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]


def torchs_attention_order():
    """A context in which torch tries its kernels in its own order: for the frozen encoders, whatever --attention says.

    The text encoder attends 77 by 77 with a mask, for which kernels differ from those for the UNet in speed and faults.
    """
    return sdpa_kernel(torchs_order(), set_priority=True)


@contextlib.contextmanager
def gradients_in_buckets(is_one_microbatch: bool) -> Iterator[None]:
    """A context in which Composer's Trainer makes a DDP whose gradients are views of its buckets, if that saves memory.

    It saves a copy of all gradients, 3.2 GiB of Stable Diffusion 2, where a batch is a single microbatch. Where there
    are several, gradients add up outside the buckets in all but the last. Composer 0.32.1 gives DDP no such argument.
    Test: test_gradients_lie_in_the_buckets_where_a_batch_is_one_microbatch.
    """
    composers_own = trainer.prepare_ddp_module

    def prepare_ddp_module(module: torch.nn.Module, find_unused_parameters: bool) -> torch.nn.Module:
        return DistributedDataParallel(module, find_unused_parameters=find_unused_parameters,
                                       gradient_as_bucket_view=True)

    if is_one_microbatch:
        trainer.prepare_ddp_module = prepare_ddp_module
    try:
        yield
    finally:
        trainer.prepare_ddp_module = composers_own


def switch_callbacks(settings: Train) -> list[Callback]:
    """What the switches do within a step."""
    callbacks = []
    if settings.cast_weights_once:
        callbacks.append(CastWeightsOnce())
    if settings.allreduce_precision == 'bf16':
        callbacks.append(AllReduceInBf16())
    return callbacks


class CastWeightsOnce(Callback):
    """Autocast's half-precision copies of the weights serve all microbatches of a batch.

    Autocast keeps them until its outermost context ends, which otherwise is that of a microbatch. So there is one
    around the batch, which is itself switched off: what runs between the microbatches, the backward passes above all,
    is not cast. It ends before the optimizer changes the weights.
    """

    def __init__(self):
        self._batch = contextlib.ExitStack()

    def before_train_batch(self, state: State, logger) -> None:
        device = next(state.model.parameters()).device.type
        self._batch.enter_context(torch.autocast(device, enabled=False))

    def after_train_batch(self, state: State, logger) -> None:
        self._batch.close()


class AllReduceInBf16(Callback):
    """DDP sends the gradients in bf16, half the bytes between GPUs; the optimizer has them in float32 again."""

    def fit_start(self, state: State, logger) -> None:
        if dist.get_world_size() > 1:
            state.model.register_comm_hook(None, bf16_compress_hook)
