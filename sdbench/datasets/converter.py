"""Convert tars, Parquet files and images into the shards of a part. Each worker process runs `convert_parts`."""
import hashlib
import html

import ftfy
import torch

from sdbench.datasets.output import OutputFolder, PartWriter
from sdbench.datasets.readers import Sample, read_samples
from sdbench.datasets.tables import Columns
from sdbench.datasets.workers import Part
from sdbench.flags.commands import Convert
from sdbench.flags.train import Model
from sdbench.inputs.batches import MDS_CAPTION_COLUMNS, ONE_CAPTION, to_columns
from sdbench.inputs.tokenizer import is_too_long

SHARD_COLUMNS = {'jpg': 'bytes', **MDS_CAPTION_COLUMNS}  # MDS types by column


def convert_parts(settings: Convert, outputs: list[OutputFolder], parts: list[Part]) -> None:
    """Convert the files of the given parts into shards, and finish each part before the next one.

    `outputs` are OUT and, with --held_out, the dataset of held-out samples. The sources of each part are Files.
    """
    torch.set_num_threads(1)  # each core has a worker already
    for output in outputs:
        output.require_begun()
    columns = Columns(settings.image_column, settings.caption_column)
    clean = clean_caption if settings.clean_captions else str

    for part in parts:
        writers = [PartWriter(output, part.name, SHARD_COLUMNS, settings.size_limit) for output in outputs]
        skipped = []
        for file in part.sources:
            for sample in read_samples(file, columns, settings.split):
                if sample.is_usable(clean):
                    held_out = settings.held_out and is_held_out(sample.image, settings.held_out, settings.seed)
                    write_sample(writers[1 if held_out else 0], sample, settings.sample_per_caption)
                skipped += [{'source': file.name, 'key': sample.key, 'reason': reason} for reason in sample.reasons]
        for writer in writers[1:]:
            writer.finish()
        writers[0].finish(skipped)  # last, because the part is then done


def write_sample(writer: PartWriter, sample: Sample, per_caption: bool) -> None:
    """Write an image as one sample with all its captions, or as one sample per caption, and count what it holds."""
    texts = [text for texts_of_name in sample.captions.values() for text in texts_of_name]
    written = [sample.captions]
    if per_caption:
        written = [{ONE_CAPTION: [text]} for text in texts]
    for captions in written:
        writer.write({'jpg': sample.image, **to_columns(captions)})
    writer.captions.update({name: len(texts_of_name) for name, texts_of_name in sample.captions.items()})
    writer.long_captions += sum(map(is_too_long, texts))

    # Count what a training changes about the image: the centre square may lack more than a third of it, and it may
    # have to be enlarged.
    shorter, longer = sample.sides
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
