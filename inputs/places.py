"""Places of datasets by their names alone: what is an address, and what marks a dataset in the making.

Nothing here needs a library, so that commands can ask before their imports.
"""
import os
import re
from collections.abc import Collection

CLAIM = 'claim.json'  # says what is being made in a place, and is there before anything else
LEFT_BY_KILLED = re.compile(rf'{re.escape(CLAIM)}\.(tmp\d+|lock)')  # what a run can leave that is killed, beside files


def is_address(place: str) -> bool:
    """Whether a place is in a store, of a kind that can be read or not; what exists as a path is not."""
    return ('://' in place or place.startswith('dbfs:')) and not os.path.exists(place)


def hold_others_files(names: Collection[str]) -> bool:
    """Whether what lies in a folder is somebody's, and not of a dataset that we have begun."""
    others = [name for name in names if not LEFT_BY_KILLED.fullmatch(name)]
    return len(others) > 0 and CLAIM not in names
