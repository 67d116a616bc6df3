"""A conversion or an encoding that was ended leaves no worker, goes on, and ends as one that never was."""
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

import convert
import encode
from tests.runs import files_of, start, wait_until, workers_of
from tests.samples import sample_files, write_tar


@pytest.mark.long
@pytest.mark.parametrize('program, victim, number, status', [
    ('convert.py', 'command', signal.SIGTERM, 130),  # which is handled as Ctrl-C is
    ('convert.py', 'command', signal.SIGKILL, -9), ('encode.py', 'worker', signal.SIGKILL, 0)])
def test_what_was_ended_goes_on_and_equals_what_never_was(s3, tmp_path, shards, model_folder, program, victim, number,
                                                          status):
    def argv(out: Path) -> list[str]:
        if program == 'convert.py':
            return ['s3://bucket/tars', str(out), '--size_limit', '1kb', '--num_workers', '2']
        return ['--remote', 's3://bucket/images', '--out', str(out), '--model_name', model_folder, '--pretrained',
                '--image_size', '64', '--batch_size', '4', '--num_workers', '0', '--results',
                str(tmp_path / 'results.jsonl')]

    for index in range(9):
        s3.put(f'tars/{index}.tar', write_tar(tmp_path / 'x.tar', sample_files('x', index)).read_bytes())
    for path in Path(shards).iterdir():
        s3.put(f'images/{path.name}', path.read_bytes())
    main = convert.main if program == 'convert.py' else encode.main
    undisturbed, out = tmp_path / 'undisturbed', tmp_path / 'out'
    main(argv(undisturbed))

    # end it when some parts are done
    s3.delay = 0.3
    command = start(tmp_path / 'log', program, *argv(out))
    wait_until(lambda: list(out.glob('*/index.json')))
    done = {path: path.stat().st_mtime_ns for part in out.glob('*/index.json') for path in part.parent.iterdir()}
    workers = workers_of(command)
    os.kill(command.pid if victim == 'command' else workers[0], number)
    log = (tmp_path / 'log').read_text
    assert command.wait(300) == status, log()
    wait_until(lambda: not any(psutil.pid_exists(worker) for worker in workers))
    s3.delay = 0
    if status == 130:
        assert log().splitlines()[-1].startswith(f'convert.py: error: interrupted; what is done stays in OUT {out}')
        assert 'Traceback' not in log()

    # the same command again
    if victim == 'command':
        assert not (out / 'index.json').exists()
        main(argv(out))
    whole = {name: content for name, content in files_of(out).items() if '.unfinished' not in name}  # else half written
    assert whole == files_of(undisturbed)
    assert done
    assert all(path.stat().st_mtime_ns == time for path, time in done.items())
    if program == 'encode.py':
        record = json.loads((tmp_path / 'results.jsonl').read_text().splitlines()[-1])
        assert (record['stored_samples'], record['num_devices']) == (24, 1), log()
