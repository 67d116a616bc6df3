"""Turn images with captions into MDS shards, for `benchmark.py --remote`.

    python convert.py laion/ laion-mds                           # a folder of tars, as img2dataset writes them
    python convert.py 'laion/000*.tar' s3://my-bucket/laion/mds  # a glob, to any remote that Streaming writes to
    python convert.py photos/ photos-mds --num_workers 8         # a folder of image files, a .txt beside each
    composer convert.py s3://my-bucket/tars/ s3://my-bucket/mds  # from a store, on all ranks of a launcher

Image bytes stay as they are, and samples in the order of the sorted files. What is skipped is counted by reason and
listed in OUT/skipped.jsonl; a damaged file ends in exit status 1. A run that was stopped, when started again with the
same command on any number of ranks, converts only what is missing. OUT/index.json comes last.
"""
import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
from collections import deque
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn

import torch
from streaming.base.util import bytes_to_int

from harness.crew import AT_SIGTERM, Crew, ProgressLine, RankLost, environment_number, say_stopped, sigterm_answered
from harness.launcher import end_with_launcher
from harness.next_command import training_command
from inputs.errors import DataError, one_line
from inputs.parts import CLAIM, SKIPPED, Merged, Output, PartWriter, claim, end_with_parent, finished_parts, merge_parts
from inputs.shards import MDS_COLUMNS
from inputs.stores import is_address
from parts.names import IMAGES, File
from parts.sources import find_files, join_neighbours
from parts.tars import make_sample, read_samples

worker = None  # in a process of the pool, see start_worker


@dataclass
class Plan:
    """What is to be done, the same on all ranks."""
    parts: list[list[File]]
    missing: list[int]  # numbers of the parts that no earlier run has finished

    def bytes_of(self, number: int) -> int:
        return sum(file.size for file in self.parts[number])


@dataclass
class Worker:
    """A process of the pool."""
    output: Output
    columns: dict[str, str]
    shard_bytes: int
    images: object  # converted so far, by slot: shared with the parent, without a lock, which could die with a worker
    bytes_read: object  # the same


def fail(status: int, message: str) -> NoReturn:
    """End with one line and this exit status."""
    print('convert.py: error:', one_line(message), file=sys.stderr)
    raise SystemExit(status)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('convert.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = partial(fail, 2)  # one line, without the usage
    parser.add_argument('source', metavar='SOURCE', nargs='+', help='tars, folders of tars or of images, or globs; or '
                        'tars in an S3 store (s3://bucket/tars/)')
    parser.add_argument('out', metavar='OUT', help='new folder, or any remote that Streaming writes to (s3:// ...)')
    cores = max(1, len(os.sched_getaffinity(0)) // environment_number('LOCAL_WORLD_SIZE', 1))
    parser.add_argument('--num_workers', type=int, default=cores,
                        help='processes of each rank (default: its share of the cores, %(default)s)')
    parser.add_argument('--size_limit', default='64mb', help='the most that a shard takes; smaller neighbouring files '
                        'are joined up to it (default: 64mb)')
    parser.add_argument('--dist_timeout', type=int, default=300, help='seconds to wait for the other ranks of a '
                        'launcher (default: 300)')
    return parser


def refuse_bad_arguments(args: argparse.Namespace) -> None:
    """Ends with one line for a flag that makes no sense, and makes a number of --size_limit."""
    if args.num_workers < 1:
        fail(2, f'--num_workers {args.num_workers} converts nothing; use 1 or more')
    if args.dist_timeout < 1:
        fail(2, f'--dist_timeout {args.dist_timeout} waits for nobody; use 1 or more')
    try:
        args.shard_bytes = bytes_to_int(args.size_limit)
    except ValueError:
        fail(2, f'--size_limit {args.size_limit} is not a size such as 64mb')
    if not 1 << 10 <= args.shard_bytes < 1 << 32:
        fail(2, f'--size_limit {args.size_limit} is not between 1kb and 4gb, which shards can have')


def begin(args: argparse.Namespace, output: Output) -> Plan:
    """On rank 0: find what there is to convert, claim OUT for it, and see what an earlier run has done."""
    try:
        files = found_files(args.source)
    except (ValueError, OSError) as error:
        fail(2, one_line(error))
    if not files:
        fail(1, f'nothing to convert in SOURCE {" ".join(args.source)}: no .tar, {", ".join(IMAGES)}')
    parts = join_neighbours(files, args.shard_bytes)
    require_new_or_ours(output)
    try:
        is_begun = claim(output, {'program': 'convert.py', 'source': fingerprint(files),
                                  'size_limit': args.shard_bytes})
        done = finished_parts(output, len(parts)) if is_begun else set()
        if not is_begun and not output.remote:
            Path(output.folder, SKIPPED).unlink(missing_ok=True)  # of a run that converted nothing
    except ValueError as error:
        fail(2, one_line(error))
    except Exception as error:  # every storage client has its own
        fail(1, f'OUT {args.out} cannot be written ({one_line(error)}); put that right and run the same command again')
    if done:
        print(f'going on with OUT {args.out}: {len(done):,} of {len(parts):,} parts are done')
    return Plan(parts, [number for number in range(len(parts)) if number not in done])


def found_files(source: list[str]) -> list[File]:
    """`find_files`; a client of a store does not survive the fork of the workers, so it gets a process of its own."""
    if not any(map(is_address, source)):
        return find_files(source).files
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        return pool.submit(find_files, source).result().files


def require_new_or_ours(output: Output) -> None:
    """Ends with one line if OUT holds something that convert.py has not begun, or cannot be reached."""
    out = output.out
    if output.remote:
        try:
            output.connect()  # looks for the bucket
        except Exception as error:  # every storage client has its own
            fail(2, f'OUT {out} cannot be reached; check its name and your credentials ({error!r})')
        return
    held = set()
    if os.path.isdir(out):
        held = set(os.listdir(out)) - {f'{CLAIM}.tmp', SKIPPED}  # what a run that converted nothing leaves
    is_other = os.path.lexists(out) and not os.path.isdir(out)
    if os.path.ismount(out) or is_other or (held and CLAIM not in held):
        fail(2, f'OUT {out} already holds something or is a mount point; give a new folder')


def fingerprint(files: list[File]) -> str:
    """What people, and a hash of all names and sizes, can tell a SOURCE by."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(json.dumps(file).encode())
    return (f'{len(files):,} files of {sum(file.size for file in files):,} bytes (sha256 of their list '
            f'{digest.hexdigest()[:16]})')


def convert_missing(plan: Plan, crew: Crew, output: Output, args: argparse.Namespace) -> None:
    """Convert parts until none is left, on the processes of this rank; rank 0 shows how far all ranks are."""
    num_workers = min(args.num_workers, -(-len(plan.missing) // crew.size))
    context = multiprocessing.get_context('fork')  # what is imported is imported once
    images = context.RawArray('q', max(1, num_workers))
    bytes_read = context.RawArray('q', max(1, num_workers))
    turns = crew.take_turns(plan.missing)
    line = ProgressLine(sum(map(plan.bytes_of, range(len(plan.parts)))),
                        sum(map(plan.bytes_of, set(range(len(plan.parts))) - set(plan.missing))))

    def look_around(finished: bool = False) -> bool:
        """Tell the others how far this rank is, and on rank 0 look how far they are: whether all have finished."""
        crew.give_sign(sum(images), sum(bytes_read), finished)
        if crew.rank:
            return finished
        all_finished, all_images, all_bytes = crew.look_around()
        line.show(all_images, all_bytes)
        return all_finished

    if num_workers:
        worker_end, parent_end = context.Pipe(duplex=False)
        state = Worker(output, MDS_COLUMNS, args.shard_bytes, images, bytes_read)
        with (futures.ProcessPoolExecutor(num_workers, context, start_worker, (state, worker_end, parent_end)) as pool,
              parent_end):  # closed first, it ends the workers, also when one has failed
            run_jobs(pool, turns, plan.parts, num_workers, look_around)
    crew.wait_until(lambda: look_around(finished=True))
    line.close()


def run_jobs(pool: futures.Executor, turns, parts: list[list[File]], num_workers: int, look_around) -> None:
    """`convert_part` for every part that comes in `turns`, one for each worker at a time."""
    free_slots = deque(range(num_workers))
    slots = {}  # of the jobs that run
    while True:
        while free_slots and (number := next(turns, None)) is not None:
            slot = free_slots.popleft()
            slots[pool.submit(convert_part, slot, number, parts[number])] = slot
        if not slots:
            return
        done, _ = futures.wait(slots, timeout=0.2, return_when=futures.FIRST_COMPLETED)
        for job in done:
            job.result()  # raises what its worker raised
            free_slots.append(slots.pop(job))
        look_around()


def start_worker(state: Worker, parent: connection.Connection, parents_end: connection.Connection) -> None:
    """Make this process a worker."""
    global worker
    worker = state
    end_with_parent(parent, parents_end)
    torch.set_num_threads(1)  # the workers are the parallelism
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer; its end ends the workers


def convert_part(slot: int, number: int, files: list[File]) -> None:
    """A worker: write the shards of `files`, and with their index what was skipped and which files are damaged."""
    writer = PartWriter(worker.output, number, worker.columns, worker.shard_bytes)
    skipped = []
    damaged = []
    bytes_before = worker.bytes_read[slot]
    for file in files:
        for key, fields in read_samples(file):
            try:
                sample = make_sample(fields)
            except ValueError as reason:
                skipped.append({'source': file.name, 'key': key, 'reason': str(reason)})
                if key is None:
                    damaged.append(f'{file.name} is {reason}')
                continue
            writer.write(sample)
            worker.images[slot] += 1
            worker.bytes_read[slot] += len(sample['jpg'])
        bytes_before += file.size
        worker.bytes_read[slot] = bytes_before
    writer.finish(skipped=skipped, damaged=damaged)


def remove_empty(output: Output) -> None:
    """Leave only the list of reasons in an OUT that no sample came to, for a new start; a store keeps its claim, too.
    """
    if output.remote:
        return
    for name in set(os.listdir(output.folder)) - {SKIPPED}:
        path = os.path.join(output.folder, name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.remove(path)


def convert(crew: Crew, output: Output, args: argparse.Namespace) -> Merged | None:
    """Convert what is missing, on all ranks, and merge; on rank 0, what there is now. Ends with one line if it fails.
    """
    out = args.out
    try:
        if crew.rank == 0:
            plan = begin(args, output)
            crew.publish('plan', [plan.parts, plan.missing])
        else:
            parts, missing = crew.receive('plan')
            plan = Plan([[File(*file) for file in part] for part in parts], missing)
        require_same_folders(plan, output)
        convert_missing(plan, crew, output, args)
        if crew.rank:
            crew.wait_for_end()
            return None
        merged = merge_parts(output, len(plan.parts), {}, args.num_workers)
        if not merged.samples:
            remove_empty(output)
        return merged
    except KeyboardInterrupt:
        if crew.rank:
            raise SystemExit(0) from None  # rank 0 says it
        fail(130, f'interrupted; {what_stays(out)}')
    except RankLost as error:
        was_said = say_stopped('convert.py', crew, f'{error}; {what_stays(out)}')
        raise SystemExit(1 if was_said else 0) from None
    except futures.BrokenExecutor:
        reason = ('a worker was killed, often for lack of memory; run again, with a smaller --num_workers than '
                  f'{args.num_workers} if that was it; what is done stays in OUT {out}')
    except DataError as error:
        reason = f'{one_line(error)}; put that right: {what_stays(out)}'
    except Exception as error:  # every storage client has its own
        reason = f'OUT {out} cannot be written ({one_line(error)}); put that right and run the same command again'
    crew.leave_word(reason)
    fail(1, reason)


def what_stays(out: str) -> str:
    return f'what is done stays in OUT {out}, and the same command, started again, goes on from there'


def require_same_folders(plan: Plan, output: Output) -> None:
    """DataError: this rank does not see the OUT or the SOURCE of rank 0."""
    if output.read(CLAIM) is None:
        raise DataError(f'OUT {output.out} is not the same folder on every node; use a shared one or a store')
    for file in (plan.parts[0][0], plan.parts[-1][-1]):
        if not is_address(file.name) and not os.path.lexists(file.name):
            raise DataError(f'SOURCE {file.name} is not there on every node; use a shared folder or a store')


def print_summary(merged: Merged, source: list[str], out: str) -> None:
    """What was converted, what was not, and what to do next. Ends with one line if there is nothing."""
    reasons = ', '.join(f'{number:,} {reason}' for reason, number in merged.skipped.most_common())
    for line in merged.damaged:
        line = ' '.join(line.split())  # names can have more than one line
        print(f'convert.py: warning: {line}; its whole samples are kept, fetch it again for the rest', file=sys.stderr)
    hint = ''
    if 'no caption' in merged.skipped:
        hint = '; the caption of cat.jpg is expected in cat.txt beside it, or as "caption" in cat.json'
    listed = f'{reasons}; listed in {out}/{SKIPPED}{hint}'
    if not merged.samples:
        if '://' in out:
            listed += '; then give a new OUT, since this one counts these files as done'
        fail(1, f'nothing could be converted of SOURCE {" ".join(source)}: {listed if reasons else "it is empty"}')
    print(f'converted  {merged.samples:,} samples, {merged.bytes / 1e6:,.1f} MB in {merged.shards:,} shards')
    if reasons:
        print(f'skipped    {listed}')
    print(f'next       {training_command(out, merged.samples)}')


def main(argv: list[str] | None = None) -> int:
    """Convert; returns the exit status."""
    end_with_launcher()
    args = build_parser().parse_args(argv)
    refuse_bad_arguments(args)
    try:
        crew = Crew.join(args.dist_timeout)
    except ValueError as error:
        fail(2, one_line(error))
    output = Output(args.out, 'OUT')

    def say():
        say_stopped('convert.py', crew, f'{AT_SIGTERM}; {what_stays(args.out)}')
        output.discard()
    with sigterm_answered(say), crew:
        merged = convert(crew, output, args)
        if merged is None:
            return 0
        print_summary(merged, args.source, args.out)
    return 1 if merged.damaged else 0


if __name__ == '__main__':
    logging.disable(logging.WARNING)  # Streaming warns of its temporary folders
    sys.stdout.reconfigure(errors='backslashreplace')  # OUT can be bytes that are no text
    sys.exit(main())
