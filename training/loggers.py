"""Where the curves of a run go: TensorBoard files, Weights & Biases, by Composer's own loggers."""
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger

from settings.train import Train


def build_loggers(settings: Train) -> list[LoggerDestination]:
    """Composer's loggers for the flags that are given."""
    loggers = []
    if settings.tensorboard:
        loggers.append(TensorboardLogger(settings.tensorboard))
    if settings.wandb_name or settings.wandb_project:
        quiet = {'settings': {'quiet': True}}  # else 70 lines at the end push the result out of sight
        loggers.append(WandBLogger(settings.wandb_project, name=settings.wandb_name, init_kwargs=quiet))
    return loggers


def log_record(logger: Logger, record: dict) -> None:
    """The numbers of a record, each as a curve of one point."""
    numbers = {key: value for key, value in record.items() if type(value) in (int, float)}
    logger.log_metrics(numbers)
