"""Where the curves of a run go: TensorBoard files, Weights & Biases."""
import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from composer.core import State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import dist
from tqdm import tqdm

from inputs.errors import one_line

REMEDY = 'run `wandb login`, or set WANDB_MODE=offline'


def build_loggers(args: argparse.Namespace, settings: dict) -> list[LoggerDestination]:
    """Composer's loggers for the flags that are given; each keeps the `settings`. ValueError: W&B cannot start."""
    loggers = []
    if args.tensorboard:
        loggers.append(OneFileTensorboardLogger(args.tensorboard, settings))
    if uses_wandb(args):
        if dist.get_global_rank() == 0:
            refuse_without_login(args)
        loggers.append(OneLineWandBLogger(args, settings))
    return loggers


def uses_wandb(args: argparse.Namespace) -> bool:
    return bool(args.wandb_name or args.wandb_project)


def wandb_flag(args: argparse.Namespace) -> str:
    """The flag that asks for W&B, with its value."""
    if args.wandb_name:
        return f'--wandb_name {args.wandb_name}'
    return f'--wandb_project {args.wandb_project}'


def refuse_without_login(args: argparse.Namespace) -> None:
    """ValueError: W&B would ask for a key on the terminal."""
    import wandb
    if os.environ.get('WANDB_MODE', 'online') == 'online' and not wandb.api.api_key:
        raise ValueError(f'{wandb_flag(args)}: not logged in to Weights & Biases; {REMEDY}')


class GoesOn:
    """A logger that fails while the run is trained is warned of, once, and the training goes on.

    It stands before Composer's logger among the parents of a class. Only `init` may fail: that is before the run.
    """
    _has_failed = False

    def log_metrics(self, *arguments, **named) -> None:
        self._try(super().log_metrics, *arguments, **named)

    def log_images(self, *arguments, **named) -> None:
        self._try(super().log_images, *arguments, **named)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._try(super().batch_end, state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._try(super().epoch_end, state, logger)

    def eval_end(self, state: State, logger: Logger) -> None:
        self._try(super().eval_end, state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._try(super().fit_end, state, logger)

    def close(self, state: State, logger: Logger) -> None:
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
        args: with --wandb_name and --wandb_project.
        settings: of the run, kept as its configuration.
    """

    def __init__(self, args: argparse.Namespace, settings: dict):
        quiet = {'quiet': True}  # else 70 lines at the end push the result out of sight
        super().__init__(project=args.wandb_project, name=args.wandb_name,
                         init_kwargs={'config': settings, 'settings': quiet})
        self.flag = wandb_flag(args)

    def init(self, state: State, logger: Logger) -> None:
        import wandb
        try:
            super().init(state, logger)
        except wandb.errors.Error as error:
            raise ValueError(f'{self.flag}: Weights & Biases did not start ({one_line(error)}); {REMEDY}') from None

    def keep_record(self, record: dict) -> None:
        """The record as the summary of the run."""
        if dist.get_global_rank() == 0:
            import wandb
            wandb.run.summary.update(record)


class OneFileTensorboardLogger(GoesOn, TensorboardLogger):
    """Composer's logger, with settings and record beside the curves, all in one file for each run.

    Composer begins another file at each flush, for an upload to an object store that is not used here.

    Args:
        log_dir: folder that a folder for each run is made in.
        settings: of the run, shown as text.
    """

    def __init__(self, log_dir: str, settings: dict):
        super().__init__(log_dir=log_dir)
        self.settings = settings

    def init(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            super().init(state, logger)
            self.writer.add_text('settings', as_markdown(self.settings))

    def keep_record(self, record: dict) -> None:
        """The record as text."""
        if dist.get_global_rank() == 0:
            self.writer.add_text('record', as_markdown(record))

    def _flush(self, logger: Logger) -> None:
        if self.writer is not None:
            self.writer.flush()

    def close(self, state: State, logger: Logger) -> None:
        if self.writer is not None:
            self._try(self.writer.close)
        self.writer = None


def as_markdown(content: dict) -> str:
    """JSON as a block of code, which TensorBoard's text page leaves as it is."""
    return '\n'.join(f'    {line}' for line in json.dumps(content, indent=2).splitlines())


def log_record(loggers: Sequence[LoggerDestination], record: dict) -> None:
    """Give the record to those that keep one."""
    for logger in loggers:
        if not isinstance(logger, (OneLineWandBLogger, OneFileTensorboardLogger)):
            continue
        try:
            logger.keep_record(record)
        except Exception as error:  # of the network or the disk: the record itself is still to be kept
            print(f'warning: {type(logger).__name__} did not take the record ({one_line(error)})', file=sys.stderr)
