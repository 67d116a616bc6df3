"""Where the curves of a run go: TensorBoard files, Weights & Biases."""
import argparse
import os

from composer.loggers import LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import dist


def build_loggers(args: argparse.Namespace, settings: dict) -> list[LoggerDestination]:
    """Composer's loggers for the flags that are given; `settings` go to W&B. ValueError: W&B cannot start."""
    loggers = []
    if args.tensorboard:
        loggers.append(TensorboardLogger(log_dir=args.tensorboard))
    if uses_wandb(args):
        if dist.get_global_rank() == 0:
            start_wandb(args, settings)
        loggers.append(WandBLogger(project=args.wandb_project, name=args.wandb_name))
    return loggers


def uses_wandb(args: argparse.Namespace) -> bool:
    return bool(args.wandb_name or args.wandb_project)


def start_wandb(args: argparse.Namespace, settings: dict) -> None:
    """Begin the run at W&B. ValueError: it cannot be, which Composer's logger would raise from within its Trainer."""
    import wandb
    flag = f'--wandb_name {args.wandb_name}' if args.wandb_name else f'--wandb_project {args.wandb_project}'
    remedy = 'run `wandb login`, or set WANDB_MODE=offline'
    if os.environ.get('WANDB_MODE', 'online') == 'online' and not wandb.api.api_key:
        raise ValueError(f'{flag}: not logged in to Weights & Biases; {remedy}')
    try:
        wandb.init(project=args.wandb_project, name=args.wandb_name, config=settings)
    except wandb.errors.Error as error:
        raise ValueError(f'{flag}: Weights & Biases did not start ({error}); {remedy}') from None


def log_record(args: argparse.Namespace, record: dict) -> None:
    """The record as the summary of the run at W&B, if there is one."""
    if uses_wandb(args) and dist.get_global_rank() == 0:
        import wandb
        wandb.run.summary.update(record)
