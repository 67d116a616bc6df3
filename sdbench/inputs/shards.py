"""Read the index.json of a dataset of MDS shards, and refuse datasets that would run code or write outside a folder."""
import hashlib
import json
import os
from pathlib import PurePosixPath

from sdbench.errors import UserError, one_line
from sdbench.files import INDEX, is_url
from sdbench.stores import read_file

MOMENTS = 'moments'  # column in encode.py's shards and key in a batch: mean and log variance, float16 (8, H/8, W/8)
IMAGES_HASH = 'images_sha256'  # key in `latents` of index.json: `index_hash` of the images that were encoded
# Key in the index.json of both datasets that convert.py --held_out writes: `share`, `seed`, `conversion` and `side`.
DRAW = 'draw'
HELD_OUT_SIDE = 'held out'
RUN_CODE = {'pkl'}  # Streaming's `_unsafe_encodings`, without its import, which takes seconds
MDS_COLUMNS = {'jpg': 'bytes', 'caption': 'str'}  # `jpg` has any format of inputs/images.py; other columns are ignored
LATENT_COLUMNS = {'caption': 'str'}  # and MOMENTS, whose MDS type contains the size


def read_index(remote: str, flag: str = '--remote') -> dict:
    """Read and check the index.json of a dataset of MDS shards, in a folder or an object store.

    Raises UserError, which names `flag`, if the index.json cannot be read or trusted, or if a shard lacks a column.
    """
    label = f'{flag} {remote}'
    try:
        content = read_file(os.path.join(remote, INDEX), label)
    except OSError as error:
        raise UserError(one_line(error) if is_url(remote) else f'{label} cannot be read ({error.strerror})') from None
    if content is None:
        raise UserError(f'{label} holds no {INDEX}, so it is not a complete MDS dataset; check the name, or make the '
                        'dataset: convert.py and encode.py write that file last')

    # Check the keys that are read later. An error of these types means that the structure is not ours.
    try:
        index = json.loads(content)
        for shard in index['shards']:
            check_shard(shard, 'latents' in index, label)
        hash_of_images(index)  # raises KeyError if latents lack the hash
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError):
        raise UserError(f'{label} has an {INDEX} that lacks what convert.py and encode.py write; make the dataset again'
                        ) from None
    return index


def number_of_samples(index: dict) -> int:
    return sum(shard['samples'] for shard in index['shards'])


def read_image_index(remote: str, flag: str = '--remote') -> dict:
    """Read the index.json of a dataset of images. Raises UserError if it cannot be read, or if the data are latents."""
    index = read_index(remote, flag)
    if 'latents' in index:
        raise UserError(f'{flag} {remote} holds latents; give the images that were encoded')
    return index


def index_hash(index: dict) -> str:
    """Return the SHA-256 of an index.json's content, in hex. It changes when a dataset is made again."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def hash_of_images(index: dict) -> str:
    """Return the `index_hash` of a dataset of images. For latents, return the hash of the images that were encoded."""
    if 'latents' in index:
        return index['latents'][IMAGES_HASH]
    return index_hash(index)


def are_two_sides(draw: dict | None, other: dict | None) -> bool:
    """Return whether two datasets, by their values of DRAW, are the two sides of the same conversion.

    Two conversions can put the same picture on different sides, even with the same fraction and seed, because the side
    depends on the bytes of the image file, and these differ if the picture has another size.
    """
    if not draw or not other or 'conversion' not in draw:  # older versions did not write `conversion`
        return False
    return draw['conversion'] == other.get('conversion') and draw['side'] != other['side']


def was_trained_on(data: list[dict], index: dict) -> bool | None:
    """Tell whether weights were trained on the images of an index.json; None if unknown.

    The answer is yes if one phase of their training used this dataset. It is no if every phase used one side of a
    `convert.py --held_out`, and this dataset is the other side of the same conversion. Otherwise it is unknown.

    Args:
        data: IMAGES_HASH and DRAW of the dataset of each phase; an entry without keys is an unknown dataset.
        index: the index.json.
    """
    if any(phase.get(IMAGES_HASH) == hash_of_images(index) for phase in data):
        return True
    return False if all(are_two_sides(phase.get(DRAW), index.get(DRAW)) for phase in data) else None


def check_shard(shard: dict, latents: bool, label: str) -> None:
    """Check the entry in index.json of a shard of images or `latents`. `label` begins the error messages.

    Raises UserError if the shard is not MDS, would be written outside its folder, would run code, or lacks a column.
    """
    # Refuse entries that could write outside the cache or run code. Formats other than MDS have more files per shard.
    # Their names are not checked here, and a small cache would delete these files.
    if shard['format'] != 'mds':
        raise UserError(f'{label} has a shard of format {shard["format"]}, which is not read; convert the data again')
    for file in (shard['raw_data'], shard['zip_data']):
        name = PurePosixPath(file['basename'] if file else '')
        if name.is_absolute() or '..' in name.parts:
            raise UserError(f'{label} has a shard named {name}, outside its folder; do not use it')
    columns = dict(zip(shard['column_names'], shard['column_encodings'], strict=True))
    for name, encoding in columns.items():
        if encoding in RUN_CODE:
            raise UserError(f'{label} has a column {name} of type {encoding}, which can run code; do not use it')

    # Require the columns that training reads.
    needed = MDS_COLUMNS
    if latents:
        needed = LATENT_COLUMNS | {MOMENTS: columns.get(MOMENTS, 'ndarray')}  # any type, because it contains the size
    missing = sorted(needed.items() - columns.items())
    if missing:
        wanted = ', '.join(f'{name} of {encoding}' for name, encoding in missing)
        present = ', '.join(f'{name} of {encoding}' for name, encoding in columns.items())
        raise UserError(f'{label} lacks the columns {wanted}; it has {present}')


def require_same_origin(remote: str, index: dict, origin: dict, flag: str = '--remote') -> None:
    """Raise UserError, which names `flag`, if latents were not encoded at the image size and with the VAE of this run.

    `origin` is the image size and the VAE of this run, from `ModelFiles.origin_of_latents`.
    """
    for key, ours in origin.items():
        theirs = index['latents'].get(key)
        if theirs != ours:
            raise UserError(f'{flag} {remote} holds latents with {key} {theirs}, and this run has {ours}; use the '
                            '--image_size, --model_name and --pretrained of their encoding')
