"""Exponential moving average (EMA) of the weights with one shadow copy and no other model-sized memory.

It is used like Composer's own algorithm, and loads its checkpoints. `export.py` exports the EMA weights of the UNet to
diffusers. In your own program, `get_ema_model` returns a model that shares memory with the EMA weights:

    ema.get_ema_model(trainer.state.model).unet.save_pretrained('ema/unet')
"""
import copy
from typing import Any

import torch
from composer.algorithms.ema import ema as composers
from composer.core import Event, State
from composer.loggers import Logger

DDP_PREFIX = 'module.'  # Composer's EMA saves names with this prefix if it ran on several devices


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DistributedDataParallel's wrapper, or the model itself."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def require_same_names(ema: dict[str, torch.Tensor], raw: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if EMA weights and raw weights differ in a name or a shape."""
    different = {(name, tensor.shape) for name, tensor in ema.items()} ^ \
                {(name, tensor.shape) for name, tensor in raw.items()}
    if different:
        raise ValueError(f'the EMA and the model differ in {len(different)} parameters, first {min(different)[0]}; '
                         'load the checkpoint into the model that it was saved from')


class ShadowModel(composers.EMAParameters):
    """A copy of a model's trainable parameters and buffers by name, like Composer's EMAParameters.

    Frozen parameters never change, so they need no EMA. `transfer_ema_params(model)` copies it into a model.

    Args:
        model: gives names, devices, memory formats and, without `state`, the values.
        state: values from a checkpoint, as in `EMA.state_dict()['ema_model']`. Buffers that it lacks are copied from
            the model.

    Raises ValueError if the values are from another model.
    """

    def __init__(self, model: torch.nn.Module, state: dict[str, dict[str, torch.Tensor]] | None = None):
        super().__init__(unwrap_model(model))
        if state is not None:
            saved = {name.removeprefix(DDP_PREFIX): tensor for name, tensor in state['named_parameters_dict'].items()}
            require_same_names(saved, self.named_parameters_dict)
            saved |= {name.removeprefix(DDP_PREFIX): tensor for name, tensor in state['named_buffers_dict'].items()}
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                tensor.copy_(saved.get(name, tensor))


def pair_by_name(ema_model: torch.nn.Module | ShadowModel, model: torch.nn.Module) -> tuple[list, list]:
    """Return the EMA tensors and, in the same order, the tensors of `model` that they follow.

    Raises ValueError if names or shapes differ.
    """
    # A ShadowModel has no frozen parameters, but a module has them.
    model = unwrap_model(model)
    raw = dict(model.named_parameters())
    if isinstance(ema_model, torch.nn.Module):
        ema_model = unwrap_model(ema_model)
    else:
        raw = {name: parameter for name, parameter in raw.items() if parameter.requires_grad}
    raw |= dict(model.named_buffers())

    # Pair by name. The order may differ between two models, and a wrong pair would be averaged without an error.
    ema = dict(ema_model.named_parameters()) | dict(ema_model.named_buffers())
    require_same_names(ema, raw)
    return [ema[name] for name in raw], list(raw.values())


def compute_ema(model: torch.nn.Module, ema_model: torch.nn.Module | ShadowModel, smoothing: float = 0.99) -> None:
    """Move the EMA weights towards the model's weights, in place: ema = smoothing * ema + (1 - smoothing) * weight.

    Args:
        model: the model with the latest weights.
        ema_model: the EMA weights: a module with the same structure, or a ShadowModel.
        smoothing: fraction of the old EMA weights that is kept, from 0 (copy the weights) to 1 (no change).
    """
    update_in_place(*pair_by_name(ema_model, model), smoothing)


@torch.no_grad()
def update_in_place(ema: list[torch.Tensor], weights: list[torch.Tensor], smoothing: float) -> None:
    """Move each EMA tensor in place towards the weight at the same position, as `compute_ema` does."""
    floating_ema = []
    floating_weights = []
    for average, weight in zip(ema, weights, strict=True):
        if average.is_floating_point():
            floating_ema.append(average)
            floating_weights.append(weight)
        else:
            average.copy_(weight)  # integers, such as position ids, are copied
    if floating_ema:
        torch._foreach_lerp_(floating_ema, floating_weights, 1 - smoothing)  # all tensors, without temporaries


class EMA(composers.EMA):
    """Trains the raw weights, and evaluates and predicts with their exponential moving average (EMA).

    It works like Composer's EMA, with these differences: `smoothing` needs no `update_interval`, predictions use the
    EMA weights, the raw weights are saved as the model's weights, and an update needs less memory.

    Args:
        half_life: time after which today's weights count half in the EMA, in batches ('1000ba') or epochs ('2ep').
            Default: '1000ba', unless `smoothing` is given.
        smoothing: fraction of the EMA weights that an update keeps, between 0 and 1. It replaces `half_life`, and is
            not adjusted for `update_interval`.
        ema_start: time at which the EMA starts as a copy of the weights: a fraction of the training ('0.5dur'), batches
            or epochs.
        update_interval: time between updates, in the unit of `half_life`. Default: one batch or epoch.

    Raises ValueError if both `half_life` and `smoothing` are given, or a time has the wrong unit.
    """

    def __init__(self, half_life: str | None = None, smoothing: float | None = None, ema_start: str = '0.0dur',
                 update_interval: str | None = None):
        if smoothing is None:
            half_life = half_life or '1000ba'
        else:
            update_interval = update_interval or '1ba'
        super().__init__(half_life, smoothing, ema_start, update_interval)
        self._given_half_life = half_life
        self.from_start = self.ema_start.value == 0  # with initial weights; a loaded state replaces this
        self.ema_model = composers.EMAParameters(None)  # until a model is known
        self._pairs: tuple | None = None  # a model, and both lists of `pair_by_name`

    def __repr__(self) -> str:  # Composer saves it in checkpoints
        return f'EMA(smoothing={self.smoothing}, ema_start={self.ema_start}, update_interval={self.update_interval})'

    def state_dict(self) -> dict[str, Any]:
        """Return Composer's state, and by what `export.py` tells whether the EMA is still near the initial weights."""
        return super().state_dict() | {'half_life': self._given_half_life, 'from_start': self.from_start}

    def match(self, event: Event, state: State) -> bool:
        """Tell whether `apply` has something to do at an event, and start the EMA when its time has come.

        As in Composer, the EMA starts as a copy of the weights at the end of the first batch (or epoch) after
        `ema_start`. Random initial weights are therefore never averaged in. Updates follow at multiples of
        `update_interval`.
        """
        if event == self.update_event:
            if not self.ema_started and self._should_start(state):
                update_in_place(*self._paired(state.model), 0)
                self.ema_started = True
            time = state.timestamp.get(self.update_interval.unit)
            return self.ema_started and time.value % self.update_interval.value == 0
        if event in (Event.EVAL_START, Event.PREDICT_START):
            return self.ema_started
        if event in (Event.BATCH_START, Event.EVAL_END, Event.PREDICT_END):
            return self.ema_weights_active
        return event == Event.FIT_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Create the shadow, update it, or swap EMA and raw weights, depending on the event."""
        if event == Event.FIT_START:
            self._pairs = None  # a program may have changed its model since the last fit
            self._paired(state.model)  # creates the shadow: by now all ranks have the same weights
        if event in (Event.BATCH_END, Event.EPOCH_END):
            update_in_place(*self._paired(state.model), self.smoothing)
            return
        needs_ema = event in (Event.EVAL_START, Event.PREDICT_START)
        if needs_ema != self.ema_weights_active:
            self.swap_weights(state.model)

    def get_ema_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model that shares memory with the EMA weights, and with `model` for frozen parameters.

        `model` does not change. Raises ValueError before the first update, and during an evaluation, while the EMA
        weights are swapped into `model`.
        """
        if not self.ema_started or self.ema_weights_active:
            raise ValueError('there are no EMA weights apart from the model: call this after the first EMA update, '
                             'and not during an evaluation')
        # A deep copy uses the tensors in its memo instead of copying them. Put the EMA tensors there for the trained
        # parameters, and the model's own tensors for all others.
        shared = {id(tensor): tensor for tensor in (*unwrap_model(model).parameters(), *unwrap_model(model).buffers())}
        for average, raw in zip(*self._paired(model), strict=True):
            if isinstance(raw, torch.nn.Parameter):
                average = torch.nn.Parameter(average, requires_grad=False)
            shared[id(raw)] = average
        return copy.deepcopy(unwrap_model(model), memo=shared)

    def _paired(self, model: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the pairs of `pair_by_name`, kept from batch to batch because pairing takes as long as an update.

        The first call creates the shadow on the model's device, with the values of a loaded checkpoint or else of the
        model.
        """
        if not isinstance(self.ema_model, ShadowModel):
            self.ema_model = ShadowModel(model, vars(self.ema_model) if self.ema_started else None)
            self._pairs = None
        if self._pairs is None or self._pairs[0] is not model:
            self._pairs = (model, *pair_by_name(self.ema_model, model))
        _, ema, weights = self._pairs
        return ema, weights

    def swap_weights(self, model: torch.nn.Module) -> None:
        """Swap the EMA weights and the raw weights by exchanging their storage, without a copy."""
        for average, raw in zip(*self._paired(model), strict=True):
            average.data, raw.data = raw.data, average.data
        self.ema_weights_active = not self.ema_weights_active
