"""What files are by their names: the key and suffix of a sample's files, and which suffixes are read.

One rule splits a name, in tars and in folders: what follows the last dot is the suffix, in any case, and what stands
before it is the key. So IMG_2020.01.02.jpg and IMG_2020.01.02.txt are a sample, and the mask a.seg.png beside a.jpg and
a.txt is an image of its own, "a.seg", that has no caption. (WebDataset splits at the first dot: all IMG_2020.* would be
one sample, of which one image is left.)
"""
import functools
import os
from importlib.util import find_spec
from typing import NamedTuple

from inputs.places import is_address

IMAGES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.gif', '.bmp', '.avif', '.tif', '.tiff', '.jp2', '.ppm')
HEIF = ('.heic', '.heif')  # read where pillow-heif is installed
CAPTIONS = ('.txt', '.json')
ARCHIVES = ('.tar', '.tgz', '.tbz2', '.txz', '.gz', '.bz2', '.xz', '.zst', '.zip', '.7z', '.rar')


class File(NamedTuple):
    """A tar or an image, as it was found."""
    name: str  # a path, or an address in a store
    size: int  # bytes
    captions: tuple[str, ...] = ()  # of an image: the suffixes, as they are spelled, of the captions beside it


def split_name(name: str) -> tuple[str, str]:
    """Key and suffix of a file's name, the suffix with its dot and in small letters; '' where there is none."""
    key, dot, suffix = name.rpartition('.')
    if not key:
        return name, ''
    return key, f'.{suffix.lower()}'


@functools.cache
def has_heif_package() -> bool:
    return find_spec('pillow_heif') is not None


def is_image(suffix: str) -> bool:
    return suffix in IMAGES or (suffix in HEIF and has_heif_package())


def why_not_read(suffix: str) -> str:
    """Why a file of this suffix is neither image, caption nor tar."""
    if suffix in HEIF:
        return f'{suffix} needs a package (pip install pillow-heif)'
    if suffix in ARCHIVES:
        return f'{suffix} is packed; unpack it'
    if suffix == '':
        return 'a file without a suffix is not read'
    return f'{suffix} is not read'


def is_hidden(name: str) -> bool:
    """Whether a file is hidden, or lies in a hidden folder, as .Trash/a.jpg and ._a.jpg do."""
    return any(part.startswith('.') and part not in ('.', '..') for part in name.split('/'))


def held_out_beside(out: str) -> str:
    """Where the samples that are held out of OUT lie: beside it, OUT-held-out.

    Raises ValueError if OUT is a whole bucket, beside which there is nothing.
    """
    if is_address(out):
        address = out.rstrip('/')
        scheme, _, place = address.partition('://')
        names_before_a_folder = 2 if scheme == 'azure' else 1  # an account and a container, or a bucket
        if place.count('/') < names_before_a_folder:
            raise ValueError(f'--held_out needs a folder beside OUT {out}; give OUT a folder in the bucket')
        return f'{address}-held-out'
    if os.path.basename(out.rstrip('/')) in ('', '.', '..'):
        out = os.path.realpath(out)
    return f'{out.rstrip("/")}-held-out'
