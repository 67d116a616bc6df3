"""The record of a run: whole, printed last, and without secrets."""
import contextlib
import json
import multiprocessing
import os
import pty
import sys

import pytest
import torch

import report
from benchmark import main
from inputs.errors import DataError
from measuring.record import keep, redacted, summary, training_settings
from models.loading import SD2_BASE
from tests.forked_runs import run_program
from tests.runs import TINY, check_record, settings_of


def test_a_synthetic_run_appends_its_record_and_prints_it_last(results, capfd):
    for runs in (1, 2):
        main(['--use_synth_data', '--use_ema', *TINY, '--results', str(results)])
        lines = capfd.readouterr().out.strip().splitlines()
        assert results.read_text().splitlines()[-1] == lines[-1] and len(results.read_text().splitlines()) == runs
    record = json.loads(lines[-1])
    check_record(record)
    assert (record['dataset'], record['use_ema'], record['num_devices'], record['mfu']) == ('synthetic', True, 1, None)
    assert lines[-4:-2] == [
        'trained         up to batch 4',
        f'loss            {record["loss"]:.3g}, mean of the measured batches {record["loss_mean"]:.3g}']
    assert lines[-2].startswith('caution         only 3 measured batches: use --measure_batches 20 or more')
    assert 'GPU' not in ''.join(lines[-9:-1])  # nobody trains tiny for real


@pytest.mark.parametrize('changed, sentence', [
    ({'drift': 0.465}, 'drift +46.5%: the start was slow; use more --warmup_batches'),
    ({'drift': -0.2}, 'drift -20.0%: the speed has not settled; use more --measure_batches'),
    ({'measured_batches': 7}, 'only 7 measured batches: use --measure_batches 20 or more'),
    ({'measured_batches': 7, 'drift': -0.2}, 'only 7 measured batches: use --measure_batches 20 or more'),
    ({'measured_batches': 30, 'queue_batches': 16}, 'only 30 measured batches: use --measure_batches 80 or more'),
    ({'status': 'profiled'}, 'these figures include the cost of the trace'),
])
def test_a_speed_that_should_not_be_trusted_says_so_with_one_remedy_and_has_no_days(changed, sentence):
    text = summary(measured(**changed), 864_000_000, 2.0)
    assert text.count('caution  ') == 1 and f'caution         {sentence}' in text
    assert 'full training' not in text
    assert 'caution' not in summary(measured(drift=0.09), 864_000_000, 2.0)


@pytest.mark.parametrize('changed, line', [
    ({'data_wait_fraction': 0.23}, 'wait for data   23.0% of the time; more --num_workers, smaller images or latents'),
    ({'first_batch': 1200, 'trained_batches': 2000}, 'resumed         after batch 1,200'),
    ({'trained_epochs': 10}, 'epochs          10'),
    ({'mfu': 0.18}, 'of the peak     18.0%'),
    ({'checkpoint_seconds': 40.2}, 'checkpoint      40 s beside the batches'),
    ({'evaluation_seconds': 40.2}, 'evaluation      40 s beside the batches'),
    ({'sampling_seconds': 40.2}, 'sampling        40 s beside the batches'),
    ({'eval_loss': 0.12345, 'eval_batch': 2000}, 'held-out loss   0.1235 after batch 2,000'),
])
def test_a_line_of_the_summary_is_there_where_its_figure_is(changed, line):
    assert line in summary(measured(**changed), None, 2.0)
    assert line not in summary(measured(), None, 2.0)


def printed_on_a_terminal(path: str) -> list[str]:
    """The lines that `keep` prints on a terminal."""
    ours, terminal = pty.openpty()
    with os.fdopen(ours, 'rb', buffering=0) as screen:
        with os.fdopen(terminal, 'w') as stdout, contextlib.redirect_stdout(stdout):
            with contextlib.suppress(DataError):
                keep({'name': 'a'}, 'summary', path)
            print('the end', flush=True)
            printed = b''
            while not printed.endswith(b'the end\r\n'):  # a terminal gives what it has so far
                printed += screen.read(1000)
            return printed.decode().splitlines()[:-1]


def test_a_terminal_is_told_where_the_record_is_and_a_pipe_gets_the_record(results, tmp_path, capsys):
    assert printed_on_a_terminal(str(results)) == ['summary', f'record          appended to {results}']
    assert results.read_text() == '{"name": "a"}\n'
    assert printed_on_a_terminal(str(tmp_path)) == ['summary', '{"name": "a"}'], 'it was kept nowhere else'
    keep({'name': 'a'}, 'summary', str(results))
    assert capsys.readouterr().out == 'summary\n{"name": "a"}\n'


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


@pytest.mark.parametrize('flags, by_default', [([], True), (['--num_workers', '0'], False)])
def test_a_record_says_whether_the_program_chose_its_workers_and_on_what_it_ran(flags, by_default):
    settings = settings_of('--use_synth_data', *flags)
    record = training_settings(settings, latents=False)
    assert (record['num_workers'], record['num_workers_by_default']) == (0, by_default)
    assert record['device_type'] == ('cuda' if torch.cuda.is_available() else 'cpu')


def test_passwords_and_signatures_in_urls_stay_out_of_records(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', '--remote', 's3://key:secret@bucket/a?X-Sig=abc&b=c', 'a@b', '?'])
    record = training_settings(settings_of('--use_synth_data'), latents=False)
    assert record['command'] == "benchmark.py --remote 's3://***@bucket/a?***' a@b '?'"


@pytest.mark.parametrize('text', [
    's3://key:sec/ret@bucket/a', 's3://key:sec@ret@bucket', 'https://secret@host/a', "'s3://key:sec'ret/@bucket'",
    'DefaultEndpointsProtocol=https;AccountName=x;AccountKey=sec/ret+==;EndpointSuffix=y', 'https://a/b?sig=secret&x=y',
    'Error at s3://key:sec/ret@bucket: SharedAccessSignature=secret'])
def test_no_form_of_password_is_left_in_a_text(text):
    assert 'sec' not in redacted(text) and 'ret' not in redacted(text) and '***' in redacted(text)
    assert redacted('s3://bucket/path, a@b, key: x, 5 = 6') == 's3://bucket/path, a@b, key: x, 5 = 6'


@pytest.mark.long
def test_no_secret_of_the_environment_is_written_down(server, tmp_path, shards):
    secrets = {'WANDB_API_KEY': 'f' * 40, 'AWS_ACCESS_KEY_ID': 'AKIASECRETSECRET', 'AWS_SECRET_ACCESS_KEY': 'w0nder'}
    argv = ['--remote', shards, *TINY, '--wandb_name', 'x', '--tensorboard', 'board', '--save_folder', 'checkpoints',
            '--results', 'results.jsonl']
    folder = tmp_path / 'run'
    code, _, errors = run_program(server, folder, main, argv, WANDB_MODE='offline', **secrets)
    assert code == 0, errors
    written = [path.read_bytes() for path in folder.rglob('*') if path.is_file()]  # what was printed is among them
    assert len(written) > 6 and (folder / 'wandb').is_dir()
    for secret in secrets.values():
        assert not any(secret.encode() in content for content in written)


def test_a_run_that_ends_within_its_warmup_is_marked_and_leaves_the_others_to_be_reported(results, capfd):
    flags = ['--use_synth_data', *TINY, '--results', str(results)]
    main(flags)
    argv = [*flags, '--max_duration', '1sp', '--measure_batches', '1']
    record = main(argv)
    assert (record['status'], record['images_per_sec']) == ('unmeasured', None)
    assert 'no batch was measured: the run was over before the clock started' in capfd.readouterr().out
    report.main([str(results), '--compare'])
    assert 'unmeasured' in capfd.readouterr().out


def measured(**changes) -> dict:
    """A record as `summary` takes it: 20 batches at 100 images/s."""
    return {'images_per_sec': 100.0, 'images_per_sec_per_device': 50.0, 'num_devices': 2, 'device': 'X', 'drift': 0.0,
            'batch_seconds_median': 0.1, 'batch_seconds_p10': 0.1, 'batch_seconds_p90': 0.1, 'measured_batches': 20,
            'data_wait_fraction': 0.0, 'peak_memory_gib': 1.0, 'device_train_microbatch_size': 4, 'mfu': None,
            'tflops_per_sec_per_device': 1.0, 'checkpoint_seconds': 0.0, 'evaluation_seconds': 0.0,
            'sampling_seconds': 0.0, 'measure_batches': 20, 'num_workers': 0, 'num_nodes': 1, 'encoders': 'in_loop',
            'queue_batches': 0, 'trained_batches': 23, 'trained_epochs': 0, 'first_batch': 0,
            'loss': 0.5, 'loss_mean': 0.6} | changes


@pytest.mark.parametrize('gpu, last_line', [
    (False, 'full training   training on 864,000,000 images would take 100.0 days on this CPU'),
    (True, 'full training   training on 864,000,000 images would take 100.0 days on 2 GPUs, 4,800 GPU-hours, $9,600')])
def test_a_cpu_has_no_price_in_gpu_hours(as_on_a_gpu, gpu, last_line):
    as_on_a_gpu(count=2 if gpu else 0)
    assert summary(measured(), 864_000_000, 2.0).splitlines()[-1] == last_line


@pytest.mark.parametrize('model, flags, images', [
    ('tiny', [], None), ('tiny', ['--training_images', '5'], 5), (SD2_BASE, [], 2_867_200_000),
    ('a/b', ['--training_images', '5'], 5)])
def test_the_cost_is_that_of_stable_diffusion_2_unless_another_is_asked_for(model, flags, images):
    settings = settings_of('--use_synth_data', '--model_name', model, *flags)
    assert settings.training_images == images
