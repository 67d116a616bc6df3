"""The memory of a step by calculation is what the tensors of a real step hold.

What a kernel takes for itself is left out of both: it differs from one kind of CPU to another.
"""
import copy
import functools
import weakref

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import benchmark
from fitting.cuda_autocast import cuda_rules
from fitting.fake_step import AUTOCAST_DTYPES, ITEMS, FakeModel, StepMemory, build_fake
from fitting.memory import build_outline, trace_training
from models.loading import find_model
from settings.train import Train
from tests.runs import settings_of

IMAGES = 3  # not the number that is traced


def arguments(*flags: str) -> Train:
    return settings_of('--dry_run', '--model_name', 'tiny', '--batch_size', '3', *flags)


def fake_model(settings: Train) -> FakeModel:
    files = find_model(settings.model_name)
    return build_fake(build_outline(settings, files, False, benchmark.build_model))


@functools.cache  # of tests that look at the same step
def calculated(*flags: str, fused_attention: bool = True) -> StepMemory:
    """A step of images of 128 pixels."""
    settings = arguments('--image_size', '128', *flags)
    return trace_training(settings, fake_model(settings), fused_attention)


class TensorsPeak(TorchDispatchMode):
    """The most bytes that tensors hold at once, beside those of a model that was there before."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
        self.alive = 0
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        self.peak = max(self.peak, self.alive)
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.alive += storage.nbytes()
            weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())

    def remove(self, address: int, size: int) -> None:
        self.known.remove(address)
        self.alive -= size


def measured(settings: Train, fused_attention: bool = True) -> tuple[int, int]:
    """Of a real step: the most bytes that tensors held, and the bytes that autograd kept, in two passes."""
    model = benchmark.build_model(settings, False).train()
    side = settings.image_size
    backend = SDPBackend.FLASH_ATTENTION if fused_attention else SDPBackend.MATH
    kept = {}  # the tensors themselves, so that no address is used twice

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def make_batch():
        return {'image': torch.zeros(IMAGES, 3, side, side), 'caption': torch.zeros(IMAGES, 77, dtype=torch.long)}

    def loss(batch):
        dtype = AUTOCAST_DTYPES.get(settings.precision)
        with torch.autocast('cpu', dtype, enabled=dtype is not None):
            return model.loss(model(batch), batch)

    with cuda_rules(cache=True), sdpa_kernel(backend):
        with TensorsPeak(model) as tensors:
            batch = make_batch()
            composers_copy = copy.deepcopy(batch)
            loss(batch).backward()
        del composers_copy
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss(batch)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)
    return tensors.peak, saved


@pytest.mark.parametrize('flags, fused_attention', [
    ([], True), ([], False), pytest.param(['--precision', 'fp32'], True, marks=pytest.mark.long),
    pytest.param(['--encoder_precision', 'fp32'], True, marks=pytest.mark.long)], ids=str)
def test_the_peak_is_that_of_real_tensors_under_cudas_rules(flags, fused_attention):
    settings = arguments('--image_size', '128', *flags)
    step = calculated(*flags, fused_attention=fused_attention)
    peak, saved = measured(settings, fused_attention)
    assert sum(step.peak(IMAGES, accumulated=False).values()) == pytest.approx(peak, rel=0.01)
    kept = [ITEMS.index('activations'), ITEMS.index('cast weights')]
    alive = step.fixed + IMAGES * step.per_image
    assert alive[:, kept].sum(axis=1).max() == pytest.approx(saved, rel=0.01)


def test_with_gradient_checkpointing_the_peak_is_that_of_real_tensors():
    settings = arguments('--image_size', '128', '--gradient_checkpointing')
    peak, _ = measured(settings)
    step = calculated('--gradient_checkpointing')
    assert sum(step.peak(IMAGES, accumulated=False).values()) == pytest.approx(peak, rel=0.01)


def test_without_a_fused_kernel_attentions_matrices_are_kept():
    settings = arguments('--image_size', '128')
    matrices = 0  # elements of an image, each kept in float32 at least

    def count(module, inputs, keywords, output):
        nonlocal matrices
        queries = inputs[0].shape[1]
        text = keywords.get('encoder_hidden_states')
        keys = queries if text is None else text.shape[1]
        matrices += module.heads * queries * keys

    model = benchmark.build_model(settings, False).train()
    for module in model.unet.modules():
        if type(module).__name__ == 'Attention':
            module.register_forward_hook(count, with_kwargs=True)
    model({'image': torch.rand(1, 3, 128, 128), 'caption': torch.zeros(1, 77, dtype=torch.long)})
    column = ITEMS.index('activations')
    fused, matrix = (calculated(fused_attention=fused).per_image[:, column].max() for fused in (True, False))
    assert 4 * matrices <= matrix - fused < 12 * matrices
    assert matrices > 0


def test_gradients_of_an_earlier_microbatch_are_there_all_the_time():
    step = calculated()
    first, later = (step.peak(2, accumulated)['gradients'] for accumulated in (False, True))
    model = benchmark.build_model(arguments(), False)
    assert later == sum(weight.nbytes for weight in model.unet.parameters()) > first


def test_a_fake_step_leaves_no_trace(smallest_model):
    settings = arguments('--model_name', smallest_model, '--image_size', '32')
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    fake = fake_model(settings)
    trace_training(settings, fake)
    assert torch.equal(torch.rand(5), expected)
    assert all(weight.grad is None for weight in fake.model.parameters())
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.nn.functional.layer_norm(torch.ones(2, 6).bfloat16(), (6,)).dtype == torch.bfloat16
