"""Count the GPU-hours and dollars of a training, and end it when its budget is spent."""
import math
import time

import torch
from composer import Callback
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist

from sdbench.costs import price_of
from sdbench.errors import UserError
from sdbench.flags.train import Run
from sdbench.training.ranks import GracefulStop


class Spending(Callback):
    """Counts the GPU-hours of a training, including the runs that it resumes, and ends it when --budget is spent.

    Counting starts when the object is created. Hours and dollars are kept in the checkpoints, so the time between a
    killed run's last checkpoint and its end is lost. If earlier hours had no price, they cost today's price.

    Logs `cost/gpu_hours` and, if there is a price, `cost/dollars`.

    Args:
        settings: the settings of the run.
        stop: ends the training.

    Raises UserError if there is a budget but no price for this device.
    """

    def __init__(self, settings: Run, stop: GracefulStop):
        self.budget = settings.budget
        self.price = None  # dollars per hour and device
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'
        price = price_of(device, settings.dollars_per_gpu_hour)
        if settings.dollars_per_gpu_hour and not math.isnan(price):
            self.price = price
        elif self.budget is not None:
            raise UserError(f'--budget {self.budget:g} needs a price for {device}; give it as '
                            f'--dollars_per_gpu_hour "{device}=2.5"')
        self._device = device
        self._stop = stop
        self._hours_before = 0.0  # GPU-hours of the resumed runs
        self._dollars_before = 0.0  # cost of the resumed runs, perhaps on another GPU
        self._start = time.monotonic()

    def so_far(self) -> dict[str, float | None]:
        """Return the `gpu_hours` of all devices so far, and their cost in `dollars`, or None without a price."""
        hours = (time.monotonic() - self._start) / 3600 * dist.get_world_size()  # GPU-hours of this run
        dollars = None
        if self.price is not None:
            dollars = self._dollars_before + hours * self.price
        return {'gpu_hours': self._hours_before + hours, 'dollars': dollars}

    @property
    def was_spent(self) -> bool:
        """Tell whether the resumed runs have already spent the budget."""
        return self.budget is not None and self._dollars_before >= self.budget

    def state_dict(self) -> dict:
        return self.so_far() | {'device': self._device}

    def load_state_dict(self, state: dict) -> None:
        self._hours_before = state.get('gpu_hours', 0.0)
        self._dollars_before = state.get('dollars')
        if self._dollars_before is None:
            self._dollars_before = self._hours_before * (self.price or 0)

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.was_spent:
            self._stop.end()  # a cluster may restart the command again and again, and must not pay for more batches

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the curves, and end the training when the budget is spent, unless it ends with this batch anyway."""
        spent = self.so_far()
        logger.log_metrics({'cost/gpu_hours': spent['gpu_hours']})
        if spent['dollars'] is None:
            return
        logger.log_metrics({'cost/dollars': spent['dollars']})
        is_last = state.timestamp.batch.value >= state.max_duration.value
        if self.budget is not None and spent['dollars'] >= self.budget and not is_last:
            self._stop.end()

    def figures(self, all_ranks: bool) -> dict:
        """Return the cost for the record."""
        return self.so_far()
