"""MDS shards and their index.json: the columns that are read here, and what of a dataset can be trusted."""
import hashlib
import json
import os
import tempfile
from pathlib import Path, PurePosixPath

from streaming.base.compression import is_compression
from streaming.base.format import FileInfo
from streaming.base.format.mds.encodings import is_mds_encoding_safe
from streaming.base.hashing import get_hash, is_hash
from streaming.base.storage import CloudDownloader
from streaming.base.util import bytes_to_int

from inputs.errors import one_line
from inputs.places import CLAIM, INDEX, is_address, program_of, refuse_folder_without_index, why_no_dataset
from inputs.words import counted

LATENTS = 'moments'  # the column of encode.py's shards, and the name in a batch: ndarray float16 (8, H/8, W/8)
MDS_COLUMNS = {'jpg': 'bytes', 'caption': 'str'}  # an image of any format in inputs.images; other columns are ignored
LATENT_COLUMNS = {'caption': 'str'}  # and LATENTS, whose type has the size in it
# what Streaming takes in the entry of a shard, and of a file of it
SHARD_KEYS = {'column_encodings', 'column_names', 'column_sizes', 'compression', 'format', 'hashes', 'raw_data',
              'samples', 'size_limit', 'version', 'zip_data'}
FILE_KEYS = {'basename', 'bytes', 'hashes'}
LARGEST_SHARD = 2 ** 32  # bytes: a shard says in four where each sample begins


def read_index(remote: str, flag: str = '--remote') -> dict:
    """The index.json of a dataset of MDS shards.

    Raises ValueError if there is none, or none that can be read and trusted.

    Errors name the `flag` that the dataset was given by.
    """
    text = fetch_index(remote, flag)
    try:
        index = json.loads(text)
        if index['version'] != 2:
            raise ValueError(f'its version is {index["version"]!r}, not 2')
        faults = [fault for fault in map(fault_of_entry, index['shards']) if fault]
        dict(index.get('latents', {}))
    except (KeyError, TypeError, AttributeError):  # of what is in it
        faults = ['has an index.json that is not one of MDS shards; convert the data anew']
    except ValueError as error:  # of JSON, of Unicode, and our own
        faults = [f'has an index.json that is not one of MDS shards ({one_line(error)[:200]}); convert the data anew']
    if faults:
        raise ValueError(f'{flag} {remote} {faults[0]}')
    return index


def index_hash(index: dict) -> str:
    """What tells a dataset from the same one made anew: a SHA-256 of all that its index.json says, in hex."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def fetch_index(remote: str, flag: str = '--remote') -> bytes:
    """The bytes of a dataset's index.json, from a folder or a store. Raises ValueError if they cannot be had."""
    if os.path.isdir(remote):
        refuse_folder_without_index(flag, remote)
        try:
            return Path(remote, INDEX).read_bytes()
        except OSError as error:
            raise ValueError(f'{flag} {remote} could not be read ({type(error).__name__}: {one_line(error)})') from None
    if not is_address(remote):
        raise ValueError(f'{flag} {remote} is no folder here, and no address such as s3://bucket/folder; check the '
                         'name')
    try:
        return download(remote, INDEX)
    except Exception as error:  # every storage client has its own exceptions
        reason = f'{type(error).__name__}: {one_line(error)}'
        claim = claim_in_store(remote)
        if isinstance(error, FileNotFoundError) or program_of(claim):
            raise ValueError(f'{flag} {remote} {why_no_dataset(claim)}') from None
        raise ValueError(f'{flag} {remote} could not be read ({reason})') from None


def download(remote: str, name: str) -> bytes:
    """The bytes of a file of a store. Raises FileNotFoundError, and whatever its client raises."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        CloudDownloader.direct_download(os.path.join(remote, name), str(path))
        return path.read_bytes()


def claim_in_store(remote: str) -> bytes | None:
    """The bytes of a claim.json; None where there is none, or it cannot be had."""
    try:
        return download(remote, CLAIM)
    except Exception:  # whatever a storage client raises: then nothing is known of it
        return None


def fault_of_entry(shard: dict) -> str | None:
    """What in the entry of a shard Streaming would write outside its folder, or run as code; None if it is safe.

    ValueError, KeyError, TypeError or AttributeError: it is no entry of an MDS shard.
    """
    if shard['format'] != 'mds' or shard['version'] != 2:
        raise ValueError(f'a shard has the format {shard["format"]!r} of version {shard["version"]!r}, not mds of 2')
    if shard.keys() != SHARD_KEYS:
        raise ValueError(f'a shard has {sorted(shard.keys() ^ SHARD_KEYS)[0]!r} too much or too little')
    refuse_bad_columns(shard)
    refuse_bad_number('samples of a shard', shard['samples'])
    if shard['size_limit'] is not None:
        refuse_bad_number('size_limit of a shard', parse_size(shard['size_limit']))
    files = [shard['raw_data']]
    if shard['zip_data'] or shard['compression']:
        if not is_compression(shard['compression']):
            raise ValueError(f'a shard is compressed by {shard["compression"]!r}, which Streaming cannot unpack')
        files.append(shard['zip_data'])
    for file in files:
        refuse_bad_file(file)
        name = PurePosixPath(file['basename'])
        if name.is_absolute() or '..' in name.parts:
            return f'has a shard named {name}, outside its folder; do not use it'
    for name, encoding in zip(shard['column_names'], shard['column_encodings'], strict=True):
        if not is_mds_encoding_safe(encoding):
            return f'has a column {name} of type {encoding}, which can run code; do not use it'
    return None


def refuse_bad_columns(shard: dict) -> None:
    """Raises ValueError if the columns of a shard have not each a name, a type, and a size or None."""
    names, encodings, sizes = (shard[key] for key in ('column_names', 'column_encodings', 'column_sizes'))
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError(f'a shard has {len(names)} column_names, {len(encodings)} column_encodings and {len(sizes)} '
                         'column_sizes')
    for text in (*names, *encodings):
        if not isinstance(text, str):
            raise ValueError(f'a shard has a column of {text!r}')
    for size in sizes:
        if size is not None:
            refuse_bad_number('column_sizes of a shard', size)


def refuse_bad_file(file: dict) -> None:
    """Raises ValueError if the entry of a file has no name, size or hashes that Streaming takes."""
    if file.keys() != FILE_KEYS or not isinstance(file['basename'], str) or not file['basename']:
        raise ValueError(f'a shard has a file of {str(file)[:100]}')
    refuse_bad_number('bytes of a shard', file['bytes'])
    for algorithm in file['hashes'].keys():
        if not is_hash(algorithm):
            raise ValueError(f'a shard has a hash of the algorithm {algorithm!r}, which Streaming does not have')


def refuse_bad_number(what: str, value: int) -> None:
    """Raises ValueError if `value` is no number, is negative, or is more than any shard has."""
    if type(value) is not int or not 0 <= value < LARGEST_SHARD:
        raise ValueError(f'{what} is {value!r}, not a number from 0 to {LARGEST_SHARD - 1}')


def parse_size(text: str | int) -> int:
    """Bytes, of a number or a text such as 500gb. Raises ValueError if it is no size."""
    try:
        return bytes_to_int(text)
    except OverflowError:
        raise ValueError(f'--cache_limit {text} is endless') from None


def require_columns(remote: str, index: dict, flag: str = '--remote') -> None:
    """Raises ValueError if a shard of `index` lacks a column, of images and captions or of latents and captions."""
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
    """Raises ValueError if `cache_limit` (bytes, or a text such as 500gb) is too small for the shards of `index`."""
    if cache_limit is None:
        return
    least = 4 * max(map(most_bytes, index['shards']), default=0)  # Streaming refuses less
    if parse_size(cache_limit) < least:
        raise ValueError(f'--cache_limit {cache_limit} holds fewer than 4 shards of --remote {remote}; use at least '
                         f'{least}')


def most_bytes(shard: dict) -> int:
    """Bytes that a shard takes while it is unpacked."""
    return sum(file['bytes'] for file in (shard['raw_data'], shard['zip_data']) if file)


def require_same_origin(remote: str, index: dict, origin: dict, flag: str = '--remote') -> None:
    """Raises ValueError if the latents of `index` are not of the size and VAE that `origin` names (models.latents)."""
    if 'latents' not in index:
        return
    for key, ours in origin.items():
        theirs = index['latents'].get(key)
        if theirs != ours:
            raise ValueError(f'{flag} {remote} holds latents with {key} {theirs}, and this run has {ours}; use the '
                             '--image_size, --model_name and --pretrained of their encoding')


def fault_of_shard(path: str, expected: FileInfo, samples: int) -> str | None:
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
            fault = fault_of_bytes(file.read(), expected)
            if fault:
                return fault
    if (size, count) != (expected.bytes, samples):
        return (f'is not the one of index.json: {counted(count, "sample")} in {size:,} bytes, not {samples:,} in '
                f'{expected.bytes:,}')
    return None


def fault_of_bytes(content: bytes, expected: FileInfo) -> str | None:
    """What is wrong with the content of a file, by its size and hashes in index.json; None if nothing is."""
    if len(content) != expected.bytes:
        return f'is cut short or damaged: {len(content):,} bytes, not the {expected.bytes:,} of index.json'
    for algorithm, digest in expected.hashes.items():
        if get_hash(algorithm, content) != digest:
            return f'fails its {algorithm} hash: its bytes have changed'
    return None
