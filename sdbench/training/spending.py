"""Count the GPU-hours and dollars of a training."""
import math
import time

import torch
from composer.utils import dist

from sdbench.costs import price_of
from sdbench.errors import UserError
from sdbench.flags.times import to_batches
from sdbench.flags.train import Run


class Spending:
    """Counts the GPU-hours of a training, including the runs that it resumes, and tells when --budget is spent.

    Counting starts when the object is created. Hours and dollars are kept in the checkpoints, so the time between a
    killed run's last checkpoint and its end is lost. If earlier hours had no price, they cost today's price.

    Args:
        settings: the settings of the run.
        before: what the checkpoint to resume from has kept, from `kept_in`.

    Raises UserError if there is a budget but no price for this device, or if the resumed runs have spent it.
    """

    def __init__(self, settings: Run, before: dict):
        self.budget = settings.budget
        self.device = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'
        price = price_of(self.device, settings.dollars_per_gpu_hour) if settings.dollars_per_gpu_hour else math.nan
        self.price = None if math.isnan(price) else price  # dollars per hour and device
        if self.budget is not None and self.price is None:
            raise UserError(f'--budget {self.budget:g} needs a price for {self.device}; give it as '
                            f'--dollars_per_gpu_hour "{self.device}=2.5"')
        self._hours_before = before.get('gpu_hours', 0.0)
        self._dollars_before = before.get('dollars')  # perhaps on another GPU
        if self._dollars_before is None:
            self._dollars_before = self._hours_before * (self.price or 0)
        self._start = time.monotonic()
        # A cluster may restart the command again and again, and must not pay for more batches.
        if before.get('batch', math.inf) < to_batches(settings.max_duration) and self.is_spent():
            raise UserError(f'--budget {self.budget:g} is spent: this training has cost ${self._dollars_before:,.2f} '
                            f'after batch {before["batch"]}; give a larger --budget')

    def so_far(self) -> dict[str, float | None]:
        """Return the `gpu_hours` of all devices so far, and their cost in `dollars`, or None without a price."""
        hours = (time.monotonic() - self._start) / 3600 * dist.get_world_size()  # GPU-hours of this run
        dollars = None
        if self.price is not None:
            dollars = self._dollars_before + hours * self.price
        return {'gpu_hours': self._hours_before + hours, 'dollars': dollars}

    def is_spent(self) -> bool:
        """Tell whether the budget is spent."""
        return self.budget is not None and self.so_far()['dollars'] >= self.budget
