"""Turn images with captions into MDS shards, for `benchmark.py --remote`.

    python convert.py laion/ laion-mds                           # a folder of tars, as img2dataset writes them
    python convert.py 'laion/000*.tar' s3://my-bucket/laion/mds  # a glob, to an object store (s3://, gs://, azure://)
    python convert.py photos/ photos-mds --num_workers 8         # a folder of images, with a .txt for each
    python convert.py photos/ photos-mds --captions all/captions.csv        # or a table of captions elsewhere
    python convert.py hub-dataset/ photos-mds                    # Parquet files with columns image and text
    python convert.py s3://my-bucket/tars/ s3://my-bucket/mds --ray auto    # on all machines of a Ray cluster
    python convert.py photos/ photos-mds --held_out 0.01         # one in a hundred goes to photos-mds-held-out instead

Image bytes stay as they are, and samples in the order of the sorted files. What is left out is counted by reason and
listed in OUT/skipped.jsonl; a damaged tar or Parquet file ends in exit status 1. The same command, started again,
converts only what is missing: what is new in SOURCE, and what was changed there. OUT/index.json comes last.
"""
from sdbench.flags.commands import Convert
from sdbench.flags.parser import answer_early, parse
from sdbench.process import begin, cpu_cores, one_line_errors

PROGRAM = 'convert.py'
MOST_TABLES = 3  # that the summary names

if __name__ == '__main__':
    answer_early(Convert, __doc__)

import contextlib
import os
import sys
from functools import partial

from sdbench.datasets.converter import convert_parts
from sdbench.datasets.output import Joined, Output, done_already, join_parts, part_name, write_index
from sdbench.datasets.sources import Found, find_files, group_into_parts
from sdbench.datasets.tables import NO_TABLE, OWN_TABLE, Columns
from sdbench.datasets.workers import LocalWorkers, Part, RayWorkers, make_parts
from sdbench.errors import UserError, one_line, plural
from sdbench.flags.train import TINY_MODEL
from sdbench.flags.training_command import FEWEST_FROM_RANDOM, FINE_TUNED, fine_tuning_time, training_command
from sdbench.inputs.captions import CAPTIONS
from sdbench.inputs.images import formats
from sdbench.inputs.shards import DRAW, HELD_OUT_SIDE
from sdbench.inputs.tokenizer import CAPTION_LENGTH
from sdbench.paths import HELD_OUT, is_url


def main(argv: list[str] | None = None) -> int:
    """Convert, and return the exit status."""
    begin()
    settings = parse(Convert, __doc__, argv, PROGRAM)
    stays = f'what is done stays in OUT {settings.out}, and the same command, started again, goes on from there'
    with one_line_errors(PROGRAM, stays):
        return convert(settings)


def convert(settings: Convert) -> int:
    """Make OUT of all that is in SOURCE, say what it holds, and return the exit status.

    Raises DataError if the conversion cannot go on, and UserError if SOURCE holds nothing or OUT is of something else.
    """
    # find what is converted, and sort it into parts
    outputs = [Output(out, 'OUT') for out in addresses_of_outputs(settings)]
    columns = Columns(settings.image_column, settings.caption_column)
    found = find_files(settings.source, addresses_of_outputs(settings), settings.captions, columns)
    if not found.files:
        reason = 'it holds no tars, Parquet or images'
        if found.skipped:
            reason = f'{found.skipped[0]["source"]}: {found.skipped[0]["reason"]}'
        raise UserError(f'nothing to convert in SOURCE {" ".join(settings.source)}: {reason}')

    # the flags that samples and shards depend on, by which parts are named
    facts = {'size_limit': settings.size_limit, 'held_out': settings.held_out or None,
             'seed': settings.seed if settings.held_out else None, 'sample_per_caption': settings.sample_per_caption}
    for flag in ('image_column', 'caption_column', 'clean_captions'):
        if getattr(settings, flag):
            facts[flag] = getattr(settings, flag)
    parts = []
    for files in group_into_parts(found.files, settings.size_limit):
        name = part_name(facts, formats(), [file.identity() for file in files])
        parts.append(Part(name, files, sum(file.size for file in files)))

    with contextlib.ExitStack() as stack:
        for output, is_held_out in zip(outputs, (False, True), strict=False):
            table = os.path.abspath(settings.captions) if settings.captions else None
            made_of = {'program': PROGRAM, 'is_held_out': is_held_out, 'captions': table, **facts}
            stack.enter_context(output.begun(made_of, settings.source))

        # make the parts that are missing
        done = [output.parts() for output in outputs]
        missing = [part for part in parts if not all(of_output.get(part.name) for of_output in done)]
        if missing:
            convert_missing(settings, outputs, parts, missing)

        # make datasets of all parts
        names = [part.name for part in parts]
        joined = join_parts(outputs[0], names, found.skipped)
        held_out = join_parts(outputs[1], names) if settings.held_out else Joined()
        if not joined.samples:
            raise nothing_converted(joined, held_out, settings)
        if settings.held_out:
            write_index(outputs[1], held_out, **about_side(settings, names, held_out, HELD_OUT_SIDE))
        is_new = write_index(outputs[0], joined, **about_side(settings, names, joined, 'training'))

    # say what was made
    unread_tables = [line for line in found.skipped if line['reason'].startswith(NO_TABLE)]
    warn(joined, unread_tables, sorted(done[0].keys() - set(names)), settings)
    if is_new:
        size = f'{joined.bytes / 1e6:,.1f} MB' if joined.bytes >= 1e6 else f'{joined.bytes / 1e3:,.1f} kB'
        print(f'converted  {plural(joined.samples, "sample")}, {size} in {plural(len(joined.shards), "shard")}')
    else:
        print(done_already(outputs[0], joined, 'SOURCE'))
    print_summary(joined, held_out, found, settings)
    is_unread = any(os.path.basename(line['source']).lower() == OWN_TABLE for line in unread_tables)
    return 1 if joined.damaged or is_unread else 0


def addresses_of_outputs(settings: Convert) -> list[str]:
    """Return OUT, and with --held_out OUT-held-out, which of a whole bucket is another one."""
    if not settings.held_out:
        return [settings.out]
    out = settings.out if is_url(settings.out) else os.path.abspath(settings.out)
    return [settings.out, out.rstrip('/') + HELD_OUT]


def about_side(settings: Convert, parts: list[str], joined: Joined, side: str) -> dict:
    """Return what index.json says of a dataset: its captions, and the draw by which the other side has other images.

    Both sides have the same `parts`, whose names depend on the files and the flags, so these tell the conversion.
    """
    about = {}
    if not settings.sample_per_caption:
        about[CAPTIONS] = {name: number for name, number in joined.captions.items() if number}
    if settings.held_out:
        about[DRAW] = {'share': settings.held_out, 'seed': settings.seed, 'conversion': part_name(*parts), 'side': side}
    return about


def convert_missing(settings: Convert, outputs: list[Output], parts: list[Part], missing: list[Part]) -> None:
    """Have the missing parts made by the processes of this machine, or by a Ray cluster."""
    files = plural(len({source.name for part in missing for source in part.sources}), 'file')
    print(f'converting {files} in {len(missing):,} of {plural(len(parts), "part")}', file=sys.stderr, flush=True)
    do = partial(convert_parts, settings, outputs)
    if settings.ray:
        workers = RayWorkers(do, settings.ray)
    else:
        workers = LocalWorkers(do, min(settings.num_workers or cpu_cores(), len(missing)))
    with workers:
        make_parts(workers, parts, missing, outputs[0].is_done, 'B')


def nothing_converted(joined: Joined, held_out: Joined, settings: Convert) -> UserError:
    if held_out.samples:
        reason = f'--held_out {settings.held_out} takes all of {plural(held_out.samples, "sample")}'
    else:
        first = joined.first_skipped
        reason = (f'{what_was_skipped(joined, settings)}; the first is {first["source"]}: {first["reason"]}; a command '
                  'with other flags may take the same OUT')
    return UserError(f'nothing could be converted of SOURCE {" ".join(settings.source)}: {reason}')


def what_was_skipped(joined: Joined, settings: Convert) -> str:
    """Say how much was skipped for which reason, where it is listed, and what may help."""
    listed = joined.skipped_line(settings.out)
    if 'no caption' in joined.skipped and not settings.captions:
        listed += ('; the caption of cat.jpg is expected in cat.txt in its folder, as "caption" in cat.json, or in a '
                   'table (--captions)')
    return listed


def warn(joined: Joined, unread_tables: list[dict], unused: list[str], settings: Convert) -> None:
    """Name the files that could not be read to their end, tables of other columns, and unused parts of OUT."""
    for line in joined.damaged:
        kept = 'its whole samples'
        if 'samples_kept' in line:
            kept = plural(line['samples_kept'], 'whole sample')
        print(f'{PROGRAM}: warning: {one_line(UserError(line["source"]))} is {line["reason"]}; kept: {kept}; '
              'where another has no caption, it may lie behind the damage; fetch it again, and the same command '
              'converts it again', file=sys.stderr)
    for line in unread_tables:
        print(f'{PROGRAM}: warning: {one_line(UserError(line["source"]))} is {line["reason"]}; rename the file if '
              'it is of something else', file=sys.stderr)
    if unused:
        names = ' '.join(unused[:3]) + (' ...' if len(unused) > 3 else '')
        print(f'{PROGRAM}: warning: {plural(len(unused), "folder")} in OUT {settings.out} no longer in use, since '
              f'their files are gone from SOURCE, changed or grouped otherwise, or the flags are others: {names}',
              file=sys.stderr)


def print_summary(joined: Joined, held_out: Joined, found: Found, settings: Convert) -> None:
    """Print where captions come from, what was held out and skipped, and the command that trains."""
    # captions
    tables = list(found.captions.items())
    for (table, column), number in tables[:MOST_TABLES]:
        print(f'captions   in {plural(number, "row")} of {table}, column {column}')
    if len(tables) > MOST_TABLES:
        number = sum(number for _, number in tables[MOST_TABLES:])
        print(f'captions   in {plural(number, "row")} of {plural(len(tables) - MOST_TABLES, "more table")}')

    number = sum(joined.captions.values())
    if len(joined.captions) > 1:
        counts = ', '.join(f'{of_name:,} of {name}' for name, of_name in joined.captions.items())
        print(f'captions   {counts}')
    elif number > joined.samples:
        print(f'captions   {number:,} of {plural(joined.samples, "image")}')
    if joined.long_captions:
        print(f'cut        {joined.long_captions:,} of {plural(number, "caption")}, to {CAPTION_LENGTH} tokens')

    # samples that are in OUT-held-out, and that are in neither
    flags = []
    if held_out.samples:
        flags = ['--eval_remote', addresses_of_outputs(settings)[1]]
        print(f'held out   {plural(held_out.samples, "more sample")}, in {flags[1]}')
    elif settings.held_out:
        print(f'held out   none: --held_out {settings.held_out} takes none of so few samples; give a larger share')
    if joined.skipped:
        print(f'skipped    {what_was_skipped(joined, settings)}')
    print(f'next       {training_command(settings.out, joined.samples, FINE_TUNED, True, flags)}')
    if joined.samples < FEWEST_FROM_RANDOM:
        print(f'           This fine-tunes a trained model, as advised below about {FEWEST_FROM_RANDOM:,} images, in '
              f'roughly\n           {fine_tuning_time(joined.samples)} (forecast).')
    print(f'           {FINE_TUNED} is a folder with the weights of a model (docs/training.md); prompts.txt has one '
          'prompt per line.\n           Without a GPU, train the tiny model:')
    flags += ['--image_size', '64']
    print(f'           {training_command(settings.out, joined.samples, TINY_MODEL, True, flags)}')


if __name__ == '__main__':
    sys.exit(main())
