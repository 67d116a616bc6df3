"""What the benchmark talks to: S3, Weights & Biases, TensorBoard, and the signals that end a run."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path

import boto3
import psutil
import pytest
import requests
from conftest import TINY, encoded, picture, write_shards
from test_ranks import free_port

import benchmark
import convert
import encode
from benchmark import main
from harness.checkpoints import checkpoints, load_checkpoint

ROOT = Path(__file__).parent.parent


@pytest.fixture
def s3(monkeypatch):
    """An S3 server on loopback that checks credentials, with a bucket; the environment has the right ones."""
    port = free_port()
    url = f'http://127.0.0.1:{port}'
    server = subprocess.Popen([sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', str(port)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: requests.post(f'{url}/moto-api/reset-auth', data=b'3'))  # three calls to make credentials with
    for name, value in {'S3_ENDPOINT_URL': url, 'AWS_DEFAULT_REGION': 'us-east-1', 'AWS_ACCESS_KEY_ID': 'x',
                        'AWS_SECRET_ACCESS_KEY': 'y', 'AWS_EC2_METADATA_DISABLED': 'true'}.items():
        monkeypatch.setenv(name, value)
    iam = boto3.session.Session().client('iam', endpoint_url=url)
    iam.create_user(UserName='user')
    iam.put_user_policy(UserName='user', PolicyName='all', PolicyDocument=json.dumps({
        'Version': '2012-10-17', 'Statement': [{'Effect': 'Allow', 'Action': 's3:*', 'Resource': '*'}]}))
    key = iam.create_access_key(UserName='user')['AccessKey']
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', key['AccessKeyId'])
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', key['SecretAccessKey'])
    server.client = boto3.session.Session().client('s3', endpoint_url=url)
    server.client.create_bucket(Bucket='bucket')
    yield server
    server.kill()
    server.wait()


def wait_for(request) -> None:
    """Until the server on loopback answers."""
    end = time.monotonic() + 60
    while True:
        try:
            return request()
        except requests.ConnectionError:
            assert time.monotonic() < end
            time.sleep(0.05)


def write_tar(path: Path, samples: list[dict]) -> str:
    with tarfile.open(path, 'w') as tar:
        for index, sample in enumerate(samples):
            for suffix, content in (('jpg', sample['jpg']), ('txt', sample['caption'].encode())):
                member = tarfile.TarInfo(f'{index:05}.{suffix}')
                member.size = len(content)
                tar.addfile(member, BytesIO(content))
    return str(path)


def one_error_line(argv: list, capfd) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in argv])
    error = capfd.readouterr().err
    assert exit.value.code == 2 and error.count('\n') == 1, error
    return error


def test_shards_go_to_s3_and_are_trained_on_from_there(s3, samples, tmp_path, results):
    tar = write_tar(tmp_path / '00000.tar', samples)
    assert convert.main([tar, 's3://bucket/photos', '--num_workers', '1']) == 0
    record = main(['--remote', 's3://bucket/photos', *TINY, '--local', str(tmp_path / 'cache'), '--results',
                   str(results)])
    assert record['dataset'] == 'streaming' and record['measured_batches'] == 3
    assert list((tmp_path / 'cache').rglob('*.mds'))


def test_a_run_resumes_from_checkpoints_in_s3(s3, results):
    argv = ['--use_synth_data', '--use_ema', *TINY, '--save_folder', 's3://bucket/runs/1', '--save_interval', '2ba',
            '--results', str(results)]
    main(argv)
    keys = [entry['Key'] for entry in s3.client.list_objects_v2(Bucket='bucket', Prefix='runs/1/ep')['Contents']]
    assert keys == ['runs/1/ep0-ba2-rank0.pt', 'runs/1/ep0-ba4-rank0.pt']
    record = main([*argv, '--autoresume', '--max_duration', '6ba'])
    assert (record['status'], record['first_batch'], record['measured_batches']) == ('complete', 4, 1)


def test_an_s3_folder_in_use_or_out_of_reach_is_one_line(s3, results, capfd, monkeypatch):
    s3.client.put_object(Bucket='bucket', Key='runs/1/ep0-ba2-rank0.pt', Body=b'')
    flags = ['--use_synth_data', *TINY, '--results', results, '--save_folder']
    assert 'already holds files' in one_error_line([*flags, 's3://bucket/runs/1'], capfd)
    assert '--save_folder s3://nobody/runs cannot be read' in one_error_line([*flags, 's3://nobody/runs'], capfd)
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'wrong')
    assert 'check its name and your credentials' in one_error_line([*flags, 's3://bucket/runs/1'], capfd)


def test_latents_go_to_s3_and_are_trained_on_from_there(s3, shards, model_folder, tmp_path, results):
    model = ['--model_name', model_folder, '--pretrained', '--image_size', '64', '--results', str(results)]
    record = encode.main(['--remote', shards, '--out', 's3://bucket/latents', '--batch_size', '5', *model])
    assert record['samples'] == record['stored_samples'] == 24
    record = main(['--remote', 's3://bucket/latents', '--local', str(tmp_path / 'cache'), *TINY, *model])
    assert (record['status'], record['encoders']) == ('complete', 'text_in_loop')


def test_a_wrong_bucket_and_wrong_credentials_are_one_line_each(s3, samples, tmp_path, results, capfd, monkeypatch):
    tar = write_tar(tmp_path / '00000.tar', samples)
    assert '--remote s3://nobody/photos' in one_error_line(['--remote', 's3://nobody/photos', *TINY], capfd)
    with pytest.raises(SystemExit):
        convert.main([tar, 's3://nobody/photos'])
    assert 'OUT s3://nobody/photos' in capfd.readouterr().err
    assert convert.main([tar, 's3://bucket/photos', '--num_workers', '1']) == 0
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'wrong')
    assert 'permission' in one_error_line(['--remote', 's3://bucket/photos', *TINY], capfd)
    with pytest.raises(SystemExit):
        convert.main([tar, 's3://bucket/again'])
    assert '403' in capfd.readouterr().err


def test_a_server_that_goes_away_ends_the_run_with_one_line_and_a_record(s3, tmp_path, results):
    shards = write_shards(tmp_path / 'shards', [{'jpg': encoded(picture(i)), 'caption': str(i)} for i in range(400)],
                          size_limit=4000)
    for file in Path(shards).iterdir():
        s3.client.upload_file(str(file), 'bucket', f'many/{file.name}')
    run = subprocess.Popen([sys.executable, 'benchmark.py', '--remote', 's3://bucket/many', *TINY, '--max_duration',
                            '2ep', '--local', str(tmp_path / 'cache'), '--results', str(results)], cwd=ROOT, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while len(list(tmp_path.glob('cache/*.mds'))) < 20:
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    s3.kill()
    _, errors = run.communicate(timeout=120)
    [line] = [line for line in errors.splitlines() if 'error' in line.lower()]
    assert line.startswith('benchmark.py: error: the run failed at batch') and 'a shard could not be read' in line
    record = json.loads(results.read_text())
    assert run.returncode == 2 and record['status'] == 'failed' and record['error'] in line


def test_a_cache_of_another_remote_is_refused(shards, samples, tmp_path, results, capfd):
    other, cache = write_shards(tmp_path / 'other', samples), tmp_path / 'cache'
    main(['--remote', shards, *TINY, '--local', str(cache), '--results', str(results)])
    error = one_error_line(['--remote', other, *TINY, '--local', cache, '--results', results], capfd)
    assert f'--local {cache} caches {shards}' in error


def read_wandb(path: Path) -> tuple[set, dict, dict]:
    """Keys of the history, the config and the summary in an offline run's file."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore
    store, history, config, summary = DataStore(), set(), {}, {}
    store.open_for_scan(str(path))
    while data := store.scan_data():
        entry = Record()
        entry.ParseFromString(data)
        history |= {item.key or '/'.join(item.nested_key) for item in entry.history.item}
        for found, updates in ((summary, (entry.summary.update, entry.run.summary.update)),
                               (config, (entry.config.update, entry.run.config.update))):
            for update in updates:
                found |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in update}
    return history, config, summary


def test_wandb_offline_holds_the_curves_the_settings_and_the_record(tmp_path, results, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = main(['--use_synth_data', '--use_ema', *TINY, '--measure_batches', '8', '--wandb_name', 'tiny',
                   '--wandb_project', 'test', '--results', str(results)])
    [file] = tmp_path.glob('wandb/offline-run-*/*.wandb')

    def written():  # by a process of W&B's own, which may be at it still
        with contextlib.suppress(AssertionError):
            return 'images_per_sec' in read_wandb(file)[2]
    wait_until(written)
    history, config, summary = read_wandb(file)
    assert {'loss/train/total', 'throughput/samples_per_sec', 'throughput/device/flops_per_sec'} <= history
    assert (config['model_name'], config['batch_size'], config['use_ema']) == ('tiny', 4, True)
    assert summary['images_per_sec'] == record['images_per_sec'] and summary['loss'] == record['loss']


def test_wandb_without_login_is_one_line(results, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv('WANDB_MODE', 'online')
    monkeypatch.setenv('NETRC', str(tmp_path / 'none'))
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.delenv('WANDB_API_KEY', raising=False)
    error = one_error_line(['--use_synth_data', *TINY, '--wandb_name', 'x', '--results', results], capfd)
    assert '--wandb_name x' in error and 'wandb login' in error


def test_tensorboard_files_hold_the_loss(tmp_path, results):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    main(['--use_synth_data', *TINY, '--tensorboard', str(tmp_path / 'board'), '--results', str(results)])
    [file] = tmp_path.glob('board/**/events*')
    events = EventAccumulator(str(file)).Reload()
    assert len(events.Scalars('loss/train/total')) == 4


def start_and_train(results, *flags) -> subprocess.Popen:
    """A run of two ranks under the launcher that has trained for some batches."""
    log = results.with_name('log')
    command = [sys.executable, '-m', 'composer.cli.launcher', '-n', '2', 'benchmark.py', '--use_synth_data', *TINY,
               '--measure_batches', '100000', '--results', str(results), *flags]
    with open(log, 'w') as file:
        run = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
    while not re.search(r'\b([6-9]|\d\d+)/100001', log.read_text()):  # Composer's progress bar
        assert run.poll() is None, log.read_text()
        time.sleep(0.05)
    return run


def wait_until(true, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def group_is_gone(group: int) -> bool:
    """Whether no process of it is left but dead ones."""
    for process in psutil.process_iter(['status']):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info['status'] != psutil.STATUS_ZOMBIE:
                return False
    return True


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_under_the_launcher_leaves_a_record_of_what_was_measured(results, number):
    run = start_and_train(results)
    os.killpg(run.pid, number)  # as a terminal or a cluster sends it: to every process
    run.wait(timeout=60)
    wait_until(lambda: group_is_gone(run.pid))  # SIGTERM ends the launcher before its ranks
    record = json.loads(results.read_text())
    assert record['status'] == 'interrupted' and record['measured_batches'] >= 3 and record['images_per_sec'] > 0


def test_the_end_of_the_launcher_ends_the_run_with_a_record_and_a_checkpoint_to_go_on_from(results):
    folder = results.with_name('checkpoints')
    run = start_and_train(results, '--use_ema', '--save_folder', str(folder))
    os.kill(run.pid, signal.SIGTERM)  # to it alone
    run.wait(timeout=60)
    wait_until(lambda: group_is_gone(run.pid))
    record = json.loads(results.read_text())
    assert record['status'] == 'interrupted'
    [checkpoint] = checkpoints(folder)
    done = load_checkpoint(checkpoint)['state']['timestamp']['Timestamp']['batch']
    assert done >= record['measured_batches'] + 1
    argv = ['--use_synth_data', '--use_ema', *TINY, '--max_duration', f'{done + 3}ba', '--save_folder', str(folder)]
    resumed = main([*argv, '--autoresume', '--results', str(results)])
    assert (resumed['status'], resumed['first_batch'], resumed['measured_batches']) == ('complete', done, 2)


def test_a_crash_leaves_a_record_that_says_why(results, capfd, monkeypatch):
    def crash(self, batch):
        raise RuntimeError('out of\nluck')
    monkeypatch.setattr(benchmark.StableDiffusion, 'encode', crash)
    with pytest.raises(SystemExit):
        main(['--use_synth_data', *TINY, '--results', str(results)])
    record = json.loads(results.read_text())
    assert (record['status'], record['error']) == ('failed', 'RuntimeError: out of luck')
    assert record['measured_batches'] == 0 and record['images_per_sec'] is None
    assert 'benchmark.py: error: the run failed at batch 1: RuntimeError: out of luck\n' in capfd.readouterr().err
