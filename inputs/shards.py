"""MDS shards and their index.json: the columns that are read here, and what of a dataset can be trusted."""
import hashlib
import json
import os
import tempfile
from pathlib import Path, PurePosixPath

from streaming.base.format.mds.encodings import is_mds_encoding_safe
from streaming.base.hashing import get_hash
from streaming.base.storage import CloudDownloader
from streaming.base.util import bytes_to_int

from inputs.errors import one_line

LATENTS = 'moments'  # the column of encode.py's shards, and the name in a batch: ndarray float16 (8, H/8, W/8)
MDS_COLUMNS = {'jpg': 'bytes', 'caption': 'str'}  # an image of any format in inputs.images; other columns are ignored
CLAIM = 'claim.json'  # of a dataset that is made in parts, see inputs.parts: there before its index.json
LATENT_COLUMNS = {'caption': 'str'}  # and LATENTS, whose type has the size in it


def read_index(remote: str, flag: str = '--remote') -> dict:
    """The index.json of a dataset of MDS shards. ValueError: there is none, or none that can be read and trusted.

    Errors name the `flag` that the dataset was given by.
    """
    text = fetch_index(remote, flag)
    try:
        index = json.loads(text)
        faults = [fault for fault in map(fault_of_entry, index['shards']) if fault]
        dict(index.get('latents', {}))
    except (ValueError, KeyError, TypeError, AttributeError):  # of JSON, of Unicode, of what is in it
        faults = ['has an index.json that is not one of MDS shards; convert the data anew']
    if faults:
        raise ValueError(f'{flag} {remote} {faults[0]}')
    return index


def fetch_index(remote: str, flag: str = '--remote') -> bytes:
    """The bytes of a dataset's index.json, from a folder or an object store. ValueError: they cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        is_folder = os.path.isdir(remote)
        path = Path(remote if is_folder else folder, 'index.json')
        try:
            if not is_folder:
                CloudDownloader.direct_download(os.path.join(remote, 'index.json'), str(path))
            return path.read_bytes()
        except FileNotFoundError:
            refuse_unfinished(flag, remote, folder)
            raise ValueError(f'{flag} {remote} holds no index.json, so no MDS dataset; make one with convert.py') \
                from None
        except Exception as error:  # every storage client has its own exceptions
            reason = f'{type(error).__name__}: {one_line(error)}'
            refuse_unfinished(flag, remote, folder)
            raise ValueError(f'{flag} {remote} could not be read ({reason})') from None


def refuse_unfinished(flag: str, remote: str, folder: str) -> None:
    """ValueError: a remote without an index.json holds the beginning of a dataset.

    Args:
        flag: what the error calls it.
        remote: folder or object store.
        folder: a temporary one.
    """
    is_folder = os.path.isdir(remote)
    path = Path(remote if is_folder else folder, CLAIM)
    try:
        if not is_folder:
            CloudDownloader.direct_download(os.path.join(remote, CLAIM), str(path))
        program = json.loads(path.read_bytes())['program']
    except Exception:  # there is none, or whatever a storage client or JSON raises: then it is no such dataset
        return
    raise ValueError(f'{flag} {remote} is not finished: {program} has begun it and writes its index.json last; start '
                     f'{program} again with the same flags, and it goes on from there') from None


def fault_of_entry(shard: dict) -> str | None:
    """What in the entry of a shard Streaming would write outside its folder, or run as code; None if it is safe.

    ValueError, KeyError, TypeError or AttributeError: it is no entry of a shard.
    """
    for file in (shard['raw_data'], shard['zip_data']):
        if file:
            name = PurePosixPath(file['basename'])
            if name.is_absolute() or '..' in name.parts:
                return f'has a shard named {name}, outside its folder; do not use it'
    for name, encoding in zip(shard['column_names'], shard['column_encodings'], strict=True):
        if not is_mds_encoding_safe(encoding):
            return f'has a column {name} of type {encoding}, which can run code; do not use it'
    for key, value in (('samples', shard['samples']), ('bytes', shard['raw_data']['bytes'])):
        if not isinstance(value, int):
            raise ValueError(f'{key} of a shard is {value!r}, not a number')
    return None


def require_columns(remote: str, index: dict, flag: str = '--remote') -> None:
    """ValueError: a shard of `index` lacks a column, of images and captions or of latents and captions."""
    for shard in index['shards']:
        columns = dict(zip(shard['column_names'], shard['column_encodings'], strict=True))
        needed = dict(MDS_COLUMNS)
        if 'latents' in index:
            needed = LATENT_COLUMNS | {LATENTS: columns.get(LATENTS, 'moments')}
        missing = sorted(needed.items() - columns.items())
        if missing:
            wanted = ', '.join(f'{name} of {encoding}' for name, encoding in missing)
            present = ', '.join(f'{name} of {encoding}' for name, encoding in columns.items())
            raise ValueError(f'{flag} {remote} lacks the columns {wanted}; it has {present}')


def require_cache_for(remote: str, index: dict, cache_limit: str | int | None) -> None:
    """ValueError: `cache_limit` (bytes, or a text such as 500gb) is too small for the shards of `index`."""
    if cache_limit is None:
        return
    largest = max((shard['raw_data']['bytes'] for shard in index['shards']), default=0)
    least = 4 * largest  # Streaming refuses less
    if bytes_to_int(cache_limit) < least:
        raise ValueError(f'--cache_limit {cache_limit} holds fewer than 4 shards of --remote {remote}; use at least '
                         f'{least}')


def require_same_origin(remote: str, index: dict, origin: dict, flag: str = '--remote') -> None:
    """ValueError: the latents of `index` are not of the size and the VAE that `origin` names (models.latents)."""
    if 'latents' not in index:
        return
    for key, ours in origin.items():
        theirs = index['latents'].get(key)
        if theirs != ours:
            raise ValueError(f'{flag} {remote} holds latents with {key} {theirs}, and this run has {ours}; use the '
                             '--image_size, --model_name and --pretrained of their encoding')


def index_hash(index: dict) -> str:
    """Sixteen hex digits that tell one dataset from another: sha256 of the canonical JSON of its shards."""
    shards = json.dumps(index['shards'], sort_keys=True, separators=(',', ':'))
    return hashlib.sha256(shards.encode()).hexdigest()[:16]


def number_of_samples(index: dict) -> int:
    return sum(shard['samples'] for shard in index['shards'])


def fault_of_shard(path: str, expected, samples: int) -> str | None:
    """What is wrong with the file of an MDS shard; None if it is the one of index.json.

    Args:
        path: of the file. FileNotFoundError: there is none.
        expected: its `bytes` and `hashes` (by algorithm) in index.json.
        samples: its number of samples in index.json.
    """
    with open(path, 'rb') as file:
        size = os.fstat(file.fileno()).st_size
        count = int.from_bytes(file.read(4), 'little')
        file.seek(4 + 4 * count)
        end_of_last_sample = int.from_bytes(file.read(4), 'little')  # by the file itself
        if size not in (expected.bytes, end_of_last_sample):
            return f'is cut short or damaged: {size:,} bytes, not the {expected.bytes:,} of index.json'
        if size == expected.bytes and expected.hashes:
            file.seek(0)
            content = file.read()
            for algorithm, digest in expected.hashes.items():
                if get_hash(algorithm, content) != digest:
                    return f'fails its {algorithm} hash: its bytes have changed'
    if (size, count) != (expected.bytes, samples):
        return (f'is not the one of index.json: {count:,} samples in {size:,} bytes, not {samples:,} in '
                f'{expected.bytes:,}')
    return None
