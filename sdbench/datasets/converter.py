"""Convert tars, Parquet files and images into the shards of a part. Each worker process runs `convert_parts`."""
import hashlib
import html
import io

import ftfy
import torch
from PIL import Image

from sdbench.datasets.output import DAMAGED, Output, PartWriter
from sdbench.datasets.readers import make_sample, read_samples
from sdbench.datasets.tables import Columns
from sdbench.datasets.workers import Part
from sdbench.errors import BadSample
from sdbench.flags.commands import Convert
from sdbench.flags.train import Model
from sdbench.inputs.captions import MDS_CAPTION_COLUMNS, ONE_CAPTION, Named, to_columns
from sdbench.inputs.images import formats
from sdbench.inputs.tokenizer import is_too_long

SHARD_COLUMNS = {'jpg': 'bytes', **MDS_CAPTION_COLUMNS}  # MDS types by column


def convert_parts(settings: Convert, outputs: list[Output], parts: list[Part]) -> None:
    """Convert the files of the given parts into shards, and finish each part before the next one.

    Args:
        settings: flags of the command.
        outputs: OUT and, with --held_out, the dataset of held-out samples.
        parts: parts to convert. The sources of each part are Files.
    """
    torch.set_num_threads(1)  # each core has a worker already
    for output in outputs:
        output.require_begun()
    columns = Columns(settings.image_column, settings.caption_column)
    clean = str  # returns a caption unchanged
    if settings.clean_captions:
        clean = clean_caption

    for part in parts:
        writer = PartWriter(outputs[0], part.name, SHARD_COLUMNS, settings.size_limit)
        if settings.held_out:
            held_out_writer = PartWriter(outputs[1], part.name, SHARD_COLUMNS, settings.size_limit)

        # Write each sample, or record the reason why it is skipped. Count the good samples of a damaged file.
        skipped = []
        for file in part.sources:
            kept = 0
            for key, fields in read_samples(file, columns, settings.split):
                try:
                    image, captions, missing = make_sample(fields, columns, clean)
                except BadSample as reason:
                    skipped.append({'source': file.name, 'key': key, 'reason': str(reason)})
                    if str(reason).startswith(DAMAGED):
                        skipped[-1]['samples_kept'] = kept
                    continue
                kept += 1
                skipped += [{'source': file.name, 'key': key, 'reason': reason} for reason in missing]
                if settings.held_out and is_held_out(image, settings.held_out, settings.seed):
                    write_sample(held_out_writer, image, captions, settings.sample_per_caption)
                else:
                    write_sample(writer, image, captions, settings.sample_per_caption)

        if settings.held_out:
            held_out_writer.finish()
        writer.finish(skipped)  # last, because the part is then done


def write_sample(writer: PartWriter, image: bytes, captions: Named, per_caption: bool) -> None:
    """Write an image as one sample with all its captions, or as one sample per caption, and count the captions."""
    all_texts = [text for texts in captions.values() for text in texts]
    samples = [captions]
    if per_caption:
        samples = [{ONE_CAPTION: [text]} for text in all_texts]
    for sample_captions in samples:
        writer.write({'jpg': image, **to_columns(sample_captions)})
    count_shape(writer, image)
    writer.captions.update({name: len(texts) for name, texts in captions.items()})
    writer.long_captions += sum(map(is_too_long, all_texts))


def count_shape(writer: PartWriter, image: bytes) -> None:
    """Count an image, whether its centre square lacks more than a third of it, and whether it must be enlarged."""
    with Image.open(io.BytesIO(image), formats=formats()) as opened:
        shorter, longer = sorted(opened.size)
    writer.shapes['images'] += 1
    writer.shapes['cropped'] += 3 * shorter < 2 * longer
    writer.shapes['enlarged'] += shorter < Model.image_size


def clean_caption(caption: str) -> str:
    """Fix broken characters and HTML entities as open_clip's `basic_clean` does, without its import of 3 seconds."""
    return html.unescape(html.unescape(ftfy.fix_text(caption))).strip()


def is_held_out(image: bytes, fraction: float, seed: int) -> bool:
    """Tell whether an image is held out, by a hash of its bytes and the seed.

    The result does not depend on the number of workers or on other files in SOURCE. All copies of an image are held
    out, or none.
    """
    image_hash = hashlib.blake2b(image, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(image_hash) < fraction * 2 ** 64
