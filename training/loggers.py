"""Where the curves of a run go: TensorBoard files, Weights & Biases."""
import contextlib
import datetime
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from composer.core import Event, State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import dist
from tqdm import tqdm

from inputs.errors import one_line

REMEDY = 'run `wandb login`, or set WANDB_MODE=offline'


def build_loggers(settings: dict, tensorboard: str | None, wandb_name: str | None,
                  wandb_project: str | None) -> list[LoggerDestination]:
    """Composer's loggers for the flags that are given; each keeps the `settings`.

    Raises ValueError if W&B cannot start.
    """
    loggers = []
    if tensorboard:
        loggers.append(OneFolderTensorboardLogger(tensorboard, settings))
    if wandb_name or wandb_project:
        loggers.append(OneLineWandBLogger(wandb_name, wandb_project, settings))
    return loggers


class GoesOn:
    """A logger that fails while the run is trained is warned of, once, and the training goes on.

    It stands before Composer's logger among the parents of a class. Only `init` may fail: that is before the run.
    """
    _has_failed = False

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            super().run_event(event, state, logger)
        else:
            self._try(super().run_event, event, state, logger)

    def log_metrics(self, *arguments, **named) -> None:
        self._try(super().log_metrics, *arguments, **named)

    def log_images(self, *arguments, **named) -> None:
        self._try(super().log_images, *arguments, **named)

    def close(self, state: State, logger: Logger) -> None:  # which no event calls
        self._try(super().close, state, logger)

    def _try(self, method: Callable, *arguments, **named) -> None:
        try:
            method(*arguments, **named)
        except Exception as error:  # of the network or the disk, of many kinds
            if not self._has_failed:
                tqdm.write(f'warning: {type(self).__name__} failed ({type(error).__name__}: {one_line(error)[:200]}); '
                           'the training goes on, and what it misses is lost', file=sys.stderr)
            self._has_failed = True


class OneLineWandBLogger(GoesOn, WandBLogger):
    """Composer's logger, whose failure to start is a ValueError of one line.

    It alone starts the run: a second start leaves a folder without a run, to which `wandb/latest-run` points.

    Args:
        name: of the run, as --wandb_name gives it.
        project: as --wandb_project gives it.
        settings: of the run, kept as its configuration.
    """

    def __init__(self, name: str | None, project: str | None, settings: dict):
        self.flag = f'--wandb_name {name}' if name else f'--wandb_project {project}'
        if dist.get_global_rank() == 0:
            self._refuse_without_login()
        quiet = {'quiet': True}  # else 70 lines at the end push the result out of sight
        super().__init__(project=project, name=name, init_kwargs={'config': settings, 'settings': quiet})

    def _refuse_without_login(self) -> None:
        """Raises ValueError if W&B would ask for a key on the terminal."""
        import wandb
        if os.environ.get('WANDB_MODE', 'online') == 'online' and not wandb.api.api_key:
            raise ValueError(f'{self.flag}: not logged in to Weights & Biases; {REMEDY}')

    def init(self, state: State, logger: Logger) -> None:
        import wandb
        try:
            super().init(state, logger)
        except wandb.errors.Error as error:
            raise ValueError(f'{self.flag}: Weights & Biases did not start ({one_line(error)}); {REMEDY}') from None

    def keep_record(self, record: dict) -> None:
        """The record as the summary of the run."""
        import wandb
        wandb.run.summary.update(record)


class OneFolderTensorboardLogger(GoesOn, TensorboardLogger):
    """Composer's logger with settings and record beside the curves, all in one file of one folder for each run.

    Composer names the folder at random, begins another file at each flush, for an upload to an object store that is not
    used here, and another folder within the folder at each evaluation, for hyperparameters that it alone has set.

    Args:
        log_dir: folder that a folder for each run is made in.
        settings: of the run, shown as text; model and size name the folder.
    """

    def __init__(self, log_dir: str, settings: dict):
        super().__init__(log_dir)
        self.settings = settings

    def init(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            model = Path(self.settings['model_name']).resolve().name
            self.run_name = new_folder(self.log_dir, f'{model}-{self.settings["image_size"]}px').name
            self._initialize_summary_writer()
            self.writer.add_text('settings', as_markdown(self.settings))

    def keep_record(self, record: dict) -> None:
        """The record as text."""
        self.writer.add_text('record', as_markdown(record))

    def eval_end(self, state: State, logger: Logger) -> None:
        self._flush(logger)

    def _flush(self, logger: Logger) -> None:
        if self.writer is not None:
            self.writer.flush()


def new_folder(parent: str, name: str) -> Path:
    """A folder in `parent` that was not there: `name` with the local time, and a number where that is taken."""
    dated = f'{name}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}'
    for ending in itertools.chain([''], map('-{}'.format, itertools.count(2))):
        path = Path(parent, dated + ending)
        with contextlib.suppress(FileExistsError):  # of a run that began in the same second
            path.mkdir(parents=True)
            return path


def as_markdown(content: dict) -> str:
    """JSON as a block of code, which TensorBoard's text page leaves as it is."""
    return '\n'.join(f'    {line}' for line in json.dumps(content, indent=2).splitlines())


def log_record(loggers: Sequence[LoggerDestination], record: dict) -> None:
    """Give the record to those that keep one."""
    if dist.get_global_rank() != 0:
        return
    for logger in loggers:
        if not isinstance(logger, GoesOn):
            continue
        try:
            logger.keep_record(record)
        except Exception as error:  # of the network or the disk: the record itself is still to be kept
            print(f'warning: {type(logger).__name__} did not take the record ({one_line(error)})', file=sys.stderr)
