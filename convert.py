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
import io
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
from collections import Counter
from concurrent import futures
from functools import partial
from multiprocessing import connection
from pathlib import Path
from urllib.parse import urlparse

import torch
from streaming import MDSWriter
from streaming.base.storage import CloudDownloader, CloudUploader
from streaming.base.util import merge_index
from tqdm import tqdm

from data import MDS_COLUMNS, decode_image

IMAGES = ('.jpg', '.jpeg', '.png', '.webp')
# A tar can declare any size, so nothing larger is read into memory.
MAX_BYTES = dict.fromkeys(IMAGES, 256 << 20) | {'.txt': 4 << 20, '.json': 4 << 20}
MAX_HEADER = 16 << 10  # bytes, of all that a tar has before a file's own: names of 4096 bytes take 11 KiB


def fail(status: int, message: str):
    print('convert.py: error:', ' '.join(message.split()), file=sys.stderr)
    raise SystemExit(status)


def find_files(source: str) -> list[Path]:
    """The tars and images that SOURCE names: a file, a folder (searched to its leaves) or a glob."""
    if os.path.isfile(source):
        return [Path(source)]
    found = [source] if os.path.exists(source) else glob.glob(source, recursive=True)
    if not found:
        fail(2, f'SOURCE {source} does not exist; give a tar, a folder, or a glob that matches some')
    files = [file for path in map(Path, found) for file in (path.rglob('[!.]*') if path.is_dir() else [path])]
    return [file for file in files if file.suffix.lower() in ('.tar', *IMAGES) and file.is_file()]


def read_image(path: Path):
    """Yield (key, suffix, bytes) of an image file and of the .txt and .json beside it; None is too large."""
    for file in (path, path.with_suffix('.txt'), path.with_suffix('.json')):
        if file.is_file():
            suffix = file.suffix.lower()
            yield path.stem, suffix, file.read_bytes() if file.stat().st_size <= MAX_BYTES[suffix] else None


class TarReader(io.BufferedReader):
    """Gives tarfile `left` bytes at most: it reads headers whole, in time and memory that grow with their square."""
    left = MAX_HEADER

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError('header too large')
        return super().read(size)


def read_tar(path: Path):
    """Yield (key, suffix, bytes) of a tar's files, `a/b.jpg` being the .jpg of a/b; None is too large."""
    with TarReader(open(path, 'rb', buffering=0)) as file, tarfile.open(fileobj=file, mode='r:') as tar:
        while member := tar.next():
            tar.members.clear()  # tarfile would keep every header,
            tar.pax_headers.clear()  # and go through the global ones for each file
            if tar.offset < member.offset_data:
                raise tarfile.ReadError('negative size')  # tarfile would go round for ever
            key, _, suffix = os.path.basename(member.name).partition('.')
            suffix = f'.{suffix.lower()}'
            # no links, no devices, no hidden files; no sparse ones, where a few bytes give 256 MiB in quadratic time
            if member.isreg() and not member.issparse() and key and suffix in MAX_BYTES:
                file.left = member.size
                data = tar.extractfile(member).read() if member.size <= MAX_BYTES[suffix] else None
                yield os.path.join(os.path.dirname(member.name), key), suffix, data
            file.left = MAX_HEADER
        # tarfile also stops, without a word, where a tar is cut between two files and at a garbled header.
        file.seek(tar.offset)
        if file.read(1024) != bytes(1024):
            raise tarfile.ReadError('no end mark')


def read_samples(path: Path):
    """Yield (key, {suffix: bytes}) of each sample, consecutive files of one key; last (None, error) if damaged."""
    key, fields, damage = None, {}, None
    try:
        for next_key, suffix, data in (read_image if path.suffix.lower() in IMAGES else read_tar)(path):
            if fields and (next_key != key or suffix in fields):
                yield key, fields
                fields = {}
            key, fields[suffix] = next_key, data
    except Exception as error:  # a hostile header makes tarfile raise nearly anything
        damage = error
    if fields:
        yield key, fields  # what came before the damage is whole
    if damage:
        yield None, damage


def make_sample(fields: dict | Exception) -> dict:
    """The columns of the shards from {suffix: bytes}. Raises ValueError with the reason if there is no sample in it."""
    if isinstance(fields, Exception):
        raise ValueError(f'cut short or damaged: {fields}')
    images = [fields[suffix] for suffix in IMAGES if suffix in fields]
    if len(images) != 1:
        raise ValueError('more than one image' if images else 'no image')
    if None in fields.values():
        raise ValueError('too large')
    try:
        caption = fields['.txt'].decode('utf-8-sig').rstrip('\r\n') if '.txt' in fields else \
            json.loads(fields['.json'])['caption'].encode().decode()  # JSON can hold what UTF-8 cannot
    except UnicodeError:
        raise ValueError('caption is not UTF-8') from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError('no caption') from None
    if not caption.strip():
        raise ValueError('empty caption')
    decode_image(images[0])
    return {'jpg': images[0], 'caption': caption}


def start_worker(shared_progress, parent: connection.Connection, parents_own: connection.Connection):
    global progress
    progress = shared_progress
    parents_own.close()  # so that the parent's end, however it comes, ends this pipe
    torch.set_num_threads(1)  # the workers are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer; its end ends the workers
    threading.Thread(target=lambda: connection.wait([parent]) and os._exit(1), daemon=True).start()


def convert_files(index: int, files: list[Path], folder: str, remote: str | None) -> tuple[Counter, list[str]]:
    """A worker: write shards and a list of what is skipped. Returns the counts, and a line for each damaged file."""
    counts, damaged, bytes_done = Counter(), [], 0
    with open(f'{folder}.skipped', 'w') as listing:
        writer = MDSWriter(columns=MDS_COLUMNS, out=(folder, remote) if remote else folder, hashes=['xxh64'])
        for path in files:
            for key, fields in read_samples(path):
                try:
                    sample = make_sample(fields)
                except ValueError as reason:
                    counts[str(reason).partition(':')[0]] += 1
                    listing.write(json.dumps({'source': str(path), 'key': key, 'reason': str(reason)}) + '\n')
                    damaged += [f'{path} is {reason}'] if key is None else []
                else:
                    writer.write(sample)
                    counts['samples'] += 1
                    progress[index] += len(sample['jpg'])
            bytes_done += path.stat().st_size
            progress[index] = bytes_done
        if counts['samples']:
            writer.finish()
            counts.update(shards=len(writer.shards), bytes=sum(shard['raw_data']['bytes'] for shard in writer.shards))
    return counts, damaged


def run_workers(parts: list[list[Path]], staging: str, remote: str | None) -> list[tuple[Counter, list[str]]]:
    """`convert_files` on each part in a process of its own, to `staging`/00000 and so on, with a progress bar."""
    context = multiprocessing.get_context('fork')  # what is imported is imported once
    progress = context.RawArray('q', len(parts))  # bytes read; one slot each, for a lock could die with its worker
    worker_end, parent_end = context.Pipe(duplex=False)
    num_bytes = sum(path.stat().st_size for part in parts for path in part)
    with (tqdm(total=num_bytes, unit='B', unit_scale=True, disable=None) as bar,  # None: only on a terminal
          futures.ProcessPoolExecutor(len(parts), context, start_worker, (progress, worker_end, parent_end)) as pool,
          parent_end):  # closed first, it ends the workers, also when one has failed
        jobs = [pool.submit(convert_files, index, part, f'{staging}/{index:05}', remote and f'{remote}/{index:05}')
                for index, part in enumerate(parts)]
        running = jobs
        while running:
            done, running = futures.wait(jobs, timeout=0.2, return_when=futures.FIRST_EXCEPTION)
            for job in done:
                job.result()  # raises what its worker raised
            bar.update(sum(progress) - bar.n)
        return [job.result() for job in jobs]


def publish(staging: str, out: str, remote: str | None, partitions: list[str]):
    """Make one dataset of the workers' shards: list what was skipped, merge their indexes, give it OUT's name."""
    with contextlib.chdir(staging):  # merge_index takes paths for URLs, and would cut them at a # or ?
        listings = [Path(name) for name in sorted(glob.glob('*.skipped'))]
        if skipped := b''.join(listing.read_bytes() for listing in listings):
            Path('skipped.jsonl').write_bytes(skipped)
            if remote:
                CloudUploader.get(('.', remote), keep_local=True, exist_ok=True).upload_file('skipped.jsonl')
        for listing in listings:
            listing.unlink()
        root = remote or '.'
        merge_index([f'{root}/{partition}/index.json' for partition in partitions], root, keep_local=not remote)
    if not remote:
        os.rename(staging, os.path.realpath(out))


@contextlib.contextmanager
def staging_folder(out: str, remote: str | None):
    """A new folder, gone afterwards: in the temporary one for a remote, else beside OUT, to be renamed to it."""
    place = None
    if not remote:
        place, name = os.path.split(os.path.realpath(out))
        os.makedirs(place, exist_ok=True)
        for left in glob.glob(f'{glob.escape(os.path.join(place, name))}.partial-*'):
            print(f'removing {left}, left by a run that did not finish')
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=place, prefix=f'{os.path.basename(os.path.realpath(out))}.partial-') as folder:
        staging = os.path.join(folder, 'mds')  # the folder itself can be read by its owner alone
        os.mkdir(staging)
        yield staging


def check_out(out: str, remote: str | None):
    """End with one line if OUT holds something, or cannot be reached."""
    if not remote:
        if os.path.ismount(out) or os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser('convert.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = partial(fail, 2)  # one line, without the usage
    parser.add_argument('source', metavar='SOURCE', nargs='+', help='tars, folders of tars or of images, or globs')
    parser.add_argument('out', metavar='OUT', help='new folder, or any remote that Streaming writes to (s3:// ...)')
    parser.add_argument('--num_workers', type=int, default=os.cpu_count(),
                        help='processes, at most one for each file of SOURCE (default: the cores, %(default)s)')
    args = parser.parse_args(argv)
    if args.num_workers < 1:
        parser.error(f'--num_workers {args.num_workers} converts nothing; use 1 or more')
    files = sorted({file for source in args.source for file in find_files(source)})
    if not files:
        fail(1, f'nothing to convert in SOURCE {" ".join(args.source)}: no .tar, {", ".join(IMAGES)}')
    remote = args.out.rstrip('/') if urlparse(args.out).scheme else None
    check_out(args.out, remote)

    num_workers = min(args.num_workers, len(files))
    parts = [files[len(files) * i // num_workers:len(files) * (i + 1) // num_workers] for i in range(num_workers)]
    try:
        with staging_folder(args.out, remote) as staging:
            results = run_workers(parts, staging, remote)
            partitions = [f'{index:05}' for index, (counts, _) in enumerate(results) if counts['samples']]
            if partitions:
                publish(staging, args.out, remote, partitions)
    except KeyboardInterrupt:
        fail(130, f'interrupted; OUT {args.out} holds no dataset')
    except futures.BrokenExecutor:
        fail(1, 'a worker was killed, often for lack of memory; run again, with a smaller --num_workers than '
                f'{num_workers} if that was it')
    except Exception as error:  # every storage client has its own
        fail(1, f'OUT {args.out} cannot be written ({error}); put that right and run the same command again')

    counts = sum((counts for counts, _ in results), Counter())
    samples, shards, num_bytes = (counts.pop(name, 0) for name in ('samples', 'shards', 'bytes'))
    reasons = ', '.join(f'{number:,} {reason}' for reason, number in counts.most_common())
    damaged = [' '.join(line.split()) for _, lines in results for line in lines]  # names can have more than one line
    for line in damaged:
        print(f'convert.py: warning: {line}; its whole samples are kept, fetch it again for the rest', file=sys.stderr)
    if not samples:
        fail(1, f'nothing could be converted of SOURCE {" ".join(args.source)}: {reasons or "it is empty"}')
    print(f'converted  {samples:,} samples, {num_bytes / 1e6:,.1f} MB in {shards:,} shards')
    if reasons:
        print(f'skipped    {reasons}; listed in {args.out}/skipped.jsonl')
    print(f'next       composer benchmark.py --remote {args.out}')
    return 1 if damaged else 0


if __name__ == '__main__':
    logging.disable(logging.WARNING)  # Streaming warns of its temporary folders
    sys.stdout.reconfigure(errors='backslashreplace')  # OUT can be bytes that are no text
    sys.exit(main())
