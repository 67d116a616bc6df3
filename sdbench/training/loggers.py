"""Where the curves of a run go: TensorBoard files, Weights & Biases, by Composer's own loggers."""
import os
import tempfile
from functools import partial

from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger

from sdbench.flags.train import Train
from sdbench.paths import is_url
from sdbench.training.ranks import on_rank_0


def build_loggers(settings: Train, name: str | None) -> list[LoggerDestination]:
    """Return Composer's loggers for the flags that are given.

    Args:
        settings: of the run.
        name: of the run, drawn once and the same at each resume: with it, a run goes on with its curves, or begins
            them where it has none. None: Composer and W&B draw one for this start.

    Raises ValueError if the folder of --tensorboard cannot be written to.
    """
    loggers = []
    if settings.tensorboard:
        if not is_url(settings.tensorboard):
            on_rank_0(partial(make_curves_folder, settings.tensorboard, name))
        loggers.append(TensorboardLogger(settings.tensorboard))
    if settings.wandb_name or settings.wandb_project:
        options = {'settings': {'quiet': True}}  # else 70 lines at the end push the result out of sight
        if name is not None:
            options |= {'id': name, 'resume': 'allow'}
        loggers.append(WandBLogger(settings.wandb_project, name=settings.wandb_name, init_kwargs=options))
    return loggers


def make_curves_folder(folder: str, name: str | None) -> None:
    """Make the folder of a run's events. Raises ValueError if it cannot be written to."""
    run_folder = os.path.join(folder, name or '')
    try:
        os.makedirs(run_folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_folder):
            pass
    except OSError as error:
        raise ValueError(f'--tensorboard {folder} cannot be written to ({error.strerror}); give another folder'
                         ) from None


def log_record(logger: Logger, record: dict) -> None:
    """The numbers of a record, each as a curve of one point."""
    numbers = {key: value for key, value in record.items() if type(value) in (int, float)}
    logger.log_metrics(numbers)
