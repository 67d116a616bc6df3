"""A dataset of 20,000 parts in a store that takes 20 ms for each request: listing, going on, merging, opening.

    python benchmarks/parts.py [PARTS]     # default 20000; takes about two minutes

The store is tests/local_s3.py on loopback, 1000 keys a page. Requests, seconds and the peak of the process's memory
are measured; the last columns are the same for the 864,268 shards of LAION,
in proportion. Server and client share this machine's cores, so that a real store is faster where requests are many.
"""
import ast
import http.client
import json
import logging
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parent.parent))

from inputs.places import INDEX
from inputs.shards import read_index
from parts.output import Output, join_parts, part_name, write_index
from tests.local_s3 import environment
from tests.runs import free_port, wait_until

LAION_SHARDS = 864_268
MILLISECONDS = 20  # that each request takes
ONE_BY_ONE = 200  # parts that are read as encode.py once read all
OUT = 's3://bucket/laion'


def names_of(num_parts: int) -> list[str]:
    return [part_name(number) for number in range(num_parts)]


def part_text(number: int) -> str:
    """The index of a part of one shard of 3,000 images, as convert.py writes it."""
    shard = {'samples': 3000, 'raw_data': {'basename': 'shard.00000.mds', 'bytes': 60_000_000,
                                           'hashes': {'xxh64': f'{number:016x}'}},
             'zip_data': None, 'version': 2, 'format': 'mds', 'compression': None, 'hashes': ['xxh64'],
             'size_limit': 1 << 26, 'column_names': ['caption', 'jpg'], 'column_encodings': ['str', 'bytes'],
             'column_sizes': [None, None]}
    return json.dumps({'version': 2, 'shards': [shard], 'skipped': []})


def fill(server: str, num_parts: int) -> None:
    """Put the parts into the store, without its delay."""
    connection = http.client.HTTPConnection(server)
    for number, part in enumerate(names_of(num_parts)):
        for name, content in (('shard.00000.mds', ''), (INDEX, part_text(number))):
            connection.request('PUT', f'/bucket/laion/{part}/{name}', content)
            connection.getresponse().read()


def measure(server: str, what: Callable[[], None]) -> tuple[int, float, float]:
    """Requests and seconds of a function, and the MiB that it adds, in a process of its own."""
    urlopen(f'http://{server}/bucket/requests').read()  # which forgets them
    context = multiprocessing.get_context('spawn')  # a client of a store does not survive a fork
    results = context.Queue()
    process = context.Process(target=run_and_measure, args=(what, results))
    process.start()
    process.join()  # what it puts is small enough for the pipe
    if process.exitcode:
        raise SystemExit(f'parts.py: a step ended with {process.exitcode}')
    found = results.get()
    counts = ast.literal_eval(urlopen(f'http://{server}/bucket/requests').read().decode())
    return sum(counts.values()), *found


def run_and_measure(what: Callable[[], None], results: multiprocessing.Queue) -> None:
    """In a process of its own: seconds of a function, and the MiB that it adds."""
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    what()
    seconds = time.perf_counter() - start
    results.put((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before) / 1024))


def read_one_by_one() -> None:
    output = Output(OUT, 'OUT')
    for part in names_of(ONE_BY_ONE):
        output.read(f'{part}/{INDEX}')


def look_what_is_done(num_parts: int) -> None:
    assert set(Output(OUT, 'OUT').parts()) == set(names_of(num_parts))


def merge(num_parts: int) -> None:
    output = Output(OUT, 'OUT')
    output.read(INDEX)  # makes the client, as a command does before
    joined = join_parts(output, names_of(num_parts))
    assert joined.samples == 3000 * num_parts and write_index(output, joined)


def open_dataset(num_parts: int) -> None:
    assert len(read_index(OUT)['shards']) == num_parts


def show(name: str, measured: tuple[int, float, float], times: float) -> None:
    """A row of the table; `times` as many parts are LAION's."""
    requests, seconds, mib = measured
    print(f'{name:<24}{requests:>9,}{seconds:>9.1f} s{mib:>7,.0f} MiB{requests * times:>13,.0f}'
          f'{seconds * times / 60:>9.1f} min', flush=True)


def measure_all(server: str, num_parts: int) -> None:
    """Print the table."""
    times = LAION_SHARDS / num_parts
    print(f'{num_parts:,} parts, {MILLISECONDS} ms a request; at the right for {LAION_SHARDS:,}\n'
          f'{"":<24}{"requests":>9}{"seconds":>11}{"memory":>11}{"requests":>13}{"minutes":>13}')
    show(f'{ONE_BY_ONE} one by one', measure(server, read_one_by_one), LAION_SHARDS / ONE_BY_ONE)
    show('list what is done', measure(server, partial(look_what_is_done, num_parts)), times)
    show('merge', measure(server, partial(merge, num_parts)), times)
    show('read the index', measure(server, partial(open_dataset, num_parts)), times)


def main() -> None:
    logging.disable(logging.WARNING)  # Streaming warns of its temporary folders
    num_parts = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    port = free_port()
    os.environ |= environment(port)
    address = f'127.0.0.1:{port}'
    program = Path(__file__).parent.parent / 'tests' / 'local_s3.py'
    server = subprocess.Popen([sys.executable, str(program), str(port), '0'])
    try:
        wait_until(lambda: answers(f'http://{address}/bucket/requests'))
        fill(address, num_parts)
        urlopen(f'http://{address}/bucket/delay?{MILLISECONDS}').read()
        measure_all(address, num_parts)
    finally:
        server.kill()


def answers(url: str) -> bool:
    try:
        return bool(urlopen(url).read())
    except OSError:  # it does not listen yet
        return False


if __name__ == '__main__':
    main()
