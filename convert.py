"""Turn images with captions into MDS shards, for `benchmark.py --remote`.

    python convert.py laion/ laion-mds                           # a folder of tars, as img2dataset writes them
    python convert.py 'laion/000*.tar' s3://my-bucket/laion/mds  # a glob, to an object store (s3://, gs://, azure://)
    python convert.py photos/ photos-mds --num_workers 8         # a folder of image files, a .txt beside each
    python convert.py photos/ photos-mds --captions all/captions.csv        # or a table of captions elsewhere
    python convert.py hub-dataset/ photos-mds                    # Parquet files with columns image and text
    python convert.py s3://my-bucket/tars/ s3://my-bucket/mds --ray auto    # on all machines of a Ray cluster
    python convert.py photos/ photos-mds --held_out 0.01         # one in a hundred goes to photos-mds-held-out instead

Image bytes stay as they are, and samples in the order of the sorted files. What is left out is counted by reason and
listed in OUT/skipped.jsonl; a damaged file ends in exit status 1. The same command, started again, converts only what
is missing: what is new in SOURCE, and what was changed there. OUT/index.json comes last.
"""
from sdbench.exits import one_line_errors
from sdbench.flags.commands import Convert
from sdbench.flags.parser import parse

PROGRAM = 'convert.py'
MOST_TABLES = 3  # that the summary names

if __name__ == '__main__':
    parse(Convert, __doc__)  # a mistake is answered before the imports

import contextlib
import hashlib
import os
import sys
from functools import partial

import torch

from sdbench.datasets.output import (
    SKIPPED,
    Joined,
    Output,
    PartWriter,
    join_parts,
    part_name,
    training_command,
    write_index,
)
from sdbench.datasets.samples import make_sample
from sdbench.datasets.sources import Found, find_files, join_neighbours
from sdbench.datasets.tables import Columns
from sdbench.datasets.tars import read_samples
from sdbench.datasets.work import LocalWorkers, Part, RayWorkers, work
from sdbench.errors import DataError, one_line, plural
from sdbench.inputs.images import formats
from sdbench.inputs.shards import MDS_COLUMNS
from sdbench.inputs.stores import parse_address
from sdbench.paths import HELD_OUT, is_url
from sdbench.progress_bar import progress_bar


def held_out_beside(out: str) -> str:
    """Where the samples that are held out of OUT lie: beside it, OUT-held-out.

    Raises ValueError if OUT is a whole bucket, beside which there is only another one.
    """
    if not is_url(out):
        out = os.path.abspath(out)
    elif not parse_address(out, 'OUT')[-1]:
        raise ValueError(f'OUT {out} is a whole bucket; with --held_out give a folder in it, such as '
                         f'{out.rstrip("/")}/mds')
    return out.rstrip('/') + HELD_OUT


def is_held_out(image: bytes, fraction: float, seed: int) -> bool:
    """Whether an image is one of the fraction that is held out: by its bytes and the seed alone.

    So neither the number of workers nor what else SOURCE holds changes that, and copies of an image are on one side.
    """
    draw = hashlib.blake2b(image, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(draw) < fraction * 2 ** 64


def columns_of(settings: Convert) -> Columns:
    """The columns of tables and Parquet that the flags name."""
    return Columns(settings.image_column, settings.caption_column)


def convert_parts(settings: Convert, outputs: list[Output], parts: list[Part]) -> tuple[int, int]:
    """Make parts: what a worker does.

    Args:
        settings: of the conversion.
        outputs: OUT, and where samples that are held out go, if any are.
        parts: of which each has a list of File.

    Returns the images that were converted, and the bytes of the files.
    """
    torch.set_num_threads(1)  # the workers are the parallelism
    images = 0
    size = 0
    for part in parts:
        images += convert_part(settings, outputs, part)
        size += sum(file.size for file in part.files)
    return images, size


def convert_part(settings: Convert, outputs: list[Output], part: Part) -> int:
    """Make a part; returns the number of its images."""
    for output in outputs:
        output.require_begun()
    writer = PartWriter(outputs[0], part.name, MDS_COLUMNS, settings.size_limit)
    if settings.held_out:
        held_out_writer = PartWriter(outputs[1], part.name, MDS_COLUMNS, settings.size_limit)
    images = 0
    skipped = []
    for file in part.files:
        for key, fields in read_samples(file, columns_of(settings)):
            try:
                sample = make_sample(fields)
            except ValueError as reason:
                skipped.append({'source': file.name, 'key': key, 'reason': str(reason)})
                continue
            if settings.held_out and is_held_out(sample['jpg'], settings.held_out, settings.seed):
                held_out_writer.write(sample)
            else:
                writer.write(sample)
            images += 1
    if settings.held_out:
        held_out_writer.finish()
    writer.finish(skipped)  # last: it says that the part is done
    return images


def open_workers(settings: Convert, outputs: list[Output], most: int) -> LocalWorkers | RayWorkers:
    """The processes that convert `most` parts."""
    do = partial(convert_parts, settings, outputs)
    if settings.ray:
        return RayWorkers(do, settings.ray)
    cores = len(os.sched_getaffinity(0))
    return LocalWorkers(do, min(settings.num_workers or cores, most))


def convert_missing(settings: Convert, outputs: list[Output], parts: list[Part], missing: list[Part]) -> None:
    """Make the parts that no earlier run has made."""
    sizes = {part.name: sum(file.size for file in part.files) for part in parts}
    to_do = sum(sizes[part.name] for part in missing)
    files = plural(len({file.name for part in missing for file in part.files}), 'file')
    print(f'converting {files} in {len(missing):,} of {plural(len(parts), "part")}', file=sys.stderr, flush=True)
    images = 0
    with (open_workers(settings, outputs, len(missing)) as workers,
          progress_bar(sum(sizes.values()), 'B', sum(sizes.values()) - to_do) as bar):
        for more_images, size in work(workers, missing, outputs[0].is_done):
            images += more_images
            bar.set_postfix_str(f'{images:,} images', refresh=False)
            bar.update(size)


def convert(settings: Convert) -> int:
    """Make OUT of all that is in SOURCE, and say what it holds; returns the exit status.

    Raises DataError if that is nothing, or it cannot go on, and ValueError if OUT is of something else.
    """
    outs = [settings.out]
    if settings.held_out:
        outs.append(held_out_beside(settings.out))
    outputs = [Output(out, 'OUT') for out in outs]
    found = find_files(settings.source, outs, settings.captions, columns_of(settings))
    if not found.files:
        reason = 'it holds no tars, Parquet or images'
        if found.left_out:
            reason = f'{found.left_out[0]["source"]}: {found.left_out[0]["reason"]}'
        raise ValueError(f'nothing to convert in SOURCE {" ".join(settings.source)}: {reason}')
    facts = {'size_limit': settings.size_limit, 'held_out': settings.held_out or None,
             'seed': settings.seed if settings.held_out else None}
    facts |= {f'{which}_column': name for which, name in columns_of(settings)._asdict().items() if name}
    parts = []
    for of_part in join_neighbours(found.files, settings.size_limit):
        parts.append(Part(part_name(facts, formats(), [file.identity() for file in of_part]), of_part))
    with contextlib.ExitStack() as stack:
        for number, output in enumerate(outputs):
            made_of = {'program': PROGRAM, 'is_held_out': number == 1, **facts}
            stack.enter_context(output.begun(made_of, settings.source))
        return convert_and_join(settings, outputs, parts, found)


def convert_and_join(settings: Convert, outputs: list[Output], parts: list[Part], found: Found) -> int:
    """Make the parts that are missing, and a dataset of all of them; returns the exit status."""
    there = [output.parts() for output in outputs]
    missing = [part for part in parts if not all(done.get(part.name) for done in there)]
    if missing:
        convert_missing(settings, outputs, parts, missing)
    names = [part.name for part in parts]
    held_out = None
    if settings.held_out:
        held_out = join_parts(outputs[1], names)
    joined = join_parts(outputs[0], names, found.left_out)
    if not joined.samples:
        raise DataError(f'nothing could be converted of SOURCE {" ".join(settings.source)}: '
                        f'{what_was_skipped(joined, held_out, settings)}')
    if held_out and held_out.samples:
        write_index(outputs[1], held_out)
    is_new = write_index(outputs[0], joined)
    warn(joined, sorted(there[0].keys() - set(names)), settings)
    size = f'{joined.bytes / 1e6:,.1f} MB' if joined.bytes >= 1e6 else f'{joined.bytes / 1e3:,.1f} kB'
    if is_new:
        print(f'converted  {plural(joined.samples, "sample")}, {size} in {plural(len(joined.shards), "shard")}')
    else:
        print(f'done already: OUT {settings.out} holds {plural(joined.samples, "sample")} of this SOURCE')
    print_summary(joined, held_out, found, settings)
    print_next(joined, held_out, settings)
    return 1 if joined.damaged else 0


def what_was_skipped(joined: Joined, held_out: Joined | None, settings: Convert) -> str:
    """The reasons with their numbers, where they are listed, and what may help."""
    reasons = [f'{number:,} {reason}' for reason, number in joined.skipped.most_common()]
    if held_out and held_out.samples and not joined.samples:
        reasons.append(f'--held_out {settings.held_out} takes {held_out.samples:,}')
    listed = f'{", ".join(reasons)}; listed in {settings.out}/{SKIPPED}'
    if 'no caption' in joined.skipped and not settings.captions:
        listed += ('; the caption of cat.jpg is expected in cat.txt beside it, as "caption" in cat.json, or in a table '
                   '(--captions)')
    return listed


def warn(joined: Joined, unused: list[str], settings: Convert) -> None:
    """Name the files that could not be read to their end, and the parts of OUT that are no longer in use."""
    for line in joined.damaged:
        print(f'{PROGRAM}: warning: {one_line(ValueError(line["source"]))} is {line["reason"]}; its whole samples are '
              'kept; fetch it again, and the same command converts it anew', file=sys.stderr)
    if unused:
        names = ' '.join(unused[:3]) + (' ...' if len(unused) > 3 else '')
        print(f'{PROGRAM}: warning: {plural(len(unused), "folder")} in OUT {settings.out} no longer in use, since '
              f'their files are gone from SOURCE, changed or grouped anew: {names}', file=sys.stderr)


def print_summary(joined: Joined, held_out: Joined | None, found: Found, settings: Convert) -> None:
    """Print where captions come from, what was held out, and what was not converted."""
    for table, images in found.tables[:MOST_TABLES]:
        print(f'captions   of {plural(images, "image")} in column {table.column} of {table.path}')
    if len(found.tables) > MOST_TABLES:
        images = sum(number for _, number in found.tables[MOST_TABLES:])
        print(f'captions   of {plural(images, "image")} in {plural(len(found.tables) - MOST_TABLES, "more table")}')
    if held_out and held_out.samples:
        print(f'held out   {plural(held_out.samples, "sample")}, in {held_out_beside(settings.out)}')
    elif held_out:
        print(f'held out   none: --held_out {settings.held_out} takes none of so few samples; give a larger share')
    if joined.skipped:
        print(f'skipped    {what_was_skipped(joined, held_out, settings)}')


def print_next(joined: Joined, held_out: Joined | None, settings: Convert) -> None:
    """The command that trains on what was converted."""
    flags = []
    if held_out and held_out.samples:
        flags = ['--eval_remote', held_out_beside(settings.out)]
    print(f'next       {training_command(settings.out, joined.samples, "FOLDER", True, flags)}')


def main(argv: list[str] | None = None) -> int:
    """Convert; returns the exit status."""
    settings = parse(Convert, __doc__, argv, PROGRAM)
    stays = f'what is done stays in OUT {settings.out}, and the same command, started again, goes on from there'
    with one_line_errors(PROGRAM, stays):
        return convert(settings)


if __name__ == '__main__':
    sys.exit(main())
