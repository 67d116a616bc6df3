"""Log the curves of a run with Composer's own loggers."""
from composer.callbacks import SpeedMonitor
from composer.core import State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger

from sdbench.errors import DataError, one_line
from sdbench.flags.train import Run


def build_loggers(settings: Run, name: str) -> list[LoggerDestination]:
    """Return Composer's loggers for the flags that are given.

    Args:
        settings: the settings of the run.
        name: the name of the training. A resume has the same name, so it continues the curves.
    """
    loggers = []
    if settings.tensorboard:
        loggers.append(TensorBoard(settings.tensorboard))
    if settings.wandb_name or settings.wandb_project:
        options = {'id': name, 'resume': 'allow',
                   'settings': {'quiet': True}}  # without this, 70 lines follow the result of the run
        loggers.append(WandB(settings.wandb_project, name=settings.wandb_name, init_kwargs=options))
    return loggers


class TensorBoard(TensorboardLogger):
    """Composer's TensorBoard logger, whose curves do not repeat the batches that a resumed run trains again."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Tell TensorBoard to drop the batches after the checkpoint: otherwise the curves would show them twice."""
        if self.writer is not None and state.timestamp.batch.value > 0:
            self.writer.close()
            self.writer.purge_step = state.timestamp.batch.value  # written into the next event file


class WandB(WandBLogger):
    """Composer's W&B logger. If it cannot start, the run ends with a one-line error before its first batch."""

    def init(self, state: State, logger: Logger) -> None:
        try:
            super().init(state, logger)
        except Exception as error:  # wandb raises many kinds, for a missing login or an unreachable server
            raise DataError('--wandb_name and --wandb_project: Weights & Biases cannot start a run '
                            f'({one_line(error, 200)}); log in by `wandb login` or WANDB_API_KEY, or set '
                            'WANDB_MODE=offline to log to this machine') from None


class Throughput(SpeedMonitor):
    """Composer's curves of speed, for a training that evaluates inside of a callback.

    Composer counts the time of such an evaluation in the time of the batch, and must not add it to the total again.
    """

    def eval_end(self, state: State, logger: Logger) -> None:
        """Do not count the evaluation."""
