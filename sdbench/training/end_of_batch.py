"""Measure, decide, evaluate, generate images and save, in this order, between two batches of a training."""
from collections.abc import Callable

from composer import Callback, Trainer
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist

from sdbench.flags.times import is_due
from sdbench.flags.train import Run
from sdbench.measuring.clock import Measurement
from sdbench.process import progress_bar
from sdbench.training.checkpoints import CheckpointSaver
from sdbench.training.progress import HeldOutLoss
from sdbench.training.ranks import GracefulStop
from sdbench.training.sampling import Sampling
from sdbench.training.spending import Spending


class EndOfBatch(Callback):
    """Does what a training does between two batches, in one place. It must be the last callback.

    The time of all other callbacks then counts as part of the batch, and a checkpoint has everything that belongs to
    it. A progress bar shows the whole training on rank 0: Composer's own bar shows only the current epoch, and writes
    one line per batch into a log file.

    Logs `cost/gpu_hours` and, if there is a price, `cost/dollars`.

    Args:
        settings: the settings of the run.
        kept: what its checkpoints keep, from `facts_to_keep`.
        loss: the last loss of the resumed run.
        spending: counts the cost.
        stop: ends the training after a signal, or when the budget is spent.
        held_out: keeps the evaluations.
        sampling: generates images; None without --sample_prompts.
        saver: saves checkpoints; None without --save_folder.
        load: loads the checkpoint to resume from; None starts a training.
    """
    trainer: Trainer  # set once it is built

    def __init__(self, settings: Run, kept: dict, loss: float | None, spending: Spending, stop: GracefulStop,
                 held_out: HeldOutLoss, sampling: Sampling | None, saver: CheckpointSaver | None,
                 load: Callable[[State, Logger], None] | None):
        self.settings = settings
        self.kept = kept
        self.measurement = Measurement(settings.warmup_batches, settings.measure_batches, loss)
        self.spending = spending
        self.stop = stop
        self.held_out = held_out
        self.sampling = sampling
        self.saver = saver
        self.load = load
        self.bar = None

    def state_dict(self) -> dict:
        """Return what a resume reads with `kept_in`, before it builds this object."""
        saved = self.saver.saved if self.saver else []
        return self.kept | self.spending.so_far() | {'device': self.spending.device, 'saved': saved,
                                                     'loss': self.measurement.loss}

    def before_load(self, state: State, logger: Logger) -> None:
        if self.load is not None:
            self.load(state, logger)

    def fit_start(self, state: State, logger: Logger) -> None:
        self.bar = progress_bar(state.max_duration.value * self.settings.batch_size, ' images',
                                state.timestamp.sample.value, hidden=dist.get_global_rank() > 0)
        self.stop.fit_start(state, logger)
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
        spent = {name: value for name, value in self.spending.so_far().items() if value is not None}
        if 'dollars' in spent:
            parts.append(f'${spent["dollars"]:,.2f}')
        logger.log_metrics({f'cost/{name}': value for name, value in spent.items()})
        self.bar.set_postfix_str(', '.join(parts), refresh=False)
        self.bar.update(self.settings.batch_size)

        # Decide with the other ranks whether the training ends here, after a signal or because the budget is spent.
        if self.spending.is_spent() and batch < state.max_duration.value:
            self.stop.end()
        self.stop.batch_end(state, logger)

        # After a signal only save, because a cluster may soon kill the run. The resumed run evaluates and generates.
        if not self.stop.interrupted:
            self.evaluate_and_generate(state, logger)
        if self.saver is not None and is_due(batch, self.settings.save_interval, state.max_duration.to_timestring()):
            with self.measurement.excluded('checkpoint'):
                self.saver.save(state)

    def evaluate_and_generate(self, state: State, logger: Logger) -> None:
        """Evaluate, and generate images, if they are due after this batch, before the first one, or on a resume.

        Later images are compared with those of the initial weights. A signal or a crash may have ended the resumed run
        before it evaluated. An evaluation whose result is in the checkpoint is not repeated.
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
        """Close the bar, so the next output begins on a new line, and let an upload end, also after a failure."""
        if self.bar is not None:
            self.bar.close()
        if self.saver is not None:
            self.saver.wait_for_upload()

    def figures(self, all_ranks: bool) -> dict:
        """Return speed, memory, power, loss, cost and identity for the record; `all_ranks` as for Measurement."""
        identity = {key: self.kept[key] for key in ('training_id', 'load_weights')}
        return identity | self.spending.so_far() | self.measurement.figures(all_ranks)
