"""Claims about the record of a run, which is complete and without passwords, and about its summary for people."""
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from datetime import UTC, datetime

import pytest
import torch
from composer import Callback

import report
from benchmark import main
from sdbench.errors import DataError, redacted
from sdbench.flags.train import Train
from sdbench.records.metrics import COLUMNS
from sdbench.records.record import append_record, make_record
from sdbench.records.summary import run_summary
from tests.runs import SMALLEST, TINY, check_keys, one_error_line, settings_of


def lines_of(summary: str) -> list[str]:
    return [line for line in summary.splitlines() if 'waited' not in line]  # a busy machine adds a caution


def measured(**changes) -> dict:
    """Return the record of a measurement of 20 batches at 100 images/s, with changes."""
    return {'stage': 'train', 'status': 'complete', 'encoders': 'in_loop', 'device': 'X', 'device_type': 'cuda',
            'num_devices': 2, 'images_per_sec': 100.0, 'images_per_sec_per_device': 50.0, 'drift': 0.0,
            'batch_seconds_median': 0.1, 'batch_seconds_p10': 0.1, 'batch_seconds_p90': 0.1, 'measured_batches': 20,
            'data_wait_fraction': 0.0, 'peak_memory_gib': 1.0, 'device_train_microbatch_size': 4, 'mfu': None,
            'tflops_per_sec_per_device': 1.0, 'queue_batches': 0, 'trained_batches': 23, 'trained_epochs': 0,
            'first_batch': 0, 'loss': 0.5, 'eval_loss': None, 'eval_batch': None, 'gpu_power_watts_mean': None,
            'joules_per_image': None} | changes


def test_no_flag_of_a_training_has_the_key_of_a_figure():
    assert not {field.name for field in fields(Train)} & COLUMNS.keys()


def test_a_measurement_prints_its_summary_and_writes_only_its_record(tmp_path, capsys):
    main(['--use_synth_data', '--use_ema', *TINY])
    output, errors = capsys.readouterr()
    [file] = tmp_path.iterdir()
    assert file.name == 'results.jsonl'
    record = json.loads(file.read_text())
    check_keys(record, 'benchmark.py')
    assert record.keys() >= {'date', 'command', 'git_commit', 'device', 'num_nodes', 'encoders', 'trained_epochs'}
    expected = {'dataset': 'synthetic', 'use_ema': True, 'num_devices': 1, 'mfu': None,
                'device_type': 'cpu', 'warmup_batches': 1, 'measured_batches': 3}
    assert {key: record[key] for key in expected} == expected
    assert record['versions']['torch'] == torch.__version__.split('+')[0]
    assert 0 < record['loss'] < 5
    assert 0.1 < record['peak_memory_gib'] < 24
    assert record['images_per_sec_per_device'] == record['images_per_sec'] > 0  # on one device
    assert record['tflops_per_sec_per_device'] == pytest.approx(
        record['images_per_sec_per_device'] * record['tflops_per_image'])

    # The output for people has the summary and no JSON, and no costs because nobody trains the tiny model for real.
    assert SMALLEST in errors
    *_, trained, loss, caution, last = lines_of(output)
    assert (trained, loss) == ('trained         up to batch 4', f'loss            {record["loss"]:.3g}')
    assert 'only 3 measured batches' in caution and '--measure_batches 20' in caution
    assert 'results.jsonl' in last
    assert '{' not in output and 'GPU' not in output


class UntilTheNextSecond(Callback):
    """Waits at the start of a training until the next second, because records have times in whole seconds."""

    def fit_start(self, state, logger) -> None:
        self.began = datetime.now(UTC)
        while datetime.now(UTC).replace(microsecond=0) <= self.began:
            time.sleep(0.01)


def test_a_record_has_the_time_at_which_its_run_began():
    wait = UntilTheNextSecond()
    record = main(['--use_synth_data', *TINY], [wait])
    assert datetime.fromisoformat(record['date']) <= wait.began


def test_a_training_ends_with_what_was_learned_where_it_is_and_what_to_do_with_it(results, smallest_model, capfd):
    flags = ['--use_synth_data', '--use_ema', *TINY[:-2], '--max_duration', '3ba', '--save_folder', 'kept',
             '--results', '-', '--model_name', smallest_model, '--pretrained']
    record = main(flags)
    *lines, last = lines_of(capfd.readouterr().out)
    assert json.loads(last) == record
    assert not results.exists()
    assert [line.split()[0] for line in lines] == ['trained', 'loss', 'checkpoint', 'next', 'images/s', 'wait']
    assert lines[3].endswith(' python export.py kept kept-model')

    # A model with random encoders cannot generate images, so its export is not recommended.
    random_encoders = settings_of(*flags, '--no-pretrained')
    assert 'export.py' not in run_summary(record, random_encoders)


@pytest.mark.parametrize('changed, why, fix', [
    ({'drift': 0.465}, '+46.5%', '--warmup_batches'),
    ({'measured_batches': 30, 'queue_batches': 16}, 'only 30 measured batches', '--measure_batches 80'),
    ({'status': 'profiled'}, '--profile', '')])
def test_an_unreliable_speed_has_one_caution_with_a_fix_and_no_days(changed, why, fix):
    text = run_summary(measured(**changed), settings_of('--use_synth_data'))
    [caution] = [line for line in text.splitlines() if line.startswith('caution  ')]
    assert why in caution and fix in caution
    assert 'full training' not in text
    assert 'caution' not in run_summary(measured(drift=0.09), settings_of('--use_synth_data'))


@pytest.mark.parametrize('changed, heading, figures', [
    ({'first_batch': 1200, 'trained_batches': 2000}, 'resumed ', ['1,200']),
    ({'trained_batches': 2000}, 'no EMA ', ['--ema_start 2001ba']),
    ({'eval_loss': 0.12345, 'eval_batch': 2000, 'eval_samples': 300}, 'eval loss ', ['0.1235', '300', '2,000']),
    ({'images_per_sec': None, 'status': 'interrupted'}, 'no speed ', []),
])
def test_a_line_of_the_summary_is_printed_only_if_its_figures_are_known(changed, heading, figures):
    for length in ('--measure_batches', '3000'), ('--max_duration', '3000ba'):
        settings = settings_of('--use_synth_data', '--use_ema', '--ema_start', '2001ba', *length)
        [line] = [line for line in run_summary(measured(**changed), settings).splitlines() if line.startswith(heading)]
        assert [figure for figure in figures if figure not in line] == []
        assert heading not in run_summary(measured(trained_batches=2001), settings)


def test_the_summary_explains_a_speed_by_wait_for_data_mfu_and_power():
    text = run_summary(measured(data_wait_fraction=0.23, mfu=0.18, gpu_power_watts_mean=412.4, joules_per_image=10.27),
                       settings_of('--use_synth_data'))
    for figure in ('23.0%', '--num_workers', '18.0%', '412 W', '10.3 J'):
        assert figure in text


def test_a_record_that_cannot_be_written_is_printed(tmp_path, capsys):
    with pytest.raises(DataError, match=f'--results {tmp_path} could not be written'):
        append_record({'name': 'a'}, 'summary', str(tmp_path))
    assert capsys.readouterr().out == 'summary\n{"name": "a"}\n'


def append_records(path: str, name: str):
    for index in range(20):
        append_record({'name': name, 'index': index, 'text': name * 200_000}, '', path)


def test_runs_that_append_to_one_file_concurrently_keep_every_record_complete(results, capfd):
    results.write_text('{"cut by a full di')
    with ProcessPoolExecutor(3, multiprocessing.get_context('fork')) as writers:
        list(writers.map(append_records, [str(results)] * 3, 'abc'))
    cut, *lines = results.read_text().splitlines()
    records = [json.loads(line) for line in lines if line]  # two processes may end the cut line, so one line is empty
    assert cut == '{"cut by a full di'
    assert len(records) == 60
    assert {(record['name'], record['index']) for record in records} == {(n, i) for n in 'abc' for i in range(20)}


@pytest.mark.parametrize('text', [
    's3://key:sec/ret@bucket/a', 's3://key:sec@ret@bucket', 'https://secret@host/a', 'https://a/b?sig=secret&x=y',
    'AccountName=x;AccountKey=sec/ret+==;EndpointSuffix=y', 'Error at s3://bucket: SharedAccessSignature=secret'])
def test_no_form_of_password_stays_in_a_text_or_a_record(text, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', '--remote', text])
    record = make_record('train', replace(settings_of('--use_synth_data'), remote=text), {})
    for told in (redacted(text), record['command'], record['remote']):
        assert 'sec' not in told and 'ret' not in told
        assert '***' in told


@pytest.mark.parametrize('text', ['s3://bucket/path, a@b, key: x, 5 = 6', '--caption_weights key=2'])
def test_what_is_no_password_stays(text):
    assert redacted(text) == text


def test_a_run_that_ends_within_its_warmup_is_unmeasured_and_the_report_shows_it(results, capfd):
    record = main(['--use_synth_data', *TINY, '--max_duration', '1ba'])
    assert (record['status'], record['images_per_sec']) == ('unmeasured', None)
    capfd.readouterr()
    report.main([str(results), '--compare'])
    assert 'unmeasured' in capfd.readouterr().out


def test_the_cost_is_for_stable_diffusion_2_by_default_and_missing_on_a_cpu():
    def cost(*flags: str, **changes) -> str:
        text = run_summary(measured(**changes), settings_of('--use_synth_data', *flags))
        return text.partition('full training   ')[2]
    for figure in ('2,867,200,000 images', '331.9 days on 2 GPUs', '15,929 GPU-hours', '$31,858'):
        assert figure in cost()
    assert cost('--model_name', 'tiny') == cost(device_type='cpu') == ''


def test_a_trace_holds_three_batches_across_epochs_and_its_run_is_not_reliable(tmp_path, shards, results, capfd):
    """Epochs have three batches. A run resumes in the middle of an epoch, and traces the last three of its five."""
    argv = ['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--save_folder', 'kept',
            '--autoresume', '--max_duration']
    folder = tmp_path / 'trace'
    for number, duration in enumerate(['1ba', '6ba', '11ba']):
        record = main([*argv, duration, *(['--profile', str(folder)] if number else [])])
        traces = list(folder.glob('rank0.*.pt.trace.json'))  # TensorBoard finds traces by this suffix
        assert len(traces) == number
    names = {event['name'] for event in json.loads(traces[0].read_text())['traceEvents']}
    assert len([name for name in names if name.startswith('ProfilerStep#')]) == 3
    assert {'aten::convolution', 'Optimizer.step#AdamW.step'} <= names
    assert record['status'] == 'profiled'
    capfd.readouterr()
    report.main([str(results)])
    assert 'profiled' in capfd.readouterr().out
    line = one_error_line([*argv, '15ba', '--profile', folder], capfd)
    assert 'needs 5 batches' in line and 'only 4 batches left' in line
