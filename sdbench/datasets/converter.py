"""Convert tars, Parquet files and images into the shards of a part, in a process of this machine or of a cluster."""
import hashlib
import html

import ftfy
import torch

from sdbench.datasets.output import DAMAGED, Output, PartWriter
from sdbench.datasets.readers import make_sample, read_samples
from sdbench.datasets.tables import Columns
from sdbench.datasets.workers import Part
from sdbench.errors import BadSample
from sdbench.flags.commands import Convert
from sdbench.inputs.captions import MDS_CAPTION_COLUMNS, ONE_CAPTION, Named, to_columns
from sdbench.inputs.tokenizer import is_too_long

IMAGE_COLUMNS = {'jpg': 'bytes', **MDS_CAPTION_COLUMNS}


def convert_parts(settings: Convert, outputs: list[Output], parts: list[Part]) -> None:
    """Make parts: what a worker does.

    Args:
        settings: of the conversion.
        outputs: OUT, and where samples that are held out go, if any are.
        parts: of which each has a list of File.
    """
    torch.set_num_threads(1)  # the workers are the parallelism
    for output in outputs:
        output.require_begun()
    columns = Columns(settings.image_column, settings.caption_column)
    clean = str
    if settings.clean_captions:
        clean = mend_letters

    for part in parts:
        writer = PartWriter(outputs[0], part.name, IMAGE_COLUMNS, settings.size_limit)
        if settings.held_out:
            held_out_writer = PartWriter(outputs[1], part.name, IMAGE_COLUMNS, settings.size_limit)

        # read the files of the part, and write their samples
        skipped = []
        for file in part.sources:
            kept = 0
            for key, fields in read_samples(file, columns):
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
        writer.finish(skipped)  # last: it says that the part is done


def write_sample(writer: PartWriter, image: bytes, captions: Named, per_caption: bool) -> None:
    """Write an image with all its captions, or once for each of them, and count these."""
    texts = [text for of_name in captions.values() for text in of_name]
    samples = [{ONE_CAPTION: [text]} for text in texts] if per_caption else [captions]
    for of_sample in samples:
        writer.write({'jpg': image, **to_columns(of_sample)})
    writer.captions.update({name: len(of_name) for name, of_name in captions.items()})
    writer.long_captions += sum(map(is_too_long, texts))


def mend_letters(caption: str) -> str:
    """Mend the letters of a caption as open_clip's `basic_clean` does, whose import takes 3 seconds."""
    return html.unescape(html.unescape(ftfy.fix_text(caption))).strip()


def is_held_out(image: bytes, fraction: float, seed: int) -> bool:
    """Tell whether an image is one of the fraction that is held out: by its bytes and the seed alone.

    So neither the number of workers nor what else SOURCE holds changes that, and copies of an image are on one side.
    """
    draw = hashlib.blake2b(image, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(draw) < fraction * 2 ** 64
