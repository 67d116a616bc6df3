"""Make small real samples: pictures, shards, tars, and an object that runs code when it is unpickled."""
import io
import json
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow.parquet
from PIL import Image, ImageOps
from streaming import MDSWriter, StreamingDataset

from sdbench.inputs.batches import from_columns
from sdbench.inputs.stream import own_shared_memory


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """Return a smooth random RGB picture, which JPEG hardly changes."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.BICUBIC)


def encoded(image: Image.Image, format: str = 'JPEG', **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def large_png() -> bytes:
    """Return a small PNG whose header says that it has 20,000 by 20,000 pixels."""
    png = encoded(Image.new('1', (8, 8)), 'PNG')
    header = png[12:16] + (20_000).to_bytes(4) * 2 + png[24:29]
    return png[:12] + header + zlib.crc32(header).to_bytes(4) + png[33:]


def good(index: int) -> dict:
    """Return a good sample."""
    return {'jpg': encoded(picture(index)), 'caption': f'picture {index}'}


def write_files(folder: Path | str, files: dict[str, bytes | str]) -> Path:
    """Write files, and the folders in which they lie, into a folder."""
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Path(folder)


def files_of_samples(samples: list[dict]) -> dict[str, bytes]:
    """Return a .jpg and a .txt for each sample, named by its number."""
    files = {}
    for index, sample in enumerate(samples):
        files |= {f'{index}.jpg': sample['jpg'], f'{index}.txt': sample['caption'].encode()}
    return files


def write_photos(folder: Path, number: int) -> Path:
    """Write this number of JPEGs into a folder, each with a text file that has its caption."""
    return write_files(folder, files_of_samples([good(index) for index in range(number)]))


def write_shards(folder, samples: list[dict], columns=None, size_limit: int = 1 << 14, **options) -> str:
    columns = columns or {'jpg': 'bytes', 'caption': 'str'}
    with MDSWriter(out=str(folder), columns=columns, size_limit=size_limit, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return str(folder)


def write_several_captions(folder, samples: list[dict]) -> str:
    """Write the images with three captions each: their own, named short, and two more, named long."""
    several = [sample | {'captions': three_captions(sample['caption'])} for sample in samples]
    write_shards(folder, several, {'jpg': 'bytes', 'caption': 'str', 'captions': 'json'})
    index = Path(folder, 'index.json')
    counts = {'captions': {'short': len(samples), 'long': 2 * len(samples)}}
    index.write_text(json.dumps(json.loads(index.read_text()) | counts))
    return str(folder)


def three_captions(short: str) -> dict[str, list[str]]:
    return {'short': [short], 'long': [f'{short}, which is long', f'{short}, which is longer']}


def captions_of(folder) -> list[dict[str, list[str]]]:
    """Return all captions of each sample in shards, by name."""
    is_ours = 'captions' in json.loads(Path(folder, 'index.json').read_text())
    with own_shared_memory():
        return [from_columns(columns, is_ours)
                for columns in StreamingDataset(local=str(folder), shuffle=False, batch_size=1)]


def read_back(folder: Path | str, **options) -> list[tuple[bytes, str]]:
    """Return the image and the caption of each sample in a dataset, read by Streaming's own reader."""
    with own_shared_memory():
        dataset = StreamingDataset(local=str(folder), shuffle=False, batch_size=1, **options)
    return [(dataset[i]['jpg'], dataset[i]['caption']) for i in range(len(dataset))]


def skipped(out: Path | str) -> list[tuple[str, str | int | None, str]]:
    """Return the name of the file, the key and the reason in each line of a dataset's skipped.jsonl, sorted."""
    lines = [json.loads(line) for line in Path(out, 'skipped.jsonl').read_text().splitlines()]
    return sorted((Path(line['source']).name, line['key'], line['reason']) for line in lines)


def skipped_kinds(out: Path | str) -> list[tuple[str, str | int | None, str]]:
    """Return the same with the kind of each reason, which stands before its colon."""
    return [(name, key, reason.partition(':')[0]) for name, key, reason in skipped(out)]


def write_tar(path: Path | str, files: dict[str, bytes] | list) -> Path:
    """Write a tar. Its members are names with bytes, or tarfile.TarInfo objects with None."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, 'w') as tar:
        for name, data in files.items() if isinstance(files, dict) else files:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = member.size or len(data or b'')
            tar.addfile(member, io.BytesIO(data) if data else None)
    return path


def write_parquet(path: Path | str, columns: dict[str, list], rows_of_group: int = 100) -> Path:
    """Write a Parquet file with row groups of this size. A dict becomes a struct, like images on the hub."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_of_group)
    return path


def shaded(shade: int, format: str = 'JPEG') -> bytes:
    """Return an image file with a single colour."""
    return encoded(Image.new('RGB', (16, 12), (shade, 0, 255 - shade)), format)


def sample_files(key: str, shade: int, suffix: str = 'jpg') -> dict[str, bytes]:
    """Return the three files of a sample in a tar from img2dataset."""
    image = shaded(shade, {'jpg': 'JPEG', 'png': 'PNG', 'webp': 'WEBP'}[suffix])
    return {f'{key}.{suffix}': image, f'{key}.txt': f'caption {shade}'.encode(), f'{key}.json': b'{"width": 16}'}


def pillow_square(encoded_image: bytes) -> Image.Image:
    """Return the centre square of an image, decoded by Pillow alone."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded_image))).convert('RGB')
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1).astype(int)  # (3, H, W)


class Hostile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')
