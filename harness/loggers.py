"""Where the curves of a run go: TensorBoard files, Weights & Biases."""
import argparse
import os

from composer.core import State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import dist

from inputs.errors import one_line

REMEDY = 'run `wandb login`, or set WANDB_MODE=offline'


def build_loggers(args: argparse.Namespace, settings: dict) -> list[LoggerDestination]:
    """Composer's loggers for the flags that are given; `settings` go to W&B. ValueError: W&B cannot start."""
    loggers = []
    if args.tensorboard:
        loggers.append(TensorboardLogger(log_dir=args.tensorboard))
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


class OneLineWandBLogger(WandBLogger):
    """Composer's logger, whose failure to start is a ValueError of one line.

    It alone starts the run: a second start leaves a folder without a run, to which `wandb/latest-run` points.

    Args:
        args: with --wandb_name and --wandb_project.
        settings: of the run, kept as its configuration.
    """

    def __init__(self, args: argparse.Namespace, settings: dict):
        super().__init__(project=args.wandb_project, name=args.wandb_name, init_kwargs={'config': settings})
        self.flag = wandb_flag(args)

    def init(self, state: State, logger: Logger) -> None:
        import wandb
        try:
            super().init(state, logger)
        except wandb.errors.Error as error:
            raise ValueError(f'{self.flag}: Weights & Biases did not start ({one_line(error)}); {REMEDY}') from None


def log_record(args: argparse.Namespace, record: dict) -> None:
    """The record as the summary of the run at W&B, if there is one."""
    if uses_wandb(args) and dist.get_global_rank() == 0:
        import wandb
        wandb.run.summary.update(record)
