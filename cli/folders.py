"""What a command line names on this machine: whether it is there, and can be written. Nothing here needs torch."""
import contextlib
import os
import stat
import tempfile
from pathlib import Path

from inputs.places import (
    CLAIM,
    INDEX,
    finished_error,
    hold_others_files,
    is_address,
    occupied_error,
    program_of,
    refuse_folder_without_index,
    refuse_mistyped_address,
)


def refuse_occupied_folder(flag: str, out: str, program: str) -> None:
    """Raises ValueError if OUT is no folder, or holds what our command of that name has not begun."""
    refuse_mistyped_address(flag, out)
    if is_address(out):
        return
    for parent in Path(os.path.realpath(out)).parents:
        if is_finished_dataset(str(parent)):
            raise ValueError(f'{flag} {out} lies in the dataset {parent}; name a folder elsewhere')
    if not os.path.lexists(out):
        refuse_unusable_folder(flag, out)
        return
    if not os.path.isdir(out):
        raise ValueError(f'{flag} {out} is not a folder; give a new one')
    try:
        names = os.listdir(out)
    except OSError:
        return  # parts/output.py says what is wrong with it
    if hold_others_files(names):
        raise occupied_error(f'{flag} {out}')
    with contextlib.suppress(OSError):  # likewise
        if CLAIM in names and program_of(Path(out, CLAIM).read_bytes()) != program:
            if INDEX in names:
                raise finished_error(f'{flag} {out}')
            raise occupied_error(f'{flag} {out}')


def is_finished_dataset(folder: str) -> bool:
    """Whether a folder holds a whole dataset that our commands have made."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in (CLAIM, INDEX))


def refuse_missing_dataset(flag: str, place: str | None) -> None:
    """Raises ValueError if a dataset is neither in a store nor in a folder that there is, and holds its index.json."""
    refuse_mistyped_address(flag, place)
    if not place or ':/' in place:
        return
    if not os.path.isdir(place):
        raise ValueError(f'{flag} {place} is no folder; check the name, or make a dataset with convert.py')
    refuse_folder_without_index(flag, place)


def refuse_unusable_folder(flag: str, folder: str | None) -> None:
    """Raises ValueError if a folder cannot be made, or nothing written in it. Nothing stays of the attempt."""
    refuse_mistyped_address(flag, folder)
    if not folder or '://' in folder or not is_first_rank():
        return
    parent = os.path.abspath(folder)
    try:
        while not is_there(parent):
            parent = os.path.dirname(parent)
        tempfile.TemporaryDirectory(dir=parent).cleanup()
    except NotADirectoryError:
        raise ValueError(f'{flag} {folder} cannot be a folder, because {parent} is a file; name another') from None
    except OSError as error:
        raise ValueError(f'{flag} {folder} cannot be written: {error.strerror}; name another') from None


def is_there(path: str) -> bool:
    """Whether there is something of that name. Raises OSError if that cannot be said."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def names_in(flag: str, folder: str) -> list[str]:
    """Of what lies in a folder; none where it is not there. Raises ValueError if it cannot be read."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f'{flag} {folder} cannot be read: {error.strerror}; name another') from None


def refuse_bad_results(path: str) -> None:
    """Raises ValueError if no record can be appended to --results. It is said before the run, not after it."""
    if not is_first_rank():
        return
    refuse_empty('--results', path)
    if os.path.isdir(path):
        raise folder_error('--results', path, 'results.jsonl')
    try:
        if not os.path.exists(path):
            tempfile.TemporaryFile(dir=os.path.dirname(path) or '.').close()  # could one be made there?
            return
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise ValueError(f'--results {path} is a pipe, which would wait for a reader; name a file')
        open(path, 'a').close()
    except OSError as error:
        raise ValueError(f'--results {path} cannot be written: {error.strerror}; name another') from None


def is_first_rank() -> bool:
    """Whether this process is the one that looks at what all would write to."""
    return os.environ.get('RANK', '0') == '0'


def refuse_empty(flag: str, value: str | None) -> None:
    """Raises ValueError if a name was given, and is empty, as of a variable that is not set."""
    if value is not None and not value.strip():
        raise ValueError(f'{flag} is empty; give a name')


def folder_error(flag: str, path: str, example: str) -> ValueError:
    """The error of a file to write that is a folder; `example` is a name for one in it."""
    return ValueError(f'{flag} {path} is a folder; name a file, such as {os.path.join(path, example)}')
