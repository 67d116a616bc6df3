"""Turn images with captions into MDS shards, for `benchmark.py --remote`.

    python convert.py laion/ laion-mds                           # a folder of tars, as img2dataset writes them
    python convert.py 'laion/000*.tar' s3://my-bucket/laion/mds  # a glob, to an object store (s3://, gs://, az://)
    python convert.py photos/ photos-mds --num_workers 8         # a folder of image files, a .txt beside each
    python convert.py s3://my-bucket/tars/ s3://my-bucket/mds --ray auto    # on all machines of a Ray cluster
    python convert.py photos/ photos-mds --held_out 1000         # 1000 of them go to photos-mds-held-out instead

Image bytes stay as they are, and samples in the order of the sorted files. What is left out is counted by reason and
listed in OUT/skipped.jsonl; a damaged file ends in exit status 1. The same command, started again, converts only what
is missing, and anew what was damaged and has changed since. OUT/index.json comes last.
"""
from settings.commands import Convert
from settings.ends import end, leave_to_first_process, one_line_errors
from settings.flags import parse

PROGRAM = 'convert.py'

if __name__ == '__main__':
    leave_to_first_process()
    parse(Convert, __doc__)  # a mistake is answered before the imports

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from inputs.errors import one_line
from inputs.places import CLAIM, INDEX, finished_error
from inputs.stores import streaming_address
from inputs.words import counted
from parts.claims import (
    DAMAGED,
    IS_HELD_OUT,
    SKIPPED,
    DoneAlready,
    claim,
    contents_of_claim,
    finished_parts,
    read_json,
    redo,
    refuse_other_contents,
    release,
    samples_of_finished,
)
from parts.engine import Part, make_parts
from parts.held_out import (
    TooFewSamples,
    find_edge,
    give_back,
    parts_that_lost_samples,
    parts_with_held_out,
    refuse_leftovers,
    remove_replaced,
)
from parts.local_workers import LocalWorkers
from parts.merge import Merged, merge_parts
from parts.names import File, held_out_beside
from parts.output import Output, open_output
from parts.progress import progress_bar
from parts.ray_workers import RayWorkers
from parts.sources import Found, find_files, join_neighbours
from parts.workers import make_converter, make_splitter


class NothingConverted(Exception):
    """There is no sample in SOURCE."""


@dataclass
class Plan:
    """What is to be done."""
    parts: list[list[File]]
    missing: list[int]  # numbers of the parts that no earlier run has finished
    found: Found  # what lies in SOURCE
    damaged: 'DamagedFiles'
    held_out: Output | None  # where samples that are held out go

    @property
    def all_bytes(self) -> int:
        return sum(file.size for files in self.parts for file in files)

    @property
    def missing_bytes(self) -> int:
        return sum(file.size for number in self.missing for file in self.parts[number])


def find_source(flags: Convert) -> Found:
    """What there is to convert. Raises NothingConverted if there is nothing."""
    places = [flags.out]
    if flags.held_out:
        places.append(held_out_beside(flags.out))
    found = find_files(flags.source, places)
    if not found.files:
        raise NothingConverted(f'nothing to convert in SOURCE {" ".join(flags.source)}: {what_was_found(found)}')
    return found


def open_held_out(flags: Convert, output: Output) -> Output | None:
    """Where samples that are held out go. Raises ValueError if that holds something else."""
    if not flags.held_out:
        return None
    held_out = open_output(held_out_beside(flags.out), 'OUT')
    refuse_leftovers(output, held_out)
    return held_out


def claim_and_plan(flags: Convert, output: Output, held_out: Output | None, found: Found) -> Plan:
    """Claim OUT for what was found, and see what an earlier run has done.

    Raises DoneAlready if that was all, and ValueError if OUT holds something else.
    """
    damaged = DamagedFiles(output)
    again = damaged.parts()
    begun = [file._replace(size=damaged.size_at_begin(file)) for file in found.files]
    grouped = join_neighbours(begun, flags.size_limit)
    present = {file.name: file for file in found.files}
    parts = [[present[file.name] for file in part] for part in grouped]
    plan = Plan(parts, list(range(len(parts))), found, damaged, held_out)
    contents = {'program': PROGRAM, 'source': fingerprint(begun), 'size_limit': flags.size_limit,
                'held_out': flags.held_out, 'seed': flags.seed if flags.held_out else None}
    if not again:
        refuse_other_or_done(output, held_out, contents)
    if held_out:  # first: where it cannot be, OUT is not begun either
        claim(held_out, contents | {IS_HELD_OUT: True})
    is_resumed = claim(output, contents)
    if not is_resumed:
        return plan
    if again:
        print(f'converting anew what was damaged: {counted(len(again), "part")}')
        redo(output, again)
        if held_out:
            redo(held_out, again)
    done = finished_parts(output, len(parts))
    if held_out:
        lost = parts_that_lost_samples(output, held_out, done)
        if lost:
            print(f'converting anew, as what was held out of them is gone: {counted(len(lost), "part")}')
            redo(output, lost)
            done -= lost
    if done:
        print(f'going on with OUT {flags.out}: {len(done):,} of {counted(len(parts), "part")} done')
    plan.missing = [number for number in plan.missing if number not in done]
    return plan


def refuse_other_or_done(output: Output, held_out: Output | None, contents: dict) -> None:
    """Raises DoneAlready if OUT is finished, and what is held out as well, and both were made of these contents;
    ValueError if OUT is finished, and of others."""
    if output.read(INDEX) is None:
        return
    refuse_other_contents(output, contents_of_claim(output, output.read(CLAIM)), contents)
    if held_out:
        claimed = held_out.read(CLAIM)
        if claimed is None or held_out.read(INDEX) is None:
            raise finished_error(output.place)
        refuse_other_contents(held_out, contents_of_claim(held_out, claimed), contents | {IS_HELD_OUT: True})
    raise DoneAlready(samples_of_finished(output))


class DamagedFiles:
    """The files that could not be read to their end, kept in OUT, so that the same command can convert them anew.

    One that was mended keeps the size that it had when OUT was begun: by this OUT still is that of the same SOURCE, and
    what was made of the other files stays.

    Args:
        output: that keeps them.
    """

    def __init__(self, output: Output):
        self.output = output
        self.files = {file['name']: file for file in read_json(output, DAMAGED) or []}

    def size_at_begin(self, file: File) -> int:
        """The bytes that a file had when OUT was begun."""
        return self.files.get(file.name, {'size': file.size})['size']

    def parts(self) -> set[int]:
        """The numbers of the parts that hold such files."""
        return {file['part'] for file in self.files.values() if file['reason']}

    def update(self, number: int, files: list[File], damaged: list[dict]) -> None:
        """Keep what was found when a part was converted, from now on, whatever ends this run."""
        reasons = {file['name']: file['reason'] for file in damaged}
        before = dict(self.files)
        for file in files:
            if file.name in self.files or file.name in reasons:
                self.files[file.name] = {'name': file.name, 'size': self.size_at_begin(file), 'part': number,
                                         'reason': reasons.get(file.name)}
        if self.files != before:
            self.output.write(DAMAGED, json.dumps(list(self.files.values())).encode())


def what_was_found(found: Found) -> str:
    """What lies in a SOURCE of which nothing can be converted."""
    if not found.left_out:
        return 'it holds neither tars nor images'
    first = found.left_out[0]
    text = f'{first["source"]}: {first["reason"]}'
    if len(found.left_out) > 1:
        text += f', and {len(found.left_out) - 1:,} more'
    return text


def fingerprint(files: list[File]) -> str:
    """What people, and a hash of all names and sizes, can tell a SOURCE by."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(json.dumps(file).encode())
    return (f'{len(files):,} files of {sum(file.size for file in files):,} bytes (sha256 of their list '
            f'{digest.hexdigest()[:16]})')


def open_workers(flags: Convert, make: Callable, num_parts: int) -> LocalWorkers | RayWorkers:
    """The processes that convert; `make` is called in each of them."""
    if flags.ray:
        return RayWorkers(make, flags.ray, most=flags.num_workers or sys.maxsize)
    cores = len(os.sched_getaffinity(0))
    return LocalWorkers(make, min(flags.num_workers or cores, num_parts), preload='parts.conversion')


def convert(flags: Convert, output: Output) -> tuple[Merged, Merged | None]:
    """Convert what is missing, and merge; returns what OUT holds, and what was held out.

    Raises NothingConverted if there is nothing.
    """
    found = find_source(flags)
    held_out = open_held_out(flags, output)
    with output.in_use():
        return convert_and_merge(claim_and_plan(flags, output, held_out, found), flags, output)


def convert_and_merge(plan: Plan, flags: Convert, output: Output) -> tuple[Merged, Merged | None]:
    """Carry a plan out; returns what OUT holds, and what was held out. Raises NothingConverted if there is nothing."""
    if plan.missing:
        convert_missing(plan, flags, output)
    held_out = None
    if plan.held_out:
        held_out = hold_out(plan, flags, output)
    merged = merge_parts(output, len(plan.parts), {}, plan.found.left_out, plan.found.counts)
    for number in {file['part'] for file in merged.damaged}:  # a run that was killed may not have kept them
        of_part = [file for file in merged.damaged if file['part'] == number]
        plan.damaged.update(number, plan.parts[number], of_part)
    if not merged.samples:
        if plan.held_out:
            give_back(output, plan.held_out, len(plan.parts), PROGRAM)
        else:
            release(output, len(plan.parts), PROGRAM)
        warn_of_damage(merged)
        raise NothingConverted(f'nothing could be converted of SOURCE {" ".join(flags.source)}: '
                               f'{what_was_skipped(merged, flags)}')
    return merged, held_out


def convert_missing(plan: Plan, flags: Convert, output: Output) -> None:
    """Convert what no earlier run has finished."""
    parts = (Part(number, plan.parts[number]) for number in plan.missing)
    images = 0
    print(work_in_words(plan), file=sys.stderr, flush=True)
    make = partial(make_converter, output, flags.size_limit, flags.held_out, flags.seed)
    with (open_workers(flags, make, len(plan.missing)) as workers,
          progress_bar(plan.all_bytes, 'B', plan.all_bytes - plan.missing_bytes) as bar):
        for made in make_parts(workers, parts):
            images += made['images']
            bar.set_postfix_str(f'{images:,} images', refresh=False)
            bar.update(made['bytes'])
            plan.damaged.update(made['number'], plan.parts[made['number']], made['damaged'])


def work_in_words(plan: Plan) -> str:
    """What the bar counts the bytes of."""
    files = sum(len(plan.parts[number]) for number in plan.missing)
    parts = f'{len(plan.missing):,} of {counted(len(plan.parts), "part")}'
    if len(plan.missing) == len(plan.parts):
        parts = counted(len(plan.parts), 'part')
    return f'converting {counted(files, "file")} in {parts}'


def hold_out(plan: Plan, flags: Convert, output: Output) -> Merged:
    """Move the samples that are held out from the parts of OUT to a dataset beside it, which is whole afterwards.

    Raises TooFewSamples if nothing would be left to train on; OUT is then free for another run.
    """
    num_parts = len(plan.parts)
    try:
        edge = find_edge(output, num_parts, flags.held_out)
    except TooFewSamples:
        give_back(output, plan.held_out, num_parts, PROGRAM)
        raise
    if edge is None:  # nothing could be converted
        return Merged()
    numbers = []
    missing = []
    for number, part in parts_with_held_out(output, num_parts, edge):
        numbers.append(number)
        if 'replaced' in part:
            remove_replaced(output, number, part['replaced'])  # a run that was killed may not have done it
        else:
            missing.append(Part(number, plan.parts[number]))
    if missing:
        make = partial(make_splitter, output, plan.held_out, flags.size_limit, edge)
        with (open_workers(flags, make, len(missing)) as workers,
              progress_bar(len(numbers), ' parts', len(numbers) - len(missing)) as bar):
            for _ in make_parts(workers, missing):
                bar.update()
    return merge_parts(plan.held_out, num_parts, {}, numbers=numbers)


def what_stays(out: str) -> str:
    return f'what is done stays in OUT {out}, and the same command, started again, goes on from there'


def what_was_skipped(merged: Merged, flags: Convert) -> str:
    """The reasons with their numbers, where they are listed, and what may help."""
    reasons = ', '.join(f'{number:,} {reason}' for reason, number in merged.skipped.most_common())
    listed = f'{reasons}; listed in {flags.out}/{SKIPPED}'
    if 'no caption' in merged.skipped:
        listed += '; the caption of cat.jpg is expected in cat.txt beside it, or as "caption" in cat.json'
    return listed


def warn_of_damage(merged: Merged) -> None:
    for file in merged.damaged:
        print(f'{PROGRAM}: warning: {one_line(ValueError(file["name"]))} is {file["reason"]}; its whole samples are '
              'kept; fetch it again, and the same command converts it anew', file=sys.stderr)


def print_summary(merged: Merged, held_out: Merged | None, flags: Convert) -> None:
    """What was converted, what was not, and what to do next."""
    warn_of_damage(merged)
    size = f'{merged.bytes / 1e6:,.1f} MB' if merged.bytes >= 1e6 else f'{merged.bytes / 1e3:,.1f} kB'
    print(f'converted  {counted(merged.samples, "sample")}, {size} in {counted(merged.shards, "shard")}')
    if held_out:
        print(f'held out   {counted(held_out.samples, "sample")}, in {held_out_beside(flags.out)}')
    if merged.skipped:
        print(f'skipped    {what_was_skipped(merged, flags)}')
    print_next(merged.samples, flags)


def print_done_already(samples: int, flags: Convert) -> None:
    """That an earlier run has done all, and what to do next."""
    print(f'done already: OUT {flags.out} holds {counted(samples, "sample")} of this SOURCE, made with these flags')
    print_next(samples, flags)


def print_next(samples: int, flags: Convert) -> None:
    """The command that trains on what was converted."""
    evaluation = []
    if flags.held_out:
        evaluation = ['--eval_remote', streaming_address(held_out_beside(flags.out))]
    command = ['composer', 'benchmark.py', '--remote', streaming_address(flags.out), '--use_ema', *evaluation]
    print(f'next       {shlex.join(command)}')


def main(argv: list[str] | None = None) -> int:
    """Convert; returns the exit status."""
    leave_to_first_process()
    flags = parse(Convert, __doc__, argv, PROGRAM)
    with one_line_errors(PROGRAM, what_stays(flags.out)):
        output = open_output(flags.out, 'OUT')
        try:
            merged, held_out = convert(flags, output)
        except NothingConverted as error:
            end(PROGRAM, 1, one_line(error))
        except DoneAlready as done:
            print_done_already(done.samples, flags)
            return 0
    print_summary(merged, held_out, flags)
    return 1 if merged.damaged else 0


if __name__ == '__main__':
    sys.exit(main())
