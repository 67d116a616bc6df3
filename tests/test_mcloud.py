"""mcloud.yaml against today's mcli: what it parses, what the real `mcli run` sends, and what the command block does."""
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mcli import RunConfig
from mcli.models.run_config import FinalRunConfig

REPOSITORY = Path(__file__).parents[1]
FILE = REPOSITORY / 'mcloud.yaml'
BIN = Path(sys.executable).parent  # where pip put `mcli` and `composer`


def parse(path, caplog) -> tuple[RunConfig, list[str]]:
    """The config that mcli reads, and all its complaints: Python warnings from parsing, log lines from finishing it."""
    with warnings.catch_warnings(record=True) as caught, caplog.at_level('WARNING', 'mcli'):
        warnings.simplefilter('always')
        config = RunConfig.from_file(path)
        FinalRunConfig.finalize_config(config)  # as `mcli run` does before it sends
    return config, [str(warning.message) for warning in caught] + [record.message for record in caplog.records]


def edited(tmp_path, pattern: str, replacement: str) -> Path:
    """A copy of the file with one edit, of which there must be something to make."""
    text, count = re.subn(pattern, replacement, FILE.read_text(), flags=re.MULTILINE)
    assert count, f'{pattern} is not in the file'
    copy = tmp_path / 'mcloud.yaml'
    copy.write_text(text)
    return copy


def commands(config: RunConfig) -> list[list[str]]:
    """The words of each line of the command block, as the shell splits them."""
    return [words for line in config.command.splitlines() if (words := shlex.split(line, comments=True))]


def test_mcli_reads_the_file_without_a_warning(caplog):
    config, complaints = parse(FILE, caplog)
    assert complaints == []
    assert config.compute == {'gpus': 8, 'gpu_type': 'a100_40gb'}


@pytest.mark.parametrize('pattern, replacement, complaint', [
    ('^name:', 'optimization_level: 0\nname:', 'unknown fields optimization_level'),
    ('^  gpus:', '  gpu_num:', "'compute.gpu_num'"),
    ('^compute:', 'gpu_num: 8\ncompute:', '"gpu_num" is deprecated'),
    ('^name: .*', 'name: Stable_Diffusion', 'Invalid run name'),
])
def test_mcli_warns_of_a_field_that_it_does_not_know(tmp_path, caplog, pattern, replacement, complaint):
    _, complaints = parse(edited(tmp_path, pattern, replacement), caplog)
    assert len(complaints) == 1 and complaint in complaints[0]


def test_only_the_compute_section_says_how_many_gpus():
    """Composer's launcher takes processes and nodes from the environment that the platform sets."""
    for words in commands(RunConfig.from_file(FILE)):
        assert not {'-n', '--nproc', '--world_size', '--node_rank'} & set(words)


@pytest.fixture
def platform():
    """The platform's GraphQL endpoint on loopback, as far as createRun goes: its URL, and the requests it has got."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
            requests.append({**request, 'authorization': self.headers['Authorization']})
            run = request['variables']['createRunData']['runInput']
            now = '2025-01-01T00:00:00.000Z'
            resumption = {'clusterName': 'loopback', 'cpus': 0, 'gpuType': 'a100_40gb', 'gpus': 8, 'nodes': 1,
                          'executionIndex': 0, 'status': 'PENDING', 'startTime': None, 'endTime': None}
            created = {'id': '1', 'name': f'{run.get("runName")}-abc123', 'createdByEmail': 'someone@example.com',
                       'status': 'PENDING', 'createdAt': now, 'updatedAt': now, 'reason': None, 'priority': 'AUTO',
                       'maxRetries': 0, 'preemptible': False, 'retryOnSystemFailure': False, 'isDeleted': False,
                       'runType': 'TRAINING', 'resumptions': [resumption],
                       'details': {'originalRunInput': run, 'metadata': {}, 'lastExecutionId': '1'}}
            body = json.dumps({'data': {'createRun': [created]}}).encode()
            self.send_response(200)
            self.send_header('Content-Type', 'application/json')
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f'http://127.0.0.1:{server.server_port}/graphql', requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_mcli_run_sends_the_run_that_the_file_describes(platform, tmp_path):
    endpoint, requests = platform
    run = subprocess.run([BIN / 'mcli', 'run', '-f', FILE, '--no-follow'], cwd=tmp_path, timeout=60,
                         capture_output=True, text=True,
                         env={'PATH': os.environ['PATH'], 'HOME': str(tmp_path), 'MCLI_DISABLE_UPGRADE_CHECK': 'true',
                              'MOSAICML_API_ENDPOINT': endpoint, 'MOSAICML_API_KEY': 'a-key'})
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    assert 'stable-diffusion-benchmark-abc123 submitted' in output and 'Warning' not in output
    [request] = requests
    assert 'mutation CreateRun' in request['query'] and request['authorization'] == 'a-key'
    sent = request['variables']['createRunData']['runInput']
    assert sent['runName'] == 'stable-diffusion-benchmark'
    assert sent['image'] == 'mosaicml/pytorch:2.7.0_cu126-python3.12-ubuntu22.04'
    assert sent['compute'] == {'gpus': 8, 'gpuType': 'a100_40gb'}
    assert sent['integrations'] == [{'type': 'git_repo', 'params': {'gitRepo': 'my-org/diffusion-benchmark'}}]
    assert sent['envVariables'] == [{'envKey': 'WANDB_PROJECT', 'envValue': 'stable-diffusion-benchmark'}]
    assert sent['command'] == RunConfig.from_file(FILE).command.strip()
    assert 'composer benchmark.py --use_ema --use_synth_data --device_train_microbatch_size 4' in sent['command']


@pytest.mark.long
def test_the_command_block_runs_as_it_stands_and_leaves_its_record(tmp_path):
    """Bash gets the block unedited, in a folder beside the checkout; only pip and the size of the run are put in."""
    (tmp_path / 'diffusion-benchmark').symlink_to(REPOSITORY)
    programs, results = tmp_path / 'bin', tmp_path / 'results.jsonl'
    small = ('--model_name tiny --image_size 64 --batch_size 4 --warmup_batches 1 --measure_batches 2 '
             f'--results {shlex.quote(str(results))}')
    programs.mkdir()
    for name, script in {'pip': f'ls "$3" && echo "$@" > {shlex.quote(str(tmp_path / "pip"))}',
                         'composer': f'exec {shlex.quote(str(BIN / "composer"))} -n 1 "$@" {small}'}.items():
        (programs / name).write_text(f'#!/bin/sh\n{script}\n')
        (programs / name).chmod(0o755)
    run = subprocess.run(['bash', '-c', RunConfig.from_file(FILE).command], cwd=tmp_path, timeout=120,
                         capture_output=True, text=True, env={**os.environ, 'PATH': f'{programs}:{os.environ["PATH"]}'})
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / 'pip').read_text() == 'install -r requirements.txt\n'
    [line] = results.read_text().splitlines()  # one run: the second example is a comment
    assert line in run.stdout.splitlines()  # so that the run's log has it too
    record = json.loads(line)
    assert record['status'] == 'complete' and record['images_per_sec'] > 0
    assert record['use_ema'] and record['dataset'] == 'synthetic' and record['device_train_microbatch_size'] == 4


def test_the_second_example_and_the_rest_of_the_comments_hold_once_uncommented(tmp_path, caplog):
    from cli.options import benchmark_parser
    copy = edited(tmp_path, r'# (?=composer |--wandb|S3_ENDPOINT_URL|cluster:)', '')
    config, complaints = parse(copy, caplog)
    assert complaints == []
    assert config.compute['cluster'] == 'my-cluster'
    assert config.env_variables['S3_ENDPOINT_URL'] == 'https://s3.example.com'
    synthetic, streaming = [words for words in commands(config) if words[0] == 'composer']
    assert synthetic[:2] == streaming[:2] == ['composer', 'benchmark.py']
    args = benchmark_parser('').parse_args(synthetic[2:])
    assert args.use_synth_data and args.wandb_name == 'synthetic'
    args = benchmark_parser('').parse_args(streaming[2:])
    assert args.remote == 's3://my-bucket/laion/mds' and args.use_ema and args.device_train_microbatch_size
    assert not args.use_synth_data
