"""Exponential moving average (EMA) of the weights with one shadow copy and no other model-sized memory.

It is used as Composer's own algorithm is, and loads what that one has saved. `export.py` takes the averaged UNet to
diffusers; in a program of your own, `get_ema_model` gives a model that shares memory with the averages:

    ema.get_ema_model(trainer.state.model).unet.save_pretrained('averaged/unet')
"""
import copy
from collections.abc import ItemsView
from typing import Any

import torch
from composer.core import Algorithm, Event, State, Time, TimeUnit
from composer.loggers import Logger

DDP_PREFIX = 'module.'  # of the names in what Composer saves on several devices


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel's wrapper, or the model itself."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that the optimizer moves, by the names they have on one rank as on many."""
    return {name: parameter for name, parameter in unwrapped(model).named_parameters() if parameter.requires_grad}


def require_same_names(averages: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> None:
    """Raises ValueError if a name or a shape is in one of the two and not in the other."""
    different = {(name, tensor.shape) for name, tensor in averages.items()} ^ \
                {(name, tensor.shape) for name, tensor in live.items()}
    if different:
        raise ValueError(f'the EMA and the model differ in {len(different)} parameters, first {min(different)[0]}; '
                         'load the checkpoint into the model that it was saved from')


class ShadowModel:
    """A copy of a model's trainable parameters and of its buffers, by name. Frozen parameters never move, so they need
    no average.

    Args:
        model: gives names, devices, memory formats and, without `state`, the values.
        state: values from a checkpoint, in the form of `state_dict`. Buffers that it lacks start as the model's.
    """

    def __init__(self, model: torch.nn.Module, state: dict[str, dict[str, torch.Tensor]] | None = None):
        self.named_parameters_dict = {name: p.detach().clone() for name, p in trainable_parameters(model).items()}
        self.named_buffers_dict = {name: b.detach().clone() for name, b in unwrapped(model).named_buffers()}
        if state is not None:
            require_same_names(state['named_parameters_dict'], self.named_parameters_dict)
            saved = state['named_buffers_dict'] | state['named_parameters_dict']
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                tensor.copy_(saved.get(name, tensor))

    def named_parameters(self) -> ItemsView[str, torch.Tensor]:
        return self.named_parameters_dict.items()

    def named_buffers(self) -> ItemsView[str, torch.Tensor]:
        return self.named_buffers_dict.items()

    def parameters(self) -> list[torch.Tensor]:
        return list(self.named_parameters_dict.values())

    def buffers(self) -> list[torch.Tensor]:
        return list(self.named_buffers_dict.values())

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module) -> None:
        """Put the averages into `model`, in place of its own values. Raises ValueError if they are of another model.

            state = training.load_checkpoint('checkpoints/latest-rank0.pt')['state']
            ShadowModel(model, dict(state['algorithms'])['EMA']['ema_model']).copy_to(model)
        """
        averages, live = pair_by_name(self, model)
        torch._foreach_copy_(live, averages)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The averages as Composer's EMA stores its own."""
        return {'named_parameters_dict': self.named_parameters_dict, 'named_buffers_dict': self.named_buffers_dict}


def pair_by_name(ema_model: torch.nn.Module | ShadowModel, model: torch.nn.Module) -> tuple[list, list]:
    """The averages, and in the same order the tensors of `model` that they are of. Raises ValueError if they differ."""
    if isinstance(ema_model, torch.nn.Module):
        ema_model = unwrapped(ema_model)
        live = dict(unwrapped(model).named_parameters())
    else:
        live = trainable_parameters(model)
    live |= dict(unwrapped(model).named_buffers())
    averages = dict(ema_model.named_parameters()) | dict(ema_model.named_buffers())
    require_same_names(averages, live)
    return [averages[name] for name in live], list(live.values())


@torch.no_grad()
def compute_ema(model: torch.nn.Module, ema_model: torch.nn.Module | ShadowModel, smoothing: float = 0.99) -> None:
    """Move the averages towards the model's weights, in place: ema = smoothing * ema + (1 - smoothing) * weight.

    Args:
        model: with the latest weights.
        ema_model: a module of the same structure, or the shadow of the same model.
        smoothing: share of the old average that is kept, from 0 (copy the weights) to 1 (keep the average).
    """
    averages = []
    weights = []
    for average, weight in zip(*pair_by_name(ema_model, model), strict=True):
        if average.is_floating_point():
            averages.append(average)
            weights.append(weight)
        else:
            average_whole_numbers(average, weight, smoothing)
    if averages:
        torch._foreach_lerp_(averages, weights, 1 - smoothing)  # fused over all tensors, without temporaries


def average_whole_numbers(average: torch.Tensor, live: torch.Tensor, smoothing: float) -> None:
    """The same for a buffer of whole numbers, cut to whole ones as Composer does.

    Equal ones stay what they are, where Composer's rounding can make the position 29 a 28.
    """
    moved = (average * smoothing + live * (1 - smoothing)).to(average.dtype)
    average.copy_(torch.where(average == live, average, moved))


class EMA(Algorithm):
    """Trains on the live weights, evaluates and predicts on their exponential moving average.

    Args:
        half_life: time after which today's weights count half, in batches ('1000ba') or epochs ('2ep').
            Default: '1000ba', unless `smoothing` is given.
        smoothing: share of the average that an update keeps, between 0 and 1; instead of `half_life`, and not
            adjusted for `update_interval`.
        ema_start: training before the average starts, as a copy of the weights: a share ('0.5dur'), batches or epochs.
        update_interval: time between updates, in the units of `half_life`. Default: 1 of them.

    Raises:
        Raises ValueError if both of the first two are given, or one is out of range, or a time has the wrong unit.
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
        if self.update_interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or self.update_interval.value < 1:
            raise ValueError(f'EMA update_interval {self.update_interval} is not in whole batches (ba) or epochs (ep)')
        self.update_event = Event.BATCH_END if self.update_interval.unit == TimeUnit.BATCH else Event.EPOCH_END
        if life.value <= 0 or smoothing is not None and not 0 <= smoothing < 1:
            raise ValueError(f'EMA takes a half_life above 0 or a smoothing from 0 to below 1, not {half_life} or '
                             f'{smoothing}')
        self.smoothing = 2 ** (-self.update_interval.value / life.value) if smoothing is None else smoothing
        self.ema_start = Time.from_timestring(ema_start)
        self.ema_model: ShadowModel | None = None
        self.ema_started = False
        self.ema_weights_active = False  # whether the model holds the averages, and the shadow the live weights
        self._loaded: dict[str, dict[str, torch.Tensor]] | None = None

    def __repr__(self) -> str:  # Composer keeps it in checkpoints
        return f'EMA(smoothing={self.smoothing}, ema_start={self.ema_start}, update_interval={self.update_interval})'

    def match(self, event: Event, state: State) -> bool:
        """Whether `apply` has something to do.

        As in Composer, the average starts here: at the first batch (or epoch) from `ema_start` on it is a copy of the
        weights, so that random ones are never averaged in. Updates follow at whole intervals.
        """
        if event == self.update_event:
            if not self.ema_started and self._should_start(state):
                self._start(state.model)
            time = state.timestamp.get(self.update_interval.unit)
            return self.ema_started and time.value % self.update_interval.value == 0
        if event in (Event.EVAL_START, Event.PREDICT_START):
            return self.ema_started
        if event in (Event.BATCH_START, Event.EVAL_END, Event.PREDICT_END):
            return self.ema_weights_active
        return event == Event.FIT_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self._ensure_shadow(state.model)  # at FIT_START: after ranks agree
        if event in (Event.BATCH_END, Event.EPOCH_END):
            compute_ema(state.model, self.ema_model, self.smoothing)
            return
        averages_wanted = event in (Event.EVAL_START, Event.PREDICT_START)
        if averages_wanted != self.ema_weights_active:
            self._swap(state.model)

    def get_ema_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """A model that shares memory with the averages, and with `model` what is not averaged. `model` is not touched.

        Raises:
            Raises ValueError if no update was made yet, or the averages are swapped into `model` for an evaluation.
        """
        if not self.ema_started or self.ema_weights_active:
            raise ValueError('there is no average beside the model: call this after the first EMA update, '
                             'and not during an evaluation')
        return self._view(model)

    def get_training_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The same with the live weights, during an evaluation. Raises ValueError if they are in `model` itself."""
        if not self.ema_weights_active:
            raise ValueError('the live weights are in the model itself: call this during an evaluation only')
        return self._view(model)

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of Composer's own EMA."""
        averages = {'named_parameters_dict': {}, 'named_buffers_dict': {}}
        if self.ema_model:
            averages = self.ema_model.state_dict()
        return {**super().state_dict(), 'ema_model': averages, 'ema_weights_active': self.ema_weights_active,
                'ema_started': self.ema_started}

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Take up a state of this class or of Composer's, since 0.13."""
        self._loaded = {kind: without_prefix(tensors) for kind, tensors in state['ema_model'].items()}
        self.ema_started = state['ema_started']
        self.ema_weights_active = state.get('ema_weights_active', False)
        self.ema_model = None

    def _should_start(self, state: State) -> bool:
        if self.ema_start.unit == TimeUnit.DURATION:
            elapsed = state.get_elapsed_duration()
        else:
            elapsed = state.timestamp.get(self.ema_start.unit)
        return elapsed is not None and elapsed >= self.ema_start

    def _start(self, model: torch.nn.Module) -> None:
        """Make the averages a copy of the weights of now."""
        self._ensure_shadow(model)
        with torch.no_grad():
            torch._foreach_copy_(*pair_by_name(self.ema_model, model))
        self.ema_started = True

    def _ensure_shadow(self, model: torch.nn.Module) -> None:
        if self.ema_model is None:
            self.ema_model = ShadowModel(model, self._loaded)
            self._loaded = None

    def _view(self, model: torch.nn.Module) -> torch.nn.Module:
        """A model with the tensors of the shadow, and of `model` those that the shadow lacks; nothing is copied."""
        self._ensure_shadow(model)
        shared = {id(tensor): tensor for tensor in (*unwrapped(model).parameters(), *unwrapped(model).buffers())}
        for average, live in zip(*pair_by_name(self.ema_model, model), strict=True):
            if isinstance(live, torch.nn.Parameter):
                average = torch.nn.Parameter(average, requires_grad=False)
            shared[id(live)] = average
        return copy.deepcopy(unwrapped(model), memo=shared)

    def _swap(self, model: torch.nn.Module) -> None:
        """Exchange the averages with the live weights by their storage: nothing is copied."""
        for average, live in zip(*pair_by_name(self.ema_model, model), strict=True):
            average.data, live.data = live.data, average.data
        self.ema_weights_active = not self.ema_weights_active


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors by the names that they have without DistributedDataParallel's wrapper."""
    if all(name.startswith(DDP_PREFIX) for name in tensors):
        return {name.removeprefix(DDP_PREFIX): tensor for name, tensor in tensors.items()}
    return tensors
