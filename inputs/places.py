"""Places of datasets by their names and files alone: what is an address, what is a dataset, and what one in the making.

Nothing here needs a library, so that commands can ask before their imports.
"""
import contextlib
import json
import os
import re
from collections.abc import Collection
from pathlib import Path

INDEX = 'index.json'  # of a dataset, which is whole once it is there
CLAIM = 'claim.json'  # says what is being made in a place, and is there before anything else
OUR_PROGRAMS = ('convert.py', 'encode.py', 'evaluate.py')  # that make claims
LEFT_BY_KILLED = re.compile(rf'{re.escape(CLAIM)}\.(tmp\d+|lock)')  # what a run can leave that is killed, beside files

ONE_SLASH = re.compile(r'(s3|gs|azure|azure-dl|oci|hf|sftp|alipan|https?):/(?!/)')  # dbfs:/ has one


def number_of_samples(index: dict) -> int:
    """Of a dataset, by its index.json."""
    return sum(shard['samples'] for shard in index['shards'])


def is_address(place: str) -> bool:
    """Whether a place is in a store, of a kind that can be read or not; what exists as a path is not."""
    return ('://' in place or place.startswith('dbfs:')) and not os.path.exists(place)


def refuse_mistyped_address(flag: str, place: str | None) -> None:
    """Raises ValueError if a place is not there, and would be an address with a second slash."""
    match = ONE_SLASH.match(place or '')
    if match and not os.path.exists(place):
        address = f'{match[1]}://{place.removeprefix(match[0])}'
        raise ValueError(f'{flag} {place} is an address with one slash; write {address}, or ./{place} for a folder')


def hold_others_files(names: Collection[str]) -> bool:
    """Whether what lies in a folder is somebody's, and not of a dataset that we have begun."""
    others = [name for name in names if not LEFT_BY_KILLED.fullmatch(name)]
    return len(others) > 0 and CLAIM not in names


def occupied_error(place: str) -> ValueError:
    """The error of a place to write to, by its flag, that holds somebody's files."""
    return ValueError(f'{place} already holds something; give a new folder')


def finished_error(place: str) -> ValueError:
    """The error of a place to write to, by its flag, that holds a whole dataset of ours."""
    return ValueError(f'{place} already holds a dataset, with its {INDEX}; give a new folder')


def refuse_folder_without_index(flag: str, folder: str) -> None:
    """Raises ValueError if a folder to read holds no dataset, or the beginning of one."""
    try:
        os.stat(os.path.join(folder, INDEX))
    except FileNotFoundError:
        claim = None
        with contextlib.suppress(OSError):
            claim = Path(folder, CLAIM).read_bytes()
        raise ValueError(f'{flag} {folder} {why_no_dataset(claim)}') from None
    except OSError:
        return  # who reads it says what is wrong with it


def why_no_dataset(claim: bytes | None) -> str:
    """What a place without an index.json is, and the remedy. `claim` is its claim.json; None: there is none."""
    program = program_of(claim)
    if program is None:
        return f'holds no {INDEX}, so no MDS dataset; make one with convert.py'
    return (f'is not finished: {program} has begun it and writes its {INDEX} last; start {program} again with the '
            'same flags, and it goes on from there')


def program_of(claim: bytes | None) -> str | None:
    """The name of the program that has made a claim.json; None where that is none of ours, or there is none."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        return json.loads(claim or b'')['program']
    return None


def program_that_made(folder: str) -> str | None:
    """Which of our programs has begun or finished what lies in a folder; None where none has."""
    with contextlib.suppress(OSError):
        program = program_of(Path(folder, CLAIM).read_bytes())
        return program if program in OUR_PROGRAMS else None
    return None
