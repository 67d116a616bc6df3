"""Convert tars, Parquet files and images into the shards of a part, in a process of this machine or of a cluster."""
import hashlib
import html

import ftfy
import torch

from sdbench.datasets.output import DAMAGED, Output, PartWriter
from sdbench.datasets.readers import make_sample, read_samples
from sdbench.datasets.tables import Columns
from sdbench.datasets.workers import Part
from sdbench.flags.commands import Convert
from sdbench.inputs.shards import MDS_COLUMNS


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
        writer = PartWriter(outputs[0], part.name, MDS_COLUMNS, settings.size_limit)
        if settings.held_out:
            held_out_writer = PartWriter(outputs[1], part.name, MDS_COLUMNS, settings.size_limit)

        # read the files of the part, and write their samples
        skipped = []
        for file in part.sources:
            kept = 0
            for key, fields in read_samples(file, columns):
                try:
                    sample = make_sample(fields, clean)
                except ValueError as reason:
                    skipped.append({'source': file.name, 'key': key, 'reason': str(reason)})
                    if str(reason).startswith(DAMAGED) and file.piece is None:  # a piece says nothing of its file
                        skipped[-1]['samples_kept'] = kept
                    continue
                kept += 1
                if settings.held_out and is_held_out(sample['jpg'], settings.held_out, settings.seed):
                    held_out_writer.write(sample)
                else:
                    writer.write(sample)

        if settings.held_out:
            held_out_writer.finish()
        writer.finish(skipped)  # last: it says that the part is done


def mend_letters(caption: str) -> str:
    """Mend the letters of a caption as open_clip's `basic_clean` does, whose import takes 3 seconds."""
    return html.unescape(html.unescape(ftfy.fix_text(caption))).strip()


def is_held_out(image: bytes, fraction: float, seed: int) -> bool:
    """Tell whether an image is one of the fraction that is held out: by its bytes and the seed alone.

    So neither the number of workers nor what else SOURCE holds changes that, and copies of an image are on one side.
    """
    draw = hashlib.blake2b(image, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(draw) < fraction * 2 ** 64
