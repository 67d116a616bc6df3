"""Exponential moving average (EMA) of the weights with one shadow copy and no other model-sized memory.

The averaged UNet of a trained model, as a folder that a diffusers pipeline loads:

    ema.get_ema_model(trainer.state.model).unet.save_pretrained('averaged/unet')
"""
import copy
from typing import Any

import torch
from composer.core import Algorithm, Event, State, Time, TimeUnit
from composer.loggers import Logger


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel's wrapper, or the model itself."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that the optimizer moves, by the names they have on one rank as on many."""
    return {name: parameter for name, parameter in unwrapped(model).named_parameters() if parameter.requires_grad}


def pair_by_name(averages: dict[str, torch.Tensor], model: torch.nn.Module) -> tuple[list, list]:
    """The averages and the model's trainable parameters, in the same order.

    Raises:
        ValueError: a name or a shape is in one and not in the other.
    """
    live = trainable_parameters(model)
    different = {(name, tensor.shape) for name, tensor in averages.items()} ^ \
                {(name, tensor.shape) for name, tensor in live.items()}
    if different:
        raise ValueError(f'the EMA and the model differ in {len(different)} parameters, first {min(different)[0]}; '
                         'load the checkpoint into the model that it was saved from')
    return [averages[name] for name in live], list(live.values())


class ShadowModel:
    """A copy of a model's trainable parameters, by name. Frozen ones never move, so they need no average.

    Args:
        model: gives names, devices, memory formats and, without `averages`, the values.
        averages: values from a checkpoint, by name.
    """

    def __init__(self, model: torch.nn.Module, averages: dict[str, torch.Tensor] | None = None):
        self.parameters = {name: p.detach().clone() for name, p in trainable_parameters(model).items()}
        if averages is not None:
            saved, _ = pair_by_name(averages, model)
            for parameter, value in zip(self.parameters.values(), saved, strict=True):
                parameter.copy_(value)


@torch.no_grad()
def compute_ema(model: torch.nn.Module, ema_model: ShadowModel, smoothing: float = 0.99) -> None:
    """Move the averages towards the model's weights, in place: ema = smoothing * ema + (1 - smoothing) * weight.

    Args:
        model: with the latest weights.
        ema_model: the shadow of the same model.
        smoothing: share of the old average that is kept, from 0 (copy the weights) to 1 (keep the average).
    """
    averages, weights = pair_by_name(ema_model.parameters, model)
    torch._foreach_lerp_(averages, weights, 1 - smoothing)  # fused over all tensors, without temporaries


class EMA(Algorithm):
    """Trains on the live weights, evaluates and predicts on their exponential moving average.

    Args:
        half_life: time after which today's weights count half, in batches ('1000ba') or epochs ('2ep').
            Default: '1000ba', unless `smoothing` is given.
        smoothing: share of the average that an update keeps, between 0 and 1; instead of `half_life`, and not
            adjusted for `update_interval`.
        ema_start: training before the first update, as a share ('0.5dur') or in batches or epochs.
        update_interval: time between updates, in the units of `half_life`. Default: 1 of them.

    Raises:
        ValueError: both of the first two are given, or one is out of range, or a time has the wrong unit.
    """

    def __init__(self, half_life: str | None = None, smoothing: float | None = None, ema_start: str = '0.0dur',
                 update_interval: str | None = None):
        if half_life is not None and smoothing is not None:
            raise ValueError(f'EMA takes half_life {half_life} or smoothing {smoothing}, not both')
        life = Time.from_timestring(half_life or '1000ba')
        unit = life.unit if smoothing is None else TimeUnit.BATCH
        self.update_interval = Time.from_timestring(update_interval) if update_interval else Time(1, unit)
        if smoothing is None and self.update_interval.unit != life.unit:
            raise ValueError(f'EMA half_life {half_life} and update_interval {update_interval} need the same unit')
        if life.value <= 0:
            raise ValueError(f'EMA half_life {half_life} is not positive')
        if self.update_interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or self.update_interval.value < 1:
            raise ValueError(f'EMA update_interval {self.update_interval} is not in whole batches (ba) or epochs (ep)')
        self.smoothing = 2 ** (-self.update_interval.value / life.value) if smoothing is None else smoothing
        if not 0 <= self.smoothing < 1:
            raise ValueError(f'EMA smoothing {smoothing} is not between 0 and 1')
        self.ema_start = Time.from_timestring(ema_start)
        self.ema_model: ShadowModel | None = None
        self.ema_started = False  # the first update copies the weights, so that random ones are never averaged in
        self.ema_weights_active = False
        self._loaded: dict[str, torch.Tensor] | None = None

    def __repr__(self) -> str:  # Composer keeps it in checkpoints
        return f'EMA(smoothing={self.smoothing}, ema_start={self.ema_start}, update_interval={self.update_interval})'

    def match(self, event: Event, state: State) -> bool:
        if event in (Event.BATCH_END, Event.EPOCH_END):
            return self._update_is_due(event, state)
        return event in (Event.FIT_START, Event.EVAL_START, Event.EVAL_END, Event.PREDICT_START, Event.PREDICT_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self._ensure_shadow(state.model)  # at FIT_START: after ranks agree
        if event in (Event.BATCH_END, Event.EPOCH_END):
            compute_ema(state.model, self.ema_model, self.smoothing if self.ema_started else 0.0)
            self.ema_started = True
        elif event in (Event.EVAL_START, Event.PREDICT_START) and self.ema_started and not self.ema_weights_active:
            self._swap(state.model)
        elif event in (Event.EVAL_END, Event.PREDICT_END) and self.ema_weights_active:
            self._swap(state.model)

    def get_ema_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """A model that shares memory with the averages, and with `model` what is not averaged. `model` is not touched.

        Raises:
            ValueError: no update was made yet, or the averages are swapped into `model` for an evaluation.
        """
        if not self.ema_started or self.ema_weights_active:
            raise ValueError('there is no average beside the model: call this after the first EMA update, '
                             'and not during an evaluation')
        self._ensure_shadow(model)
        averages, weights = pair_by_name(self.ema_model.parameters, model)
        model = unwrapped(model)
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        shared |= {id(w): torch.nn.Parameter(a, requires_grad=False) for a, w in zip(averages, weights, strict=True)}
        return copy.deepcopy(model, memo=shared)

    def state_dict(self) -> dict[str, Any]:
        averages = self.ema_model.parameters if self.ema_model else {}
        return {**super().state_dict(), 'ema_model': averages, 'ema_started': self.ema_started}

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        self._loaded, self.ema_started, self.ema_model = state['ema_model'], state['ema_started'], None

    def _update_is_due(self, event: Event, state: State) -> bool:
        unit = self.update_interval.unit
        if event != (Event.BATCH_END if unit == TimeUnit.BATCH else Event.EPOCH_END):
            return False
        elapsed = state.get_elapsed_duration() if self.ema_start.unit == TimeUnit.DURATION \
            else state.timestamp.get(self.ema_start.unit)
        return elapsed >= self.ema_start and state.timestamp.get(unit).value % self.update_interval.value == 0

    def _ensure_shadow(self, model: torch.nn.Module) -> None:
        if self.ema_model is None:
            self.ema_model, self._loaded = ShadowModel(model, self._loaded), None

    def _swap(self, model: torch.nn.Module) -> None:
        """Exchange the averages with the live weights by their storage: nothing is copied."""
        for average, weight in zip(*pair_by_name(self.ema_model.parameters, model), strict=True):
            average.data, weight.data = weight.data, average.data
        self.ema_weights_active = not self.ema_weights_active
