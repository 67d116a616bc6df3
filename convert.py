"""Turn images with captions into MDS shards, for `benchmark.py --remote`.

    python convert.py laion/ laion-mds                           # a folder of tars, as img2dataset writes them
    python convert.py 'laion/000*.tar' s3://my-bucket/laion/mds  # a glob, to an object store (s3://, gs://, azure://)
    python convert.py photos/ photos-mds --num_workers 8         # a folder of images, with a .txt for each
    python convert.py photos/ photos-mds --captions all/captions.csv        # or with a table of captions elsewhere
    python convert.py hub-dataset/ photos-mds --split train      # Parquet files with columns image and text
    python convert.py s3://my-bucket/tars/ s3://my-bucket/mds --ray auto    # on all machines of a Ray cluster
    python convert.py photos/ photos-mds --held_out 0.01         # about one in a hundred goes to photos-mds-held-out

Images are stored byte for byte, in the order of the sorted files. Skipped files and samples are counted by reason and
logged in OUT/skipped.jsonl. If a tar or Parquet file is damaged, the exit status is 1. The same command, started again,
converts only files that are new or have changed. OUT/index.json is written last.
"""
from sdbench.flags.commands import Convert
from sdbench.flags.parser import answer_early, parse
from sdbench.process import begin, cpu_cores, one_line_errors

PROGRAM = 'convert.py'

if __name__ == '__main__':
    answer_early(Convert, __doc__)

import contextlib
import os
import sys
from functools import partial

from sdbench.datasets.converter import convert_parts
from sdbench.datasets.names import ALL_SPLITS, CAPTION_SUFFIXES
from sdbench.datasets.output import Joined, OutputFolder, join_parts, part_name, write_index
from sdbench.datasets.sources import Found, find_files, group_into_parts
from sdbench.datasets.tables import Columns
from sdbench.datasets.workers import LocalWorkers, Part, RayWorkers, make_parts
from sdbench.errors import UserError, plural
from sdbench.files import HELD_OUT, is_url
from sdbench.flags.train import TINY_MODEL, Model
from sdbench.flags.training_command import (
    FEWEST_FOR_WHOLE_MODEL,
    FEWEST_FROM_RANDOM,
    FINE_TUNED,
    forecast_command,
    training_command,
)
from sdbench.inputs.batches import CAPTIONS
from sdbench.inputs.images import formats
from sdbench.inputs.shards import DRAW, HELD_OUT_SIDE
from sdbench.inputs.tokenizer import CAPTION_LENGTH


def main(argv: list[str] | None = None) -> int:
    """Convert, and return the exit status."""
    begin()
    settings = parse(Convert, __doc__, argv, PROGRAM)
    how_to_continue = f'finished parts stay in OUT {settings.out}; start the same command again to continue'
    with one_line_errors(PROGRAM, how_to_continue):
        return convert(settings)


def convert(settings: Convert) -> int:
    """Convert SOURCE into OUT, print a summary, and return the exit status."""
    # Find the files to convert. An empty SOURCE ends the command before anything is written.
    outputs = [OutputFolder(out, 'OUT') for out in addresses_of_outputs(settings)]
    columns = Columns(settings.image_column, settings.caption_column)
    for name in columns.captions:
        if name.startswith('.') and name not in columns.suffixes:
            raise UserError(f'--caption_column {name}: caption files end in {", ".join(CAPTION_SUFFIXES)} (in any '
                            'case); give one of these, or rename your files')
    found = find_files(settings.source, addresses_of_outputs(settings), settings.captions, columns, settings.split)
    if not found.files:
        reason = 'it holds no tars, Parquet or images'
        if found.skipped:
            reason = f'{found.skipped[0]["source"]}: {found.skipped[0]["reason"]}'
        raise UserError(f'nothing to convert in SOURCE {" ".join(settings.source)}: {reason}')

    # Name each part by its files and by the flags that its samples depend on. Then a part of that name that is already
    # in OUT need not be converted again. The seed matters only with --held_out.
    facts = {'size_limit': settings.size_limit, 'held_out': settings.held_out or None,
             'seed': settings.seed if settings.held_out else None, 'sample_per_caption': settings.sample_per_caption}
    for flag in ('image_column', 'caption_column', 'clean_captions', 'split'):
        value = getattr(settings, flag)
        if value and (flag, value) != ('split', ALL_SPLITS):  # all splits are the same samples as no split
            facts[flag] = value
    parts = []
    for files in group_into_parts(found.files, settings.size_limit):
        name = part_name(facts, formats(), [file.identity() for file in files])
        parts.append(Part(name, files, sum(file.size for file in files)))

    with contextlib.ExitStack() as stack:
        table = os.path.abspath(settings.captions) if settings.captions else None
        for output, is_held_out in zip(outputs, (False, True), strict=False):  # without --held_out only one output
            made_of = {'program': PROGRAM, 'is_held_out': is_held_out, 'captions': table, **facts}
            stack.enter_context(output.begun(made_of, settings.source))

        # Convert the missing parts in worker processes.
        done = [output.parts() for output in outputs]
        missing = [part for part in parts if not all(names.get(part.name) for names in done)]
        if missing:
            convert_missing(settings, outputs, parts, missing)

        # Join all parts into a dataset.
        names = [part.name for part in parts]
        joined = join_parts(outputs[0], names, found.skipped)
        held_out = join_parts(outputs[1], names) if settings.held_out else Joined()
        if not joined.samples:
            raise nothing_converted(joined, held_out, settings)
        if settings.held_out:
            write_index(outputs[1], held_out, **index_extras(settings, names, held_out, HELD_OUT_SIDE))
        is_new = write_index(outputs[0], joined, **index_extras(settings, names, joined, 'training'))

    # Print warnings and a summary. Damage makes the exit status 1.
    for line in joined.damaged:
        print(f'{PROGRAM}: warning: {" ".join(line["source"].split())} is {line["reason"]}; fetch the file again, and '
              'start the same command again', file=sys.stderr)
    if is_new:
        print(f'converted  {plural(joined.samples, "sample")}, {joined.bytes / 1e6:,.1f} MB in '
              f'{plural(len(joined.shards), "shard")}')
    else:
        print(f'done already: OUT {settings.out} holds {plural(joined.samples, "sample")} of this SOURCE')
    print_summary(joined, held_out, found, sorted(done[0].keys() - set(names)), settings)
    print_next_steps(settings, joined, held_out)
    return 1 if joined.damaged else 0


def addresses_of_outputs(settings: Convert) -> list[str]:
    """Return OUT and, with --held_out, OUT-held-out. If OUT is a whole bucket, that is another bucket."""
    if not settings.held_out:
        return [settings.out]
    out = settings.out.rstrip('/')
    if not is_url(settings.out) and os.path.basename(out) in ('', '.', '..'):
        out = os.path.abspath(settings.out)  # whose name is known
    return [settings.out, out + HELD_OUT]


def index_extras(settings: Convert, parts: list[str], joined: Joined, side: str) -> dict:
    """Return additional keys for index.json: the number of captions by name, and how held-out samples were chosen.

    `conversion` is a hash of the part names. It is equal in both datasets, and changes with the files or the flags.
    `side` tells which of them this is: 'training' or HELD_OUT_SIDE.
    """
    extras = {}
    if not settings.sample_per_caption:  # with it, each sample has one caption without a name
        extras[CAPTIONS] = {name: number for name, number in joined.captions.items() if number}
    if settings.held_out:
        extras[DRAW] = {'share': settings.held_out, 'seed': settings.seed, 'conversion': part_name(*parts),
                        'side': side}
    return extras


def convert_missing(settings: Convert, outputs: list[OutputFolder], parts: list[Part], missing: list[Part]) -> None:
    """Convert the missing parts in processes of this machine or on a Ray cluster."""
    files = plural(sum(len(part.sources) for part in missing), 'file')
    print(f'converting {files} in {len(missing):,} of {plural(len(parts), "part")}', file=sys.stderr, flush=True)
    work = partial(convert_parts, settings, outputs)
    if settings.ray:
        workers = RayWorkers(work, settings.ray)
    else:
        workers = LocalWorkers(work, min(settings.num_workers or cpu_cores(), len(missing)))
    with workers:
        make_parts(workers, parts, missing, 'B')


def nothing_converted(joined: Joined, held_out: Joined, settings: Convert) -> UserError:
    """Return the error for a SOURCE that gave no sample for training."""
    if held_out.samples:
        reason = f'--held_out {settings.held_out} takes all of {plural(held_out.samples, "sample")}'
    else:
        first = joined.first_skipped
        reason = (f'{joined.skipped_line(settings.out)}; the first is {first["source"]}: {first["reason"]}; a command '
                  'with other flags may use the same OUT')
    return UserError(f'nothing could be converted from SOURCE {" ".join(settings.source)}: {reason}')


def print_summary(joined: Joined, held_out: Joined, found: Found, unused: list[str], settings: Convert) -> None:
    """Print where the captions come from, what a training changes about the images, and what was not converted.

    `unused` has the folders in OUT that an earlier conversion made and that this dataset does not need.
    """
    # Count the rows from tables, because a table in the wrong folder matches too few images.
    if found.captions:
        print(f'captions   in {plural(sum(found.captions.values()), "row")} of '
              f'{plural(len(found.captions), "table")}, such as {min(found.captions)}')

    # Count the captions by name, or in total if images have several.
    number = sum(joined.captions.values())
    if number > joined.samples or len(joined.captions) > 1:
        counts = ', '.join(f'{count:,} of {name}' for name, count in joined.captions.items())
        print(f'captions   {counts}, for {plural(joined.samples, "sample")}')
    if joined.long_captions:
        print(f'too long   {joined.long_captions:,} of {plural(number, "caption")}; the text encoder sees the first '
              f'{CAPTION_LENGTH} tokens')

    # Count what a training changes about the images, because it would only show in the images that it generates.
    if joined.shapes['cropped'] or joined.shapes['enlarged']:
        print(f'squares    {joined.shapes["cropped"]:,} of {plural(joined.shapes["images"], "image")} lose more than a '
              f'third of a side to the centre square; {joined.shapes["enlarged"]:,} are smaller than '
              f'{Model.image_size} pixels')

    # Say how many samples are in the held-out dataset, and how many were skipped.
    if held_out.samples:
        print(f'held out   {plural(held_out.samples, "more sample")}, in {addresses_of_outputs(settings)[1]}')
    elif settings.held_out:
        print(f'held out   none: --held_out {settings.held_out} takes none of so few samples; give a larger fraction')
    if joined.skipped:
        print(f'skipped    {joined.skipped_line(settings.out)}')
    if unused:
        print(f'unused     {plural(len(unused), "folder")} in OUT from before SOURCE changed, whose images were '
              f'converted again if SOURCE still has them, such as {unused[0]}')


def print_next_steps(settings: Convert, joined: Joined, held_out: Joined) -> None:
    """Print three commands: a training for this number of images, its forecast, and a training without a GPU."""
    # With --sample_per_caption an image has several samples. Parts of earlier versions do not count their images.
    images = joined.shapes['images'] or joined.samples
    flags = []
    if held_out.samples:
        flags = ['--eval_remote', addresses_of_outputs(settings)[1]]
    command = training_command(settings.out, images, FINE_TUNED, True, flags)
    print(f'next       {command}')
    print(f'cost       {forecast_command(command, images)}')
    notes = ['The first command trains. The second forecasts its time and cost on that GPU, and needs no GPU.',
             f'{FINE_TUNED} is a folder with the weights of a model, and prompts.txt has one prompt per line '
             '(docs/photographs.md).']
    if images < FEWEST_FROM_RANDOM:
        notes.append(f'This fine-tunes a trained model, as advised below about {FEWEST_FROM_RANDOM:,} images.')
    if images < FEWEST_FOR_WHOLE_MODEL:
        notes.append(f'With fewer than {FEWEST_FOR_WHOLE_MODEL} images a whole model soon repeats them, so people '
                     'train a LoRA with another program instead.')
    notes.append('Without a GPU, train the tiny model:')
    flags += ['--image_size', '64']
    notes.append(training_command(settings.out, images, TINY_MODEL, True, flags))
    print(*(f'           {note}' for note in notes), sep='\n')


if __name__ == '__main__':
    sys.exit(main())
