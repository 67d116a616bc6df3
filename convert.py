"""Turn images with captions into MDS shards, for `benchmark.py --remote`.

    python convert.py laion/ laion-mds                           # a folder of tars, as img2dataset writes them
    python convert.py 'laion/000*.tar' s3://my-bucket/laion/mds  # a glob, to an object store (s3://, gs://, az://)
    python convert.py photos/ photos-mds --num_workers 8         # a folder of image files, a .txt beside each
    python convert.py s3://my-bucket/tars/ s3://my-bucket/mds --ray auto    # on all machines of a Ray cluster

Image bytes stay as they are, and samples in the order of the sorted files. What is left out is counted by reason and
listed in OUT/skipped.jsonl; a damaged file ends in exit status 1. The same command, started again, converts only what
is missing, and anew what was damaged and has changed since. OUT/index.json comes last.
"""
import argparse
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from cli.launcher import Stopped, leave_to_first_process, sigterm_raises
from cli.next_command import training_command
from inputs.errors import DataError, one_line
from inputs.stores import streaming_address
from parts.engine import Part, WorkerFailed, make_parts
from parts.local_workers import LocalWorkers
from parts.merge import Merged, merge_parts
from parts.names import File
from parts.output import DAMAGED, SKIPPED, Output, claim, finished_parts, open_output, redo, refuse_finished, release
from parts.progress import progress_bar
from parts.ray_workers import RayWorkers
from parts.sources import Found, find_files, join_neighbours
from parts.workers import make_converter

PROGRAM = 'convert.py'
UNITS = {'': 1, 'b': 1, 'kb': 1 << 10, 'mb': 1 << 20, 'gb': 1 << 30}
LEAST_SHARD = 1 << 10
LARGEST_SHARD = (1 << 32) - 1  # an MDS shard counts its bytes in 32 bits


@dataclass
class Plan:
    """What is to be done."""
    parts: list[list[File]]
    missing: list[int]  # numbers of the parts that no earlier run has finished
    found: Found  # what lies in SOURCE
    damaged: 'DamagedFiles'

    @property
    def all_bytes(self) -> int:
        return sum(file.size for files in self.parts for file in files)

    @property
    def missing_bytes(self) -> int:
        return sum(file.size for number in self.missing for file in self.parts[number])


def fail(status: int, message: str) -> NoReturn:
    """End with one line and this exit status."""
    print(f'{PROGRAM}: error: {one_line(message)}', file=sys.stderr)
    raise SystemExit(status)


def shard_size(text: str) -> int:
    """An argparse type: a size such as 64mb, that shards can have."""
    match = re.fullmatch(r'(\d{1,12})\s*([a-z]*)', text.lower())
    if not match or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f'{text} is not a size such as 64mb')
    size = int(match[1]) * UNITS[match[2]]
    if not LEAST_SHARD <= size <= LARGEST_SHARD:
        raise argparse.ArgumentTypeError(f'{text} is not between 1kb and 4gb, which shards can have')
    return size


def worker_count(text: str) -> int:
    """An argparse type: a number above 0."""
    if not re.fullmatch(r'\d{1,6}', text) or not int(text):
        raise argparse.ArgumentTypeError(f'{text} converts nothing; use 1 or more')
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = partial(fail, 2)  # one line, without the usage
    parser.add_argument('source', metavar='SOURCE', nargs='+', help='tars, folders of tars or of images, or globs; or '
                        'tars in an object store (s3://bucket/tars/)')
    parser.add_argument('out', metavar='OUT', help='new folder, or an address in an object store (s3://, gs://, az://)')
    parser.add_argument('--num_workers', type=worker_count, help='processes of this machine, or with --ray the most of '
                        'the cluster (default: as many as there are cores)')
    parser.add_argument('--size_limit', type=shard_size, default=64 << 20, help='the most that a shard takes; smaller '
                        'neighbouring files are joined up to it (default: 64mb)')
    parser.add_argument('--ray', metavar='ADDRESS', default=os.environ.get('RAY_ADDRESS'), help='convert on the '
                        'machines of this Ray cluster, such as auto (default: RAY_ADDRESS of the environment; without '
                        'it, on this machine)')
    parser.add_argument('--dist_timeout', help=argparse.SUPPRESS)  # of earlier versions; nothing waits for ranks now
    return parser


def begin(args: argparse.Namespace, output: Output) -> Plan:
    """Find what there is to convert, claim OUT for it, and see what an earlier run has done.

    Raises ValueError if there is nothing, or OUT holds something else.
    """
    found = find_files(args.source)
    if not found.files:
        fail(1, f'nothing to convert in SOURCE {" ".join(args.source)}: {what_was_found(found)}')
    output.require_new_or_begun()
    damaged = DamagedFiles(output)
    again = damaged.parts()
    if not again:
        refuse_finished(output)
    begun = [file._replace(size=damaged.size_at_begin(file)) for file in found.files]
    grouped = join_neighbours(begun, args.size_limit)
    present = {file.name: file for file in found.files}
    parts = [[present[file.name] for file in part] for part in grouped]
    plan = Plan(parts, list(range(len(parts))), found, damaged)
    if not claim(output, {'program': PROGRAM, 'source': fingerprint(begun), 'size_limit': args.size_limit}):
        return plan
    if again:
        print(f'converting anew what was damaged: {len(again):,} parts')
        redo(output, again)
    done = finished_parts(output, len(parts))
    if done:
        print(f'going on with OUT {args.out}: {len(done):,} of {len(parts):,} parts are done')
    plan.missing = [number for number in plan.missing if number not in done]
    return plan


class DamagedFiles:
    """The files that could not be read to their end, kept in OUT, so that the same command can convert them anew.

    One that was mended keeps the size that it had when OUT was begun: by this OUT still is that of the same SOURCE, and
    what was made of the other files stays.

    Args:
        output: that keeps them.
    """

    def __init__(self, output: Output):
        self.output = output
        self.files = {file['name']: file for file in json.loads(output.read(DAMAGED) or '[]')}

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


def open_workers(args: argparse.Namespace, output: Output, num_parts: int) -> LocalWorkers | RayWorkers:
    """The processes that convert."""
    make = partial(make_converter, output, args.size_limit)
    if args.ray:
        return RayWorkers(make, args.ray, most=args.num_workers or sys.maxsize)
    cores = len(os.sched_getaffinity(0))
    return LocalWorkers(make, min(args.num_workers or cores, num_parts), preload='parts.conversion')


def convert(args: argparse.Namespace, output: Output) -> Merged:
    """Convert what is missing, and merge."""
    plan = begin(args, output)
    if plan.missing:
        convert_missing(plan, args, output)
    merged = merge_parts(output, len(plan.parts), {}, plan.found.left_out, plan.found.counts)
    for number in {file['part'] for file in merged.damaged}:  # a run that was killed may not have kept them
        of_part = [file for file in merged.damaged if file['part'] == number]
        plan.damaged.update(number, plan.parts[number], of_part)
    if not merged.samples:
        release(output, len(plan.parts), PROGRAM)
    return merged


def convert_missing(plan: Plan, args: argparse.Namespace, output: Output) -> None:
    """Convert what no earlier run has finished."""
    parts = (Part(number, plan.parts[number]) for number in plan.missing)
    images = 0
    with (open_workers(args, output, len(plan.missing)) as workers,
          progress_bar(plan.all_bytes, 'B', plan.all_bytes - plan.missing_bytes) as bar):
        for made in make_parts(workers, parts):
            images += made['images']
            bar.set_postfix_str(f'{images:,} images', refresh=False)
            bar.update(made['bytes'])
            plan.damaged.update(made['number'], plan.parts[made['number']], made['damaged'])


def what_stays(out: str) -> str:
    return f'what is done stays in OUT {out}, and the same command, started again, goes on from there'


def print_summary(merged: Merged, args: argparse.Namespace) -> None:
    """What was converted, what was not, and what to do next. Ends with one line if there is nothing."""
    reasons = ', '.join(f'{number:,} {reason}' for reason, number in merged.skipped.most_common())
    listed = f'{reasons}; listed in {args.out}/{SKIPPED}'
    if 'no caption' in merged.skipped:
        listed += '; the caption of cat.jpg is expected in cat.txt beside it, or as "caption" in cat.json'
    for file in merged.damaged:
        print(f'{PROGRAM}: warning: {one_line(ValueError(file["name"]))} is {file["reason"]}; its whole samples are '
              'kept; fetch it again, and the same command converts it anew', file=sys.stderr)
    if not merged.samples:
        fail(1, f'nothing could be converted of SOURCE {" ".join(args.source)}: {listed}')
    print(f'converted  {merged.samples:,} samples, {merged.bytes / 1e6:,.1f} MB in {merged.shards:,} shards')
    if reasons:
        print(f'skipped    {listed}')
    print(f'next       {training_command(streaming_address(args.out), merged.samples)}')


def main(argv: list[str] | None = None) -> int:
    """Convert; returns the exit status."""
    leave_to_first_process(PROGRAM)
    args = build_parser().parse_args(argv)
    try:
        output = open_output(args.out, 'OUT')
        with sigterm_raises():
            merged = convert(args, output)
    except ValueError as error:
        fail(2, one_line(error))
    except DataError as error:
        fail(1, f'{one_line(error)}; put that right: {what_stays(args.out)}')
    except OSError as error:
        fail(1, f'this machine cannot go on ({one_line(error)}); put that right: {what_stays(args.out)}')
    except WorkerFailed as error:
        print(error, file=sys.stderr)
        fail(1, f'a worker failed, and nobody foresaw why: see above; {what_stays(args.out)}')
    except KeyboardInterrupt:
        fail(130, f'interrupted; {what_stays(args.out)}')
    except Stopped:
        fail(143, f'ended by SIGTERM; {what_stays(args.out)}')
    print_summary(merged, args)
    return 1 if merged.damaged else 0


if __name__ == '__main__':
    sys.stdout.reconfigure(errors='backslashreplace')  # OUT can be bytes that are no text
    sys.exit(main())
