"""Read the index.json of a dataset of MDS shards, and refuse what cannot be trusted."""
import hashlib
import json
import os
import tempfile
from pathlib import Path, PurePosixPath

from streaming.base.format.mds.encodings import is_mds_encoding_safe

from sdbench.errors import UserError, one_line
from sdbench.paths import INDEX, is_url
from sdbench.stores import download

MOMENTS = 'moments'  # the column of encode.py's shards, and the name in a batch: ndarray float16 (8, H/8, W/8)
IMAGES_HASH = 'images_sha256'  # among the facts of latents in their index.json: `index_hash` of the images
DRAW = 'draw'  # in the index.json of each side of convert.py --held_out: its `share`, `seed`, `conversion` and `side`
HELD_OUT_SIDE = 'held out'
MDS_COLUMNS = {'jpg': 'bytes', 'caption': 'str'}  # an image of any format in inputs.images; other columns are ignored
LATENT_COLUMNS = {'caption': 'str'}  # and MOMENTS, whose type has the size in it


def read_index(remote: str, flag: str = '--remote') -> dict:
    """Read the index.json of a dataset of MDS shards, in a folder or a store.

    Raises UserError, by the `flag` that the dataset was given by, if there is none that can be read and trusted, or a
    shard lacks a column.
    """
    label = f'{flag} {remote}'

    # the file
    if os.path.isfile(remote) or os.path.basename(remote) == INDEX:
        raise UserError(f'{label} is a file; give the folder that holds {INDEX} and the shards')

    # its content
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(remote, INDEX)
            if is_url(remote):
                path = Path(folder, INDEX)
                download(os.path.join(remote, INDEX), str(path), label)
            content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f'{label} holds no {INDEX}, so no whole MDS dataset; check the name, or make one: '
                        'convert.py and encode.py write that file last') from None
    except OSError as error:
        raise UserError(one_line(error) if is_url(remote) else f'{label} cannot be read ({error.strerror})') from None

    # what it says of each shard
    try:
        index = json.loads(content)
        for shard in index['shards']:
            check_shard(shard, 'latents' in index, label)
        hash_of_images(index)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError):
        raise UserError(f'{label} has an {INDEX} that is not one of convert.py or encode.py; make the data again'
                          ) from None
    return index


def number_of_samples(index: dict) -> int:
    """Count the samples of a dataset by its index.json."""
    return sum(shard['samples'] for shard in index['shards'])


def read_image_index(remote: str, flag: str = '--remote') -> dict:
    """Read the index.json of a dataset of images. Raises UserError if there is none, or the dataset is of latents."""
    index = read_index(remote, flag)
    if 'latents' in index:
        raise UserError(f'{flag} {remote} holds latents; give the images that they were made of')
    return index


def index_hash(index: dict) -> str:
    """Return a SHA-256 of what an index.json says, in hex, which tells a dataset from one that was made again."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def hash_of_images(index: dict) -> str:
    """Return the `index_hash` of the images of a dataset; of latents, that of those that they were made of."""
    if 'latents' in index:
        return index['latents'][IMAGES_HASH]
    return index_hash(index)


def are_two_sides(draw: dict | None, other: dict | None) -> bool:
    """Tell whether two datasets, by what their index.json says of a DRAW, are the two sides of one conversion.

    The sides of two conversions can have a picture in common, although share and seed are the same: at another size it
    has other bytes, and the draw is by the bytes.
    """
    if not draw or not other or 'conversion' not in draw:  # older versions did not write it
        return False
    return draw['conversion'] == other.get('conversion') and draw['side'] != other['side']


def check_shard(shard: dict, latents: bool, label: str) -> None:
    """Raise UserError if an entry of an index is no MDS of images, or of latents, and captions, or would do harm."""
    # nothing that is written outside its folder, or run as code
    if shard['format'] != 'mds':  # others name more files, which a small cache would remove
        raise UserError(f'{label} has a shard of format {shard["format"]}, which is not read; convert the data again')
    for file in (shard['raw_data'], shard['zip_data']):
        name = PurePosixPath(file['basename'] if file else '')
        if name.is_absolute() or '..' in name.parts:
            raise UserError(f'{label} has a shard named {name}, outside its folder; do not use it')
    columns = list(zip(shard['column_names'], shard['column_encodings'], strict=True))
    for name, encoding in columns:
        if not is_mds_encoding_safe(encoding):
            raise UserError(f'{label} has a column {name} of type {encoding}, which can run code; do not use it')

    # the columns that a training reads
    columns = dict(columns)
    needed = MDS_COLUMNS
    if latents:
        needed = LATENT_COLUMNS | {MOMENTS: columns.get(MOMENTS, 'moments')}
    missing = sorted(needed.items() - columns.items())
    if missing:
        wanted = ', '.join(f'{name} of {encoding}' for name, encoding in missing)
        present = ', '.join(f'{name} of {encoding}' for name, encoding in columns.items())
        raise UserError(f'{label} lacks the columns {wanted}; it has {present}')


def require_same_origin(remote: str, index: dict, origin: dict, flag: str = '--remote') -> None:
    """Raise UserError if the latents of `index` are not of the size and VAE that `origin` names (models.latents)."""
    for key, ours in origin.items():
        theirs = index['latents'].get(key)
        if theirs != ours:
            raise UserError(f'{flag} {remote} holds latents with {key} {theirs}, and this run has {ours}; use the '
                            '--image_size, --model_name and --pretrained of their encoding')
