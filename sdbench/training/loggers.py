"""Where the curves of a run go, by Composer's own loggers, and the name that they have.

The name is drawn once and kept with the checkpoints: no two runs share one, and a resume goes on with its curves.
"""
import os
import re
import secrets
import tempfile
from functools import partial
from pathlib import Path

from composer.loggers import LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import get_file, maybe_create_object_store_from_uri, parse_uri

from sdbench.errors import one_line
from sdbench.files import atomic_write
from sdbench.flags.train import Train
from sdbench.paths import is_url
from sdbench.training.checkpoints import RUN_NAME, names_in
from sdbench.training.ranks import on_rank_0
from sdbench.training.sampling import refuse_drawings_of_another_run

SEPARATOR = '-'  # between the label, by which people know the run, and what was drawn


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


def name_of_run(settings: Train, checkpoint: str | None) -> str | None:
    """Return the name of a run, the same on all ranks; None where it has neither curves nor drawings.

    Args and errors are those of `kept_or_new_name`.
    """
    has_curves = settings.tensorboard or settings.wandb_name or settings.wandb_project
    if not has_curves and not settings.sample_prompts:
        return None
    return on_rank_0(partial(kept_or_new_name, settings, checkpoint))


def kept_or_new_name(settings: Train, checkpoint: str | None) -> str | None:
    """Return the name that --save_folder keeps, or draw a new one, which it keeps from now on.

    The name is LABEL-DRAWN. The label is --run_name, or the last part of --save_folder; another --run_name than before
    makes a new name. Without both there is none, and Composer draws one for this start alone.

    A run that has been named goes on with its curves and its drawings, also where it ended before its first checkpoint.
    Raises ValueError if it begins, and its folder of drawings holds those of another.

    Args:
        settings: of the run.
        checkpoint: that it resumes; None: it has none.
    """
    kept = kept_name(settings.save_folder) if settings.save_folder else None
    if settings.sample_prompts and checkpoint is None and kept is None:
        refuse_drawings_of_another_run(settings.sample_folder)
    if not (settings.run_name or settings.save_folder):
        return None
    label = run_label(settings.run_name or os.path.abspath(settings.save_folder))
    if kept and (settings.run_name is None or kept.rpartition(SEPARATOR)[0] == label):
        return kept
    name = f'{label}{SEPARATOR}{secrets.token_hex(4)}'
    if settings.save_folder:
        keep_name(name, settings.save_folder)
    return name


def run_label(name: str) -> str:
    """Return the last part of a name or path, as a folder that is not hidden may be called."""
    last = os.path.basename(name.rstrip('/'))
    return re.sub(r'[^\w.-]+', SEPARATOR, last).strip('-.') or 'run'


def kept_name(folder: str) -> str | None:
    """Return the name that a folder or an object store keeps; None if it keeps none.

    Raises ValueError if it cannot be read, or is no name.
    """
    path = os.path.join(folder, RUN_NAME)
    if path not in names_in(folder):
        return None
    try:
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary, RUN_NAME)
            get_file(path, str(copy), progress_bar=False)
            name = copy.read_text(encoding='utf-8').strip()
    except Exception as error:  # every storage client has its own exceptions
        raise ValueError(f'--save_folder {folder}: {RUN_NAME} cannot be read ({one_line(error)})') from None
    if not re.fullmatch(r'\w[\w.-]*', name):  # it names a folder of curves
        raise ValueError(f'--save_folder {folder}: {RUN_NAME} holds no name of a run; remove it, and one is drawn')
    return name


def keep_name(name: str, folder: str) -> None:
    """Write the name of a run into its folder or object store. Raises ValueError if that fails."""
    path = os.path.join(folder, RUN_NAME)
    store = maybe_create_object_store_from_uri(folder)
    try:
        if store is None:
            with atomic_write(path) as file:
                file.write(f'{name}\n'.encode())
        else:
            with tempfile.TemporaryDirectory() as temporary:
                copy = Path(temporary, RUN_NAME)
                copy.write_text(f'{name}\n', encoding='utf-8')
                store.upload_object(parse_uri(path)[2], str(copy))
    except Exception as error:  # every storage client has its own exceptions
        raise ValueError(f'--save_folder {folder} cannot be written to ({one_line(error)}); check your permissions or '
                         'credentials') from None
