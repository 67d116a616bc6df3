"""Turn images with captions into MDS shards, for `benchmark.py --remote`.

    python convert.py laion/ laion-mds                           # a folder of tars, as img2dataset writes them
    python convert.py 'laion/000*.tar' s3://my-bucket/laion/mds  # a glob, to any remote that Streaming writes to
    python convert.py photos/ photos-mds --num_workers 8         # a folder of image files, a .txt beside each

Image bytes stay as they are, and samples in the order of the sorted files. What is skipped is counted by reason and
listed in OUT/skipped.jsonl; a damaged file ends in exit status 1. A run that is stopped leaves no OUT/index.json.
"""
import argparse
import contextlib
import glob
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlparse

import torch
from streaming import MDSWriter
from streaming.base.storage import CloudDownloader, CloudUploader
from streaming.base.util import merge_index
from tqdm import tqdm

from inputs.shards import MDS_COLUMNS
from inputs.tars import IMAGES, find_files, make_sample, read_samples

progress = None  # of a worker: bytes read by each of them, see run_workers


@dataclass
class Converted:
    """What a worker, or all of them, made of their files."""
    samples: int = 0
    shards: int = 0
    bytes: int = 0  # of the shards
    skipped: Counter = field(default_factory=Counter)  # samples by reason
    damaged: list[str] = field(default_factory=list)  # a line for each file

    def __add__(self, other: 'Converted') -> 'Converted':
        return Converted(self.samples + other.samples, self.shards + other.shards, self.bytes + other.bytes,
                         self.skipped + other.skipped, self.damaged + other.damaged)


def fail(status: int, message: str) -> NoReturn:
    """End with one line and this exit status."""
    print('convert.py: error:', ' '.join(message.split()), file=sys.stderr)
    raise SystemExit(status)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('convert.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = partial(fail, 2)  # one line, without the usage
    parser.add_argument('source', metavar='SOURCE', nargs='+', help='tars, folders of tars or of images, or globs')
    parser.add_argument('out', metavar='OUT', help='new folder, or any remote that Streaming writes to (s3:// ...)')
    parser.add_argument('--num_workers', type=int, default=os.cpu_count(),
                        help='processes, at most one for each file of SOURCE (default: the cores, %(default)s)')
    return parser


def require_new(out: str, remote: str | None) -> None:
    """End with one line if OUT holds something, or cannot be reached."""
    if not remote:
        is_empty_folder = os.path.isdir(out) and not os.listdir(out)
        if os.path.ismount(out) or (os.path.lexists(out) and not is_empty_folder):
            fail(2, f'OUT {out} already holds something or is a mount point; give a new folder')
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            CloudUploader.get((folder, remote))  # looks for the bucket
        except Exception as error:  # every storage client has its own
            fail(2, f'OUT {out} cannot be reached; check its name and your credentials ({error!r})')
        with contextlib.suppress(Exception):
            CloudDownloader.direct_download(f'{remote}/index.json', f'{folder}/index.json')
            fail(2, f'OUT {out} already holds an index.json; remove it or give a new folder')


@contextlib.contextmanager
def staging_folder(out: str, remote: str | None) -> Iterator[str]:
    """A new folder, gone afterwards: in the temporary one for a remote, else beside OUT, to be renamed to it."""
    place, name = os.path.split(os.path.realpath(out))
    if remote:
        place = None
    else:
        os.makedirs(place, exist_ok=True)
        for left in glob.glob(f'{glob.escape(os.path.join(place, name))}.partial-*'):
            print(f'removing {left}, left by a run that did not finish')
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=place, prefix=f'{name}.partial-') as folder:
        staging = os.path.join(folder, 'mds')  # the folder itself can be read by its owner alone
        os.mkdir(staging)
        yield staging


def run_workers(parts: list[list[Path]], staging: str, remote: str | None) -> list[Converted]:
    """`convert_files` on each part in a process of its own, to `staging`/00000 and so on, with a progress bar."""
    context = multiprocessing.get_context('fork')  # what is imported is imported once
    bytes_read = context.RawArray('q', len(parts))  # one slot each, for a lock could die with its worker
    worker_end, parent_end = context.Pipe(duplex=False)
    total = sum(path.stat().st_size for part in parts for path in part)
    with (tqdm(total=total, unit='B', unit_scale=True, disable=None) as bar,  # None: only on a terminal
          futures.ProcessPoolExecutor(len(parts), context, start_worker, (bytes_read, worker_end, parent_end)) as pool,
          parent_end):  # closed first, it ends the workers, also when one has failed
        jobs = []
        for index, files in enumerate(parts):
            folder = f'{staging}/{index:05}'
            folder_in_store = f'{remote}/{index:05}' if remote else None
            jobs.append(pool.submit(convert_files, index, files, folder, folder_in_store))
        running = jobs
        while running:
            done, running = futures.wait(jobs, timeout=0.2, return_when=futures.FIRST_EXCEPTION)
            for job in done:
                job.result()  # raises what its worker raised
            bar.update(sum(bytes_read) - bar.n)
        return [job.result() for job in jobs]


def start_worker(bytes_read, parent: connection.Connection, parents_end: connection.Connection) -> None:
    """Make this process a worker, which ends when its parent does."""
    global progress
    progress = bytes_read
    parents_end.close()  # so that the parent's end, however it comes, ends this pipe
    torch.set_num_threads(1)  # the workers are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer; its end ends the workers

    def end_with_parent():
        connection.wait([parent])
        os._exit(1)
    threading.Thread(target=end_with_parent, daemon=True).start()


def convert_files(index: int, files: list[Path], folder: str, remote: str | None) -> Converted:
    """A worker: write the shards of `files`, and a list of what is skipped to `folder`.skipped."""
    converted = Converted()
    bytes_done = 0
    with open(f'{folder}.skipped', 'w') as listing:
        writer = MDSWriter(columns=MDS_COLUMNS, out=(folder, remote) if remote else folder, hashes=['xxh64'])
        for path in files:
            for key, fields in read_samples(path):
                try:
                    sample = make_sample(fields)
                except ValueError as reason:
                    converted.skipped[str(reason).partition(':')[0]] += 1
                    listing.write(json.dumps({'source': str(path), 'key': key, 'reason': str(reason)}) + '\n')
                    if key is None:
                        converted.damaged.append(f'{path} is {reason}')
                    continue
                writer.write(sample)
                converted.samples += 1
                progress[index] += len(sample['jpg'])
            bytes_done += path.stat().st_size
            progress[index] = bytes_done
        if converted.samples:
            writer.finish()
            converted.shards = len(writer.shards)
            converted.bytes = sum(shard['raw_data']['bytes'] for shard in writer.shards)
    return converted


def publish(staging: str, out: str, remote: str | None, partitions: list[str]) -> None:
    """Make one dataset of the workers' shards: list what was skipped, merge their indexes, give it OUT's name."""
    with contextlib.chdir(staging):  # merge_index takes paths for URLs, and would cut them at a # or ?
        listings = [Path(name) for name in sorted(glob.glob('*.skipped'))]
        skipped = b''.join(listing.read_bytes() for listing in listings)
        if skipped:
            Path('skipped.jsonl').write_bytes(skipped)
            if remote:
                CloudUploader.get(('.', remote), keep_local=True, exist_ok=True).upload_file('skipped.jsonl')
        for listing in listings:
            listing.unlink()
        root = remote or '.'
        merge_index([f'{root}/{partition}/index.json' for partition in partitions], root, keep_local=not remote)
    if not remote:
        os.rename(staging, os.path.realpath(out))


def convert(files: list[Path], out: str, remote: str | None, num_workers: int) -> Converted:
    """Convert `files` in their order, shared out to the workers. Ends with one line if it cannot be done."""
    parts = []
    for worker in range(num_workers):
        first = len(files) * worker // num_workers
        last = len(files) * (worker + 1) // num_workers
        parts.append(files[first:last])
    try:
        with staging_folder(out, remote) as staging:
            results = run_workers(parts, staging, remote)
            partitions = [f'{index:05}' for index, converted in enumerate(results) if converted.samples]
            if partitions:
                publish(staging, out, remote, partitions)
    except KeyboardInterrupt:
        fail(130, f'interrupted; OUT {out} holds no dataset')
    except futures.BrokenExecutor:
        fail(1, 'a worker was killed, often for lack of memory; run again, with a smaller --num_workers than '
                f'{num_workers} if that was it')
    except Exception as error:  # every storage client has its own
        fail(1, f'OUT {out} cannot be written ({error}); put that right and run the same command again')
    return sum(results, Converted())


def print_summary(converted: Converted, source: list[str], out: str) -> None:
    """What was converted, what was not, and what to do next. Ends with one line if there is nothing."""
    reasons = ', '.join(f'{number:,} {reason}' for reason, number in converted.skipped.most_common())
    for line in converted.damaged:
        line = ' '.join(line.split())  # names can have more than one line
        print(f'convert.py: warning: {line}; its whole samples are kept, fetch it again for the rest', file=sys.stderr)
    if not converted.samples:
        fail(1, f'nothing could be converted of SOURCE {" ".join(source)}: {reasons or "it is empty"}')
    print(f'converted  {converted.samples:,} samples, {converted.bytes / 1e6:,.1f} MB in {converted.shards:,} shards')
    if reasons:
        print(f'skipped    {reasons}; listed in {out}/skipped.jsonl')
    print(f'next       composer benchmark.py --remote {out}')


def main(argv: list[str] | None = None) -> int:
    """Convert; returns the exit status."""
    args = build_parser().parse_args(argv)
    if args.num_workers < 1:
        fail(2, f'--num_workers {args.num_workers} converts nothing; use 1 or more')
    try:
        files = sorted({file for source in args.source for file in find_files(source)})
    except ValueError as error:
        fail(2, str(error))
    if not files:
        fail(1, f'nothing to convert in SOURCE {" ".join(args.source)}: no .tar, {", ".join(IMAGES)}')
    remote = args.out.rstrip('/') if urlparse(args.out).scheme else None
    require_new(args.out, remote)
    converted = convert(files, args.out, remote, min(args.num_workers, len(files)))
    print_summary(converted, args.source, args.out)
    return 1 if converted.damaged else 0


if __name__ == '__main__':
    logging.disable(logging.WARNING)  # Streaming warns of its temporary folders
    sys.stdout.reconfigure(errors='backslashreplace')  # OUT can be bytes that are no text
    sys.exit(main())
