"""The record of a run: whole, printed last, and without secrets."""
import json
import multiprocessing
import os
import subprocess
import sys

from benchmark import main
from harness.options import benchmark_parser
from harness.record import keep, training_settings
from tests.runs import ROOT, TINY, check_record


def test_a_synthetic_run_appends_its_record_and_prints_it_last(results, capfd):
    for runs in (1, 2):
        main(['--use_synth_data', '--use_ema', *TINY, '--results', str(results)])
        lines = capfd.readouterr().out.strip().splitlines()
        assert results.read_text().splitlines()[-1] == lines[-1] and len(results.read_text().splitlines()) == runs
    record = json.loads(lines[-1])
    check_record(record)
    assert (record['dataset'], record['use_ema'], record['num_devices'], record['mfu']) == ('synthetic', True, 1, None)
    assert lines[-2].startswith('full training') and '2,867,200,000 images' in lines[-2]


def append_records(path: str, name: str):
    for index in range(20):
        keep({'name': name, 'index': index, 'text': name * 200_000}, '', path)


def test_runs_that_write_to_one_file_at_once_keep_every_record_whole(results, capfd):
    results.write_text('{"cut by a full di')
    context = multiprocessing.get_context('fork')
    writers = [context.Process(target=append_records, args=(str(results), name)) for name in 'abc']
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    cut, *lines = results.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert cut == '{"cut by a full di' and len(records) == 60
    assert {(record['name'], record['index']) for record in records} == {(n, i) for n in 'abc' for i in range(20)}


def test_passwords_and_signatures_in_urls_stay_out_of_records(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', '--remote', 's3://key:secret@bucket/a?X-Sig=abc&b=c', 'a@b', '?'])
    args = benchmark_parser('').parse_args([])
    assert training_settings(args, latents=False)['command'] == "benchmark.py --remote 's3://***@bucket/a?***' a@b '?'"


def test_no_secret_of_the_environment_is_written_down(tmp_path, shards):
    secrets = {'WANDB_API_KEY': 'f' * 40, 'AWS_ACCESS_KEY_ID': 'AKIASECRETSECRET', 'AWS_SECRET_ACCESS_KEY': 'w0nder'}
    run = subprocess.run([sys.executable, ROOT / 'benchmark.py', '--remote', shards, *TINY, '--wandb_name', 'x',
                          '--tensorboard', 'board', '--save_folder', 'checkpoints', '--results', 'results.jsonl'],
                         cwd=tmp_path, env={**os.environ, **secrets, 'WANDB_MODE': 'offline'}, capture_output=True)
    assert run.returncode == 0, run.stderr
    written = [run.stdout, run.stderr, *(path.read_bytes() for path in tmp_path.rglob('*') if path.is_file())]
    assert len(written) > 6 and (tmp_path / 'wandb').is_dir()
    for secret in secrets.values():
        assert not any(secret.encode() in content for content in written)
