"""Conversions whose command or workers are killed at any moment end as undisturbed ones do."""
import os
import signal
import threading
from pathlib import Path

import pytest

import convert
from parts.work import LocalWorkers
from settings.commands import Convert
from settings.flags import parse
from tests.local_s3 import LocalS3, local_s3
from tests.parts.commands import start, workers_of
from tests.runs import files_of, wait_until
from tests.samples import sample_files, write_tar

NUM_PARTS = 7


def put_tars(store: LocalS3, folder: Path) -> None:
    """Tars of two samples each, and one that is cut, in the store."""
    for number in range(NUM_PARTS):
        files = {**sample_files(f'{number}a', 2 * number), **sample_files(f'{number}b', 2 * number + 1)}
        content = write_tar(folder / 'x.tar', files).read_bytes()
        store.put(f'tars/{number}.tar', content[:5000] if number == 3 else content)


def contents(out: str, store: LocalS3) -> dict[str, bytes]:
    """All that OUT holds, but for files that were being written when their process was killed."""
    if out.startswith('s3://bucket/'):
        prefix = out.removeprefix('s3://bucket/') + '/'
        return {key.removeprefix(prefix): content for key, content in list(store.objects.items())
                if key.startswith(prefix)}
    return {name: content for name, content in files_of(Path(out)).items() if '#' not in name}


def finished(out: str, store: LocalS3) -> int:
    """How many parts are done."""
    return sum(name.endswith('/index.json') for name in contents(out, store))


@pytest.fixture
def undisturbed(request, tmp_path, monkeypatch):
    """The store, where OUTs are, the arguments of a conversion, and what it makes when nothing disturbs it."""
    with local_s3(monkeypatch) as store:
        put_tars(store, tmp_path)
        root = 's3://bucket' if request.param == 's3' else str(tmp_path)
        argv = ['s3://bucket/tars', '--size_limit', '1kb', '--num_workers', '2']
        assert convert.main([*argv, f'{root}/undisturbed']) == 1  # 3.tar is cut
        expected = contents(f'{root}/undisturbed', store)
        assert finished(f'{root}/undisturbed', store) == NUM_PARTS and 'index.json' in expected
        yield store, root, argv, expected


@pytest.mark.parametrize('undisturbed, done', [
    ('folder', 3), pytest.param('s3', 0, marks=pytest.mark.long)], indirect=['undisturbed'])
def test_a_conversion_whose_workers_are_killed_ends_as_one_whose_were_not(undisturbed, done, monkeypatch, capfd):
    store, root, argv, expected = undisturbed
    out = f'{root}/out'
    store.delay = 0.1
    at_work = []
    call = LocalWorkers.call

    def noted(workers, parts):
        answer = call(workers, parts)
        at_work.extend(workers.pools[workers.numbers[answer]]._processes)
        return answer
    monkeypatch.setattr(LocalWorkers, 'call', noted)
    conversion = threading.Thread(target=convert.convert, args=(parse(Convert, '', [*argv, out]),))
    conversion.start()
    wait_until(lambda: at_work and finished(out, store) >= done)
    os.kill(at_work[-1], signal.SIGKILL)
    conversion.join(300)
    assert contents(out, store) == expected
    assert 'made again' in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize('undisturbed, done', [('folder', 0), ('s3', 2), ('folder', 5)], indirect=['undisturbed'])
def test_a_conversion_that_is_killed_and_started_again_equals_one_that_never_was(undisturbed, tmp_path, done):
    store, root, argv, expected = undisturbed
    out = f'{root}/out'
    log = tmp_path / 'log'
    store.delay = 0.1
    command = start(log, 'convert.py', *argv, out)
    wait_until(lambda: workers_of(command) and finished(out, store) >= done)
    command.kill()
    assert command.wait(300) == -signal.SIGKILL and 'index.json' not in contents(out, store)
    store.delay = 0
    assert convert.main([*argv, out]) == 1
    assert contents(out, store) == expected, log.read_text()
