"""Where the curves of a run go: TensorBoard files, Weights & Biases, by Composer's own loggers."""
import re

from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger

from sdbench.flags.train import Train


def run_name(settings: Train) -> str | None:
    """The name of a run's curves, the same at each resume, as a folder may be called; None: Composer draws one."""
    name = settings.run_name or settings.save_folder
    if name is None:
        return None
    return re.sub(r'[^\w.-]+', '-', name).strip('-')


def build_loggers(settings: Train, is_resumed: bool) -> list[LoggerDestination]:
    """Composer's loggers for the flags that are given; with --run_name a run that is resumed goes on at W&B as well."""
    loggers = []
    if settings.tensorboard:
        loggers.append(TensorboardLogger(settings.tensorboard))
    if settings.wandb_name or settings.wandb_project:
        options = {'settings': {'quiet': True}}  # else 70 lines at the end push the result out of sight
        if settings.run_name:
            options |= {'id': run_name(settings), 'resume': 'allow' if is_resumed else 'never'}
        loggers.append(WandBLogger(settings.wandb_project, name=settings.wandb_name, init_kwargs=options))
    return loggers


def log_record(logger: Logger, record: dict) -> None:
    """The numbers of a record, each as a curve of one point."""
    numbers = {key: value for key, value in record.items() if type(value) in (int, float)}
    logger.log_metrics(numbers)
