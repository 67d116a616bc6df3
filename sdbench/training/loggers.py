"""Where the curves of a run go, by Composer's own loggers, and the name that they have.

The name is drawn once and kept with the checkpoints: no two runs share one, and a resume goes on with its curves.
"""
import os
import re
import secrets

from composer.core import State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger

from sdbench.errors import DataError, one_line
from sdbench.flags.train import Train
from sdbench.training.checkpoints import RUN_NAME, read_beside, write_beside

SEPARATOR = '-'  # between the beginning, by which people know the run, and what was drawn


def build_loggers(settings: Train, name: str | None) -> list[LoggerDestination]:
    """Return Composer's loggers for the flags that are given.

    Args:
        settings: of the run.
        name: of the run, drawn once and the same at each resume: with it, a run goes on with its curves, or begins
            them where it has none. None: Composer and W&B draw one for this start.
    """
    loggers = []
    if settings.tensorboard:
        loggers.append(TensorBoard(settings.tensorboard))
    if settings.wandb_name or settings.wandb_project:
        options = {'settings': {'quiet': True}}  # else 70 lines at the end push the result out of sight
        if name is not None:
            options |= {'id': name, 'resume': 'allow'}
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


def name_of_run(settings: Train, kept: str | None) -> str | None:
    """Return the name of a run: the one that --save_folder has kept, or a new one, which it keeps from now on.

    The name is BEGINNING-DRAWN. The beginning is --run_name, or the last part of --save_folder; another --run_name than
    before makes a new name. Without both there is none, and Composer draws one for this start alone. A run without
    curves and drawings needs none.

    Args:
        settings: of the run.
        kept: `kept_name` of --save_folder.

    Raises UserError if a new name cannot be kept.
    """
    is_shown = settings.tensorboard or settings.wandb_name or settings.wandb_project or settings.sample_prompts
    if not is_shown or not (settings.run_name or settings.save_folder):
        return None
    beginning = os.path.basename((settings.run_name or os.path.abspath(settings.save_folder)).rstrip('/'))
    beginning = re.sub(r'[^\w.-]+', SEPARATOR, beginning).strip('-.') or 'run'  # as a folder of curves may be called
    if kept and (settings.run_name is None or kept.rpartition(SEPARATOR)[0] == beginning):
        return kept
    name = f'{beginning}{SEPARATOR}{secrets.token_hex(4)}'
    if settings.save_folder:  # before the first checkpoint, so that a run that is lost until then finds its curves
        write_beside(settings.save_folder, RUN_NAME, f'{name}\n')
    return name


def kept_name(folder: str | None) -> str | None:
    """Return the name that a --save_folder keeps; None if it keeps none, or there is no folder.

    Raises UserError if it cannot be read.
    """
    if folder is None:
        return None
    text = read_beside(folder, RUN_NAME)
    return text and text.strip()
