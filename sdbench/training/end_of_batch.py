"""Measure, decide, evaluate, generate images and save, in this order, between two batches of a training."""
import math
import sys
import time
from typing import Any

import torch
from composer import Callback, Trainer
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist
from tqdm import tqdm

from sdbench.costs import price_of
from sdbench.errors import UserError, redacted
from sdbench.flags.times import is_due, to_batches
from sdbench.flags.train import Run
from sdbench.inputs.shards import index_hash, was_trained_on
from sdbench.measuring import Measurement
from sdbench.process import progress_bar
from sdbench.training.checkpoints import CheckpointSaver, load_training
from sdbench.training.ranks import GracefulStop
from sdbench.training.resuming import DATA
from sdbench.training.sampling import Sampling

METRIC = 'MeanSquaredError'  # name of the evaluation's metric, which Composer logs as metrics/eval/MeanSquaredError


class Spending:
    """Counts the GPU-hours of a training, including the runs that it resumes, and tells when --budget is spent.

    Counting starts when the object is created. Hours and dollars are kept in the checkpoints, so the time between a
    killed run's last checkpoint and its end is lost. If the resumed run had no price, all earlier hours are counted at
    the price of this run. `before` is what the checkpoint to resume from has kept, from `kept_in`.

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
        # Hours by name of the device, because the runs may have been on different GPUs. Earlier versions kept a sum.
        earlier = {before.get('device', self.device): before.get('gpu_hours', 0.0)}
        self._hours_before = before.get('gpu_hours_by_device', earlier)
        self._dollars_before = before.get('dollars')
        if self._dollars_before is None:
            self._dollars_before = sum(self._hours_before.values()) * (self.price or 0)
        self._start = time.monotonic()
        # A cluster may restart the command again and again, and must not pay for more batches.
        is_unfinished = before.get('batch', math.inf) < to_batches(settings.max_duration)
        if is_unfinished and self.budget is not None and self._dollars_before >= self.budget:
            raise UserError(f'--budget {self.budget:g} is spent: this training has cost ${self._dollars_before:,.2f} '
                            f'after batch {before["batch"]}; give a larger --budget')

    def so_far(self) -> dict[str, Any]:
        """Return `gpu_hours` and `gpu_hours_by_device` so far, and their cost in `dollars`, or None without a price."""
        hours = (time.monotonic() - self._start) / 3600 * dist.get_world_size()  # GPU-hours of this run
        by_device = self._hours_before | {self.device: self._hours_before.get(self.device, 0.0) + hours}
        dollars = None
        if self.price is not None:
            dollars = self._dollars_before + hours * self.price
        return {'gpu_hours': sum(by_device.values()), 'gpu_hours_by_device': by_device, 'dollars': dollars}

    def is_spent(self) -> bool:
        return self.budget is not None and self.so_far()['dollars'] >= self.budget


class HeldOutLoss(Callback):
    """Prints the loss on held-out samples at each evaluation on rank 0, and keeps the evaluations for the record.

    Losses on different data do not compare. If a resumed training is evaluated on other data, another curve begins, and
    the record has the earlier curves as `other_evaluations`.

    Args:
        eval_remote: the dataset as --eval_remote names it, for the record. None in another program.
        trained_on: the datasets that the weights were trained on, as `was_trained_on` takes them. Without it, no
            samples are known to be held out.
    """

    def __init__(self, eval_remote: str | None = None, trained_on: list[dict] | None = None):
        self.eval_remote = redacted(eval_remote) if eval_remote else None
        self.trained_on = trained_on
        self.curves: dict[str | None, dict] = {}  # keys of the record by hash of the data; the last was evaluated last

    def evaluated_batch(self, index: dict) -> int | None:
        """Return the batch of the newest evaluation on the dataset with this index.json; None if there is none."""
        return self.curves.get(index_hash(index), {}).get('eval_batch')

    def eval_end(self, state: State, logger: Logger) -> None:
        # Continue the curve of these data. It becomes the last one. A dataset of another program has no index.json.
        samples = state.dataloader.dataset
        index = getattr(samples, 'index', None)
        sha256 = index_hash(index) if isinstance(index, dict) else None
        evaluations = self.curves.pop(sha256, {}).get('evaluations', [])

        # Keep the result on all ranks, because each makes the record. A loss that is not finite becomes None (JSON).
        loss = float(state.eval_metrics[state.dataloader_label][METRIC].compute())  # over the samples of all ranks
        kept = loss if math.isfinite(loss) else None
        batch = state.timestamp.batch.value
        is_held_out = self.trained_on is not None and was_trained_on(self.trained_on, index) is False
        self.curves[sha256] = {
            'eval_remote': self.eval_remote, 'eval_sha256': sha256, 'eval_loss': kept, 'eval_batch': batch,
            'eval_samples': len(samples), 'eval_held_out': is_held_out,
            'evaluations': [*evaluations, [state.timestamp.sample.value, kept]]}

        # Print above the progress bar.
        which = 'the held-out samples' if is_held_out else 'samples that are not known to be held out'
        if dist.get_global_rank() == 0:
            tqdm.write(f'batch {batch}: loss {loss:.4g} on {which}', file=sys.stderr)

    def state_dict(self) -> dict:
        return {'curves': [*self.curves.values()]}  # the record of a resumed training includes earlier evaluations

    def load_state_dict(self, state: dict) -> None:
        """Take over the curves. Earlier versions kept one, and not on which data; `state` is empty before those."""
        curves = state.get('curves', [])
        if state.get('evaluations'):
            curves = [{'eval_remote': None, 'eval_sha256': None} | state]
        self.curves = {curve['eval_sha256']: curve for curve in curves}

    def metrics_for_record(self, all_ranks: bool) -> dict:
        """Return the newest curve with its data, which replaces the flag --eval_remote, and the other curves."""
        nothing = {'evaluations': [], 'eval_loss': None, 'eval_batch': None, 'eval_samples': None,
                   'eval_held_out': None, 'eval_sha256': None}
        *others, newest = self.curves.values() or [nothing]
        return newest | {'other_evaluations': others}


class EndOfBatch(Callback):
    """Does what a training does between two batches, in one place. It must be the last callback.

    The time of all other callbacks then counts as part of the batch, and a checkpoint has everything that belongs to
    it. A progress bar shows the whole training on rank 0: Composer's own bar shows only the current epoch, and writes
    one line per batch into a log file.

    Logs `cost/gpu_hours` and, if there is a price, `cost/dollars`.

    Args:
        settings: the settings of the run.
        kept: what its checkpoints keep, from `facts_to_keep`.
        before: what the checkpoint to resume from has kept, from `kept_in`; empty for a new training.
        checkpoint: the path or URI of that checkpoint, and its path on this machine; None for a new training.
        spending: counts the cost.
        sampling: generates images; None without --sample_prompts.
    """
    trainer: Trainer  # set once it is built

    def __init__(self, settings: Run, kept: dict, before: dict, checkpoint: tuple[str, str] | None,
                 spending: Spending, sampling: Sampling | None):
        self.settings = settings
        self.kept = kept
        self.checkpoint = checkpoint
        self.spending = spending
        self.sampling = sampling
        self.stop = GracefulStop()
        self.measurement = Measurement(settings.warmup_batches, settings.measure_batches, before.get('loss'))
        self.held_out = HeldOutLoss(settings.eval_remote, kept['flags'][DATA])
        self.saver = None
        if settings.save_folder:
            self.saver = CheckpointSaver(settings.save_folder, settings.save_num_checkpoints_to_keep,
                                         before.get('saved', ()))
        self.bar = None

    def state_dict(self) -> dict:
        """Return what a resume reads with `kept_in`, before it builds this object."""
        saved = self.saver.saved if self.saver else []
        return self.kept | self.spending.so_far() | {'device': self.spending.device, 'saved': saved,
                                                     'loss': self.measurement.loss}

    def before_load(self, state: State, logger: Logger) -> None:
        if self.checkpoint is not None:
            name, path = self.checkpoint
            load_training(state, logger, path, name, self.settings.save_folder, self.kept['flags'])

    def fit_start(self, state: State, logger: Logger) -> None:
        self.bar = progress_bar(state.max_duration.value * self.settings.batch_size, ' images',
                                state.timestamp.sample.value, hidden=dist.get_global_rank() > 0)
        self.stop.stop_if_wanted(state)
        self.measurement.begin(state)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Do everything that follows a batch."""
        # Measure the batch first: nothing from here on is a part of it.
        self.measurement.end_batch(state)

        # Show its loss, unless the step was skipped, and the cost so far.
        batch = state.timestamp.batch.value
        parts = [f'batch {batch}']
        loss = state.total_loss_dict.get('loss/train/total')
        if loss is not None:
            parts.append(f'loss {float(loss):.3f}')
        spent = self.spending.so_far()
        logger.log_metrics({'cost/gpu_hours': spent['gpu_hours']})
        if spent['dollars'] is not None:
            parts.append(f'${spent["dollars"]:,.2f}')
            logger.log_metrics({'cost/dollars': spent['dollars']})
        self.bar.set_postfix_str(', '.join(parts), refresh=False)
        self.bar.update(self.settings.batch_size)

        # Decide with the other ranks whether the training ends here, after a signal or because the budget is spent.
        if self.spending.is_spent() and batch < state.max_duration.value:
            self.stop.is_wanted = True
        self.stop.stop_if_wanted(state)

        # After a signal only save, because a cluster may soon kill the run. The resumed run evaluates and generates.
        if not self.stop.interrupted:
            self.evaluate_and_generate(state, logger)
        if self.saver is not None and is_due(batch, self.settings.save_interval, state.max_duration.to_timestring()):
            with self.measurement.excluded('checkpoint'):
                self.saver.save(state)

    def evaluate_and_generate(self, state: State, logger: Logger) -> None:
        """Evaluate, and generate images, if they are due after this batch, before the first one, or on a resume.

        The images before the first batch, from the initial weights, are the reference for later ones. A signal or a
        crash may have ended the resumed run before it evaluated. An evaluation that is in the checkpoint is not
        repeated.
        """
        batch = state.timestamp.batch.value
        settings = self.settings
        for evaluator in state.evaluators if batch > 0 else ():
            if is_due(batch, settings.eval_interval, settings.max_duration) and \
                    self.held_out.evaluated_batch(evaluator.dataloader.dataloader.dataset.index) != batch:
                with self.measurement.excluded('evaluation'):
                    self.trainer.eval()
        if self.sampling is not None and is_due(batch, settings.sample_interval, settings.max_duration):
            with self.measurement.excluded('sampling'):
                self.sampling.generate_or_warn(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.saver is not None:
            self.saver.finish()

    def close(self, state: State, logger: Logger) -> None:
        """Close the bar, so the next output begins on a new line, and let an upload end."""
        if self.bar is not None:
            self.bar.close()
        if self.saver is not None:
            self.saver.close()

    def metrics_for_record(self, all_ranks: bool) -> dict:
        """Return speed, memory, power, loss, cost and identity; `all_ranks` as for Measurement."""
        identity = {key: self.kept[key] for key in ('training_id', 'load_weights')}
        return identity | self.spending.so_far() | self.measurement.metrics(all_ranks)
