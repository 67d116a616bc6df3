"""Exponential moving average (EMA) of the weights with one shadow copy and no other model-sized memory.

It is used like Composer's own algorithm, and loads its checkpoints. `export.py` exports the averaged UNet to diffusers.
In a program of your own, `get_ema_model` returns a model that shares memory with the averages:

    ema.get_ema_model(trainer.state.model).unet.save_pretrained('averaged/unet')
"""
import copy
from typing import Any

import torch
from composer.algorithms.ema import ema as composers
from composer.core import Event, State
from composer.loggers import Logger

DDP_PREFIX = 'module.'  # of the names in what Composer saves on several devices


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DistributedDataParallel's wrapper, or the model itself."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def require_same_names(averages: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if averages and live weights differ in a name or a shape."""
    different = {(name, tensor.shape) for name, tensor in averages.items()} ^ \
                {(name, tensor.shape) for name, tensor in live.items()}
    if different:
        raise ValueError(f'the EMA and the model differ in {len(different)} parameters, first {min(different)[0]}; '
                         'load the checkpoint into the model that it was saved from')


class ShadowModel(composers.EMAParameters):
    """A copy of a model's trainable parameters and buffers by name, like Composer's EMAParameters.

    Frozen parameters never change, so they need no average. `transfer_ema_params(model)` copies it into a model.

    Args:
        model: gives names, devices, memory formats and, without `state`, the values.
        state: values from a checkpoint, as `EMA.state_dict` has them in `ema_model`. Buffers that it lacks are copied
            from the model.

    Raises ValueError if the values are of another model.
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
    """Return the averages and, in the same order, the tensors of `model` that they average.

    Raises ValueError if names or shapes differ.
    """
    # a shadow has no frozen parameters, a whole module has them
    model = unwrap_model(model)
    live = dict(model.named_parameters())
    if isinstance(ema_model, torch.nn.Module):
        ema_model = unwrap_model(ema_model)
    else:
        live = {name: parameter for name, parameter in live.items() if parameter.requires_grad}
    live |= dict(model.named_buffers())

    # paired by name: of two models the order may differ, and a pair of others would be averaged in silence
    averages = dict(ema_model.named_parameters()) | dict(ema_model.named_buffers())
    require_same_names(averages, live)
    return [averages[name] for name in live], list(live.values())


def compute_ema(model: torch.nn.Module, ema_model: torch.nn.Module | ShadowModel, smoothing: float = 0.99) -> None:
    """Move the averages towards the model's weights, in place: ema = smoothing * ema + (1 - smoothing) * weight.

    Args:
        model: with the latest weights.
        ema_model: with the averages: a module of the same structure, or a ShadowModel.
        smoothing: share of the old average that is kept, from 0 (copy the weights) to 1 (keep the average).
    """
    move_averages(*pair_by_name(ema_model, model), smoothing)


@torch.no_grad()
def move_averages(averages: list[torch.Tensor], weights: list[torch.Tensor], smoothing: float) -> None:
    """Move each average in place towards the weight at the same position, as `compute_ema` does."""
    floating_averages = []
    floating_weights = []
    for average, weight in zip(averages, weights, strict=True):
        if average.is_floating_point():
            floating_averages.append(average)
            floating_weights.append(weight)
        else:
            average.copy_(weight)  # integers, such as position ids, have no average
    if floating_averages:
        # fused over all tensors, without temporaries
        torch._foreach_lerp_(floating_averages, floating_weights, 1 - smoothing)


class EMA(composers.EMA):
    """Trains on the live weights, evaluates and predicts on their exponential moving average.

    Arguments, state and updates are those of Composer's EMA, with these differences: `smoothing` needs no
    `update_interval`, predictions use the averages, the live weights are saved as the model's, and an update needs less
    memory.

    Args:
        half_life: time after which today's weights count half in the average, in batches ('1000ba') or epochs ('2ep').
            Default: '1000ba', unless `smoothing` is given.
        smoothing: share of the average that an update keeps, between 0 and 1; instead of `half_life`, and not
            adjusted for `update_interval`.
        ema_start: time at which the average starts as a copy of the weights: a share of the training ('0.5dur'),
            batches or epochs.
        update_interval: time between updates, in the units of `half_life`. Default: 1 of them.

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
        self.ema_model = composers.EMAParameters(None)  # until the model is there
        self._pairs: tuple | None = None  # a model, the averages, and in the same order its tensors

    def __repr__(self) -> str:  # Composer keeps it in checkpoints
        return f'EMA(smoothing={self.smoothing}, ema_start={self.ema_start}, update_interval={self.update_interval})'

    def state_dict(self) -> dict[str, Any]:
        """Return the state with what tells a young average: its half-life, and whether it is there from the start.

        A run that loads them keeps its own.
        """
        return super().state_dict() | {'half_life': self._given_half_life, 'from_start': self.ema_start.value == 0}

    def match(self, event: Event, state: State) -> bool:
        """Tell whether `apply` has something to do at an event.

        As in Composer, this also starts the average: at the end of the first batch (or epoch) from `ema_start` on, it
        becomes a copy of the weights, so that random ones are never averaged in. Updates follow at whole intervals.
        """
        if event == self.update_event:
            if not self.ema_started and self._should_start(state):
                move_averages(*self._paired(state.model), 0)
                self.ema_started = True
            time = state.timestamp.get(self.update_interval.unit)
            return self.ema_started and time.value % self.update_interval.value == 0
        if event in (Event.EVAL_START, Event.PREDICT_START):
            return self.ema_started
        if event in (Event.BATCH_START, Event.EVAL_END, Event.PREDICT_END):
            return self.ema_weights_active
        return event == Event.FIT_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self._ensure_shadow(state.model)  # at FIT_START: after ranks agree
        if event == Event.FIT_START:
            self._pairs = None  # a program may have changed its model since the last fit
        if event in (Event.BATCH_END, Event.EPOCH_END):
            move_averages(*self._paired(state.model), self.smoothing)
            return
        averages_wanted = event in (Event.EVAL_START, Event.PREDICT_START)
        if averages_wanted != self.ema_weights_active:
            self.swap_weights(state.model)

    def get_ema_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model that shares memory with the averages, and shares with `model` what is not averaged.

        `model` does not change. Raises ValueError before the first update, and while the averages are swapped into
        `model` for an evaluation.
        """
        if not self.ema_started or self.ema_weights_active:
            raise ValueError('there is no average apart from the model: call this after the first EMA update, '
                             'and not during an evaluation')
        # A deep copy takes what is in its memo as it is: of the copy the averages are the parameters, and all else is
        # the model's own.
        self._ensure_shadow(model)
        shared = {id(tensor): tensor for tensor in (*unwrap_model(model).parameters(), *unwrap_model(model).buffers())}
        for average, live in zip(*pair_by_name(self.ema_model, model), strict=True):
            if isinstance(live, torch.nn.Parameter):
                average = torch.nn.Parameter(average, requires_grad=False)
            shared[id(live)] = average
        return copy.deepcopy(unwrap_model(model), memo=shared)

    def _ensure_shadow(self, model: torch.nn.Module) -> None:
        """Make the shadow, with the values of a loaded checkpoint or else of the model, on the model's device."""
        if not isinstance(self.ema_model, ShadowModel):
            self.ema_model = ShadowModel(model, vars(self.ema_model) if self.ema_started else None)
            self._pairs = None

    def _paired(self, model: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return `pair_by_name` of the averages and `model`.

        The pairs are kept from batch to batch: pairing takes as long as an update.
        """
        self._ensure_shadow(model)
        if self._pairs is None or self._pairs[0] is not model:
            self._pairs = (model, *pair_by_name(self.ema_model, model))
        _, averages, weights = self._pairs
        return averages, weights

    def swap_weights(self, model: torch.nn.Module) -> None:
        """Swap the averages and the live weights by exchanging their storage, without a copy."""
        for average, live in zip(*pair_by_name(self.ema_model, model), strict=True):
            average.data, live.data = live.data, average.data
        self.ema_weights_active = not self.ema_weights_active
