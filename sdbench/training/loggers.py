"""Where the curves of a run go, by Composer's own loggers."""
from composer.core import State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger

from sdbench.errors import DataError, one_line
from sdbench.flags.train import Train


def build_loggers(settings: Train, name: str) -> list[LoggerDestination]:
    """Return Composer's loggers for the flags that are given.

    Args:
        settings: of the run.
        name: of the training. A resume has the same one, so it continues the curves.
    """
    loggers = []
    if settings.tensorboard:
        loggers.append(TensorBoard(settings.tensorboard))
    if settings.wandb_name or settings.wandb_project:
        options = {'id': name, 'resume': 'allow',
                   'settings': {'quiet': True}}  # else 70 lines at the end push the result out of sight
        loggers.append(WandB(settings.wandb_project, name=settings.wandb_name, init_kwargs=options))
    return loggers


class TensorBoard(TensorboardLogger):
    """Composer's logger of TensorBoard. A run that resumes takes the place of what was lost after its checkpoint."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Let TensorBoard forget the batches that are trained again: else its curves have them twice, and run back."""
        if self.writer is not None and state.timestamp.batch.value > 0:
            self.writer.close()
            self.writer.purge_step = state.timestamp.batch.value  # it says so in the next file that it opens


class WandB(WandBLogger):
    """Composer's logger of W&B. Where it cannot start, the run ends in one line before its first batch."""

    def init(self, state: State, logger: Logger) -> None:
        try:
            super().init(state, logger)
        except Exception as error:  # of nearly any kind: nobody has logged in, or the server is out of reach
            raise DataError('--wandb_name and --wandb_project: the log of Weights & Biases cannot be opened '
                            f'({one_line(error, 200)}); log in by `wandb login` or WANDB_API_KEY, or set '
                            'WANDB_MODE=offline to keep it on this machine') from None

