"""An interrupted conversion leaves no worker process, and the same command completes it."""
import os
import signal

import psutil
import pytest

import convert
from tests.runs import files_of, start, wait_until, workers_of
from tests.samples import sample_files, write_tar


@pytest.mark.long
@pytest.mark.parametrize('number, status', [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])  # 130 as after Ctrl-C
def test_an_interrupted_conversion_goes_on_and_writes_the_same_bytes(s3, tmp_path, number, status):
    for index in range(9):
        s3.put(f'tars/{index}.tar', write_tar(tmp_path / 'x.tar', sample_files('x', index)).read_bytes())
    flags = ['--size_limit', '1kb', '--num_workers', '2']
    undisturbed, out = tmp_path / 'undisturbed', tmp_path / 'out'
    convert.main(['s3://bucket/tars', str(undisturbed), *flags])

    # Interrupt the command when some parts are complete.
    s3.delay = 0.3
    command = start(tmp_path / 'log', 'convert.py', 's3://bucket/tars', out, *flags)
    wait_until(lambda: list(out.glob('*/index.json')))
    done = {path: path.stat().st_mtime_ns for part in out.glob('*/index.json') for path in part.parent.iterdir()}
    workers = workers_of(command)
    os.kill(command.pid, number)
    log = (tmp_path / 'log').read_text
    assert command.wait(300) == status, log()
    wait_until(lambda: not any(psutil.pid_exists(worker) for worker in workers))
    s3.delay = 0
    if status == 130:
        assert log().splitlines()[-1].startswith('convert.py: error: interrupted; ')
        assert 'Traceback' not in log()

    # Start the same command again. Incomplete files of the killed process may remain.
    assert not (out / 'index.json').exists()
    convert.main(['s3://bucket/tars', str(out), *flags])
    whole = {name: content for name, content in files_of(out).items() if '.unfinished' not in name}
    assert whole == files_of(undisturbed)
    assert done
    assert all(path.stat().st_mtime_ns == time for path, time in done.items())
