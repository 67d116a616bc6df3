"""Names and paths of datasets, checkpoints and pipelines."""
import glob
import os
import re

from sdbench.errors import UserError

HELD_OUT = '-held-out'  # how the name of a dataset of held-out samples ends
INDEX = 'index.json'  # of a dataset, which is whole once it is there
PLACEHOLDER = '{run_name}'  # in a --save_folder, as Composer has it
EXPORTED = 'export.json'  # in a pipeline folder of export.py: what it was made of
CLAIM = 'claim.json'  # says what is being made in a folder, and is there before anything else


def sibling_path(folder: str, name: str) -> str:
    """Return FOLDER-NAME, the path of what belongs to a folder and lies next to it.

    The sibling of a folder in a store is on this machine, below the folders of its whole address: s3/BUCKET/KEY-NAME.
    """
    folder = folder.rstrip('/')
    if is_url(folder):
        folder = re.sub(':/+', '/', folder)
    return f'{folder}-{name}'


def with_run_name(folder: str, name: str | None) -> str:
    """Return a --save_folder with `{run_name}` filled in, as Composer does.

    Raises UserError if the run has no name, or the folder has what Composer fills in otherwise.
    """
    if PLACEHOLDER in folder:
        name = name or os.environ.get('COMPOSER_RUN_NAME') or os.environ.get('RUN_NAME')
        if not name:
            raise UserError(f'--save_folder {folder} needs --run_name NAME: the same command goes on by that name')
        folder = folder.replace(PLACEHOLDER, name)
    if re.search('[{}%]', folder):
        raise UserError(f'--save_folder {folder} has {{, }} or % in it, which can stand for something else in the name '
                        f'of a checkpoint; give a folder without them, or with {PLACEHOLDER} and --run_name')
    return folder


def by_run_name(folder: str, flag: str) -> str:
    """Return a folder to read from, in whose name `{run_name}` may stand for the only run that is there.

    Raises UserError, which names `flag`, if there are several or none.
    """
    if PLACEHOLDER not in folder or os.path.exists(folder):
        return folder
    found = sorted(glob.glob(glob.escape(folder).replace(PLACEHOLDER, '*')))
    if len(found) == 1:
        return found[0]
    there = f'there are {", ".join(found)}' if found else 'there is no such folder'
    raise UserError(f'{flag} {folder}: {there}; give the name of the run in the place of {PLACEHOLDER}')


def is_url(path: str) -> bool:
    """Tell whether a path is a URL of a store, even of an unsupported one. A path that exists here is none."""
    return ('://' in path or path.startswith('dbfs:')) and not os.path.exists(path)
