"""Where the curves of a run go, by Composer's own loggers, and the name that they have.

The name is drawn once and kept with the checkpoints: no two runs share one, and a resume goes on with its curves.
"""
import os
import re
import secrets
import tempfile
from functools import partial
from pathlib import Path

from composer.core import State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger

from sdbench.errors import DataError, one_line
from sdbench.files import atomic_write
from sdbench.flags.train import Train
from sdbench.stores import download, upload
from sdbench.training.checkpoints import RUN_NAME, names_in
from sdbench.training.ranks import on_rank_0

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
        loggers.append(TensorboardLogger(settings.tensorboard))
    if settings.wandb_name or settings.wandb_project:
        options = {'settings': {'quiet': True}}  # else 70 lines at the end push the result out of sight
        if name is not None:
            options |= {'id': name, 'resume': 'allow'}
        loggers.append(WandB(settings.wandb_project, name=settings.wandb_name, init_kwargs=options))
    return loggers


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
    """Return the name of a run, the same on all ranks: the one that --save_folder has kept, or a new one.

    The name is BEGINNING-DRAWN. The beginning is --run_name, or the last part of --save_folder; another --run_name than
    before makes a new name. Without both there is none, and Composer draws one for this start alone. A run without
    curves and drawings needs none.

    Args:
        settings: of the run.
        kept: `kept_name` of --save_folder.

    Raises ValueError if a new name cannot be kept.
    """
    is_shown = settings.tensorboard or settings.wandb_name or settings.wandb_project or settings.sample_prompts
    if not is_shown or not (settings.run_name or settings.save_folder):
        return None
    beginning = os.path.basename((settings.run_name or os.path.abspath(settings.save_folder)).rstrip('/'))
    beginning = re.sub(r'[^\w.-]+', SEPARATOR, beginning).strip('-.') or 'run'  # as a folder of curves may be called
    if kept and (settings.run_name is None or kept.rpartition(SEPARATOR)[0] == beginning):
        return kept
    return on_rank_0(partial(draw_name, beginning, settings.save_folder))


def kept_name(folder: str | None) -> str | None:
    """Return the name that a --save_folder keeps; None if it keeps none, or there is no folder.

    Raises ValueError if it cannot be read, or is no name.
    """
    if folder is None:
        return None
    path = os.path.join(folder, RUN_NAME)
    if path not in names_in(folder):
        return None
    try:
        with tempfile.TemporaryDirectory() as temporary:
            copy = path
            if '://' in path:
                copy = os.path.join(temporary, RUN_NAME)
                download(path, copy, path)
            name = Path(copy).read_text(encoding='utf-8').strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'--save_folder {folder}: {RUN_NAME} cannot be read ({one_line(error)})') from None
    if not re.fullmatch(r'\w[\w.-]*', name):  # it names a folder of curves
        raise ValueError(f'--save_folder {folder}: {RUN_NAME} holds no name of a run; remove it, and one is drawn')
    return name


def draw_name(beginning: str, folder: str | None) -> str:
    """Draw a name that no other run has, and keep it in a --save_folder. Raises ValueError if that fails."""
    name = f'{beginning}{SEPARATOR}{secrets.token_hex(4)}'
    if folder is None:
        return name

    # kept before the first checkpoint, so that a run that is lost until then finds its curves again
    path = os.path.join(folder, RUN_NAME)
    content = f'{name}\n'.encode()
    if '://' in folder:
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary, RUN_NAME)
            copy.write_bytes(content)
            upload(str(copy), path, f'--save_folder {folder}')
        return name
    try:
        with atomic_write(path) as file:
            file.write(content)
    except OSError as error:
        raise ValueError(f'--save_folder {folder} cannot be written to ({one_line(error)}); check your permissions'
                         ) from None
    return name
