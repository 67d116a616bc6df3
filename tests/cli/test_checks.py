"""What cannot run is refused before anything is built, in one line that names the flag."""
import os
from pathlib import Path

import pytest

from benchmark import main
from cli import checks, defaults
from cli.early_checks import refuse_early_training
from cli.early_data_checks import (
    refuse_early_conversion,
    refuse_early_encoding,
    refuse_early_evaluation,
    refuse_early_export,
)
from cli.folders import refuse_bad_results, refuse_unusable_folder
from cli.options import benchmark_parser, convert_parser, encode_parser, evaluate_parser, export_parser
from inputs.places import refuse_mistyped_address
from tests.forked_runs import on_small_disk
from tests.runs import TINY, settings_of
from tests.samples import write_shards

SYNTHETIC = ['--use_synth_data', *TINY]


@pytest.mark.parametrize('argv, words', [
    (TINY, ['--remote', '--use_synth_data']),
    ([*SYNTHETIC, '--remote', 'x'], ['--remote', '--use_synth_data', 'not both']),
    ([*SYNTHETIC, '--batch_size', '6', '--device_train_microbatch_size', '4'],
     ['--device_train_microbatch_size 4', 'use 3']),
    ([*SYNTHETIC, '--device_train_microbatch_size', '8'], ['size 8 does not divide --batch_size 4; use 4']),
    ([*SYNTHETIC, '--device_train_microbatch_size', 'auto'], ['--device_train_microbatch_size auto', 'GPU']),
    ([*SYNTHETIC, '--device_train_microbatch_size', 'two'], ['--device_train_microbatch_size: two is neither']),
    ([*SYNTHETIC, '--image_size', '100'], ['--image_size 100', 'multiple of 8', '96']),
    ([*SYNTHETIC, '--batch_size', '0'], ['--batch_size', '0']),
    ([*SYNTHETIC, '--num_workers', '-1'], ['--num_workers', '-1']),
    ([*SYNTHETIC, '--dollars_per_gpu_hour', 'nan'], ['--dollars_per_gpu_hour', 'nan']),
    ([*SYNTHETIC, '--precision', 'fp31'], ['--precision', 'fp31', 'fp32']),
    ([*SYNTHETIC, '--precision', 'amp_fp16'], ['--precision amp_fp16', 'GPU']),
    ([*SYNTHETIC, '--attention', 'xformers'], ['--attention xformers', 'sdpa']),
    ([*SYNTHETIC, '--attention', 'cudnn,fast'], ['--attention', 'cudnn,fast', 'cudnn,flash,efficient,math']),
    ([*SYNTHETIC, '--half_precision_norms'], ['--half_precision_norms', '--precision fp32']),
    ([*SYNTHETIC, '--cast_weights_once'], ['--cast_weights_once', '--precision fp32']),
    ([*SYNTHETIC, '--channels_last_norms'], ['--channels_last_norms is no flag; did you mean --']),
    ([*SYNTHETIC, '--compile_blocks'], ['--compile_blocks needs --compile']),
    ([*SYNTHETIC, '--compile', 'fastest'], ['--compile', 'fastest', 'reduce-overhead']),
    ([*SYNTHETIC, '--compile', 'reduce-overhead', '--device_train_microbatch_size', '2'],
     ['--compile reduce-overhead', '--device_train_microbatch_size']),
    ([*SYNTHETIC, '--profile', 'tests', '--max_duration', '9ba'], ['--profile tests', 'new folder']),
    ([*SYNTHETIC, '--profile', 'trace', '--max_duration', '4ba'], ['--profile trace', '--max_duration 5ba']),
    ([*SYNTHETIC, '--max_duration', '1ba'], ['--max_duration 1ba', '--warmup_batches 1']),
    ([*SYNTHETIC, '--save_folder', 'tests'], ['--save_folder tests', 'new']),
    ([*SYNTHETIC, '--results', '/nowhere/results.jsonl'], ['--results /nowhere/results.jsonl', 'No such file']),
    ([*SYNTHETIC, '--model_name', 'nobody/nothing'], ['--model_name nobody/nothing', 'hub', 'folder']),
    ([*SYNTHETIC, '--model_name', 'tests'], ['--model_name tests', 'unet']),
    ([*SYNTHETIC, '--learning_rate', '0'], ['--learning_rate', '0 is not a number above 0']),
    ([*SYNTHETIC, '--lr_warmup', '2ba', '--max_duration', '90sp'], ['--lr_warmup 2ba', '--max_duration', '90sp']),
    ([*SYNTHETIC, '--clip_grad_norm', 'inf'], ['--clip_grad_norm', 'inf']),
    ([*SYNTHETIC, '--ema_half_life', '9ba'], ['--ema_half_life 9ba', '--use_ema']),
    ([*SYNTHETIC, '--caption_drop', '1.1'], ['--caption_drop', '1.1']),
    ([*SYNTHETIC, '--load_weights', 'nowhere'], ['--load_weights nowhere', 'checkpoint', 'diffusers']),
    ([*SYNTHETIC, '--pretrained'], ['--model_name tiny', 'folder']),
    ([*SYNTHETIC, '--bach_size', '4'], ['--bach_size']),
    (['--remote', 'nowhere', *TINY], ['--remote nowhere is no folder', 'convert.py']),
    (['--remote', 's3://nowhere/x', *TINY], ['--remote s3://nowhere/x', 'could not be read']),
    (['--remote', 'SHARDS', *TINY, '--tokenizer', 'nobody/nothing'], ['--tokenizer nobody/nothing', 'folder']),
    (['--remote', 'SHARDS', *TINY, '--tokenizer', 'SHARDS'], ['--tokenizer', 'tokenizer.json']),
    (['--remote', 'SHARDS', *TINY, '--batch_size', '25'],
     ['--remote', '24 samples', '--batch_size 25; use --batch_size 24']),
    (['--remote', 'OTHER', *TINY], ['--remote', 'jpg of bytes', 'png of bytes']),
])
def test_bad_input_is_one_line_that_names_the_flag_and_its_value(argv, words, capfd, shards, tmp_path, results,
                                                                 monkeypatch):
    monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
    if 'OTHER' in argv:
        write_shards(tmp_path / 'other', [{'png': b'', 'text': ''}] * 9, {'png': 'bytes', 'text': 'str'})
    places = {'SHARDS': shards, 'OTHER': str(tmp_path / 'other')}
    argv = [places.get(argument, argument) for argument in argv]
    with pytest.raises(SystemExit) as exit:
        main(argv if '--results' in argv else [*argv, '--results', str(results)])
    out, err = capfd.readouterr()
    assert exit.value.code == 2 and out == '' and err.count('\n') == 1 and err.startswith('benchmark.py: error: '), err
    assert all(word in err for word in words), err


@pytest.mark.parametrize('flags, words', [
    (['--cache_limit', '1gb'], '--cache_limit 1gb has no cache to bound'),
    (['--cache_limit', 'much', '--local', '{}/cache'], '--cache_limit much is not a size'),
    (['--cache_limit', '5kb', '--local', '{}/cache'], 'holds fewer than 4 shards'),
    (['--max_bad_samples', '2'], '--max_bad_samples: 2 is not between 0 and 1'),
    (['--autoresume'], '--autoresume needs --save_folder'),
    (['--num_workers', '100000000'], '--num_workers 100000000 may fill the shared memory')])
def test_a_flag_that_cannot_work_is_one_line(shards, tmp_path, capfd, flags, words):
    with pytest.raises(SystemExit):
        main(['--remote', shards, *TINY, *(flag.format(tmp_path) for flag in flags)])
    line = capfd.readouterr().err
    assert words in line and line.count('\n') == 1


def test_a_batch_that_does_not_divide_over_the_devices_is_refused_with_a_better_one(monkeypatch, capfd):
    monkeypatch.setenv('WORLD_SIZE', '3')
    with pytest.raises(SystemExit):
        main([*SYNTHETIC, '--batch_size', '8'])
    assert '--batch_size 8 does not divide over 3 devices; use 6' in capfd.readouterr().err


def test_too_little_shared_memory_is_said_before_the_run(server, tmp_path, shards):
    argv = ['--remote', shards, *TINY, '--image_size', '256', '--num_workers', '16', '--results', tmp_path / 'results']
    line, output = on_small_disk(server, 1, '/dev/shm', argv, tmp_path / 'out')
    assert '--num_workers 16 may fill the shared memory' in line and not output


def test_ranks_whose_hosts_differ_take_the_fewest_loader_processes_and_one_length(monkeypatch):
    ranks = [(8, 80, '99ba'), (6, 60, '75ba')]
    monkeypatch.setattr(checks.dist, 'all_gather_object', lambda mine: ranks)
    for workers, measured, duration in ranks:
        mine = settings_of(*SYNTHETIC, '--num_workers', workers, '--measure_batches', measured, '--max_duration',
                           duration)
        agreed = defaults.agree_on_workers(mine).flags()
        assert [agreed[flag] for flag in ('num_workers', 'measure_batches', 'max_duration')] == [6, 60, '75ba']


def refusal(*argv) -> str:
    """What a run with these flags is refused with, before anything is built."""
    with pytest.raises(ValueError) as error:
        refuse_early_training(benchmark_parser('').parse_args([*SYNTHETIC, *map(str, argv)]))
    return str(error.value)


@pytest.mark.parametrize('flag', ['save_folder', 'tensorboard', 'profile'])
@pytest.mark.parametrize('folder, words', [
    ('FOLDER/file', 'is a file'), ('FOLDER/file/below', 'is a file'), ('FOLDER/gone', 'cannot be written'),
    ('/proc/below', 'cannot be written'), (f'FOLDER/{"x" * 300}', 'File name too long')])
def test_a_folder_that_cannot_be_made_is_refused_and_nothing_is_made(flag, folder, words, tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'gone').symlink_to(tmp_path / 'nowhere' / 'deeper')
    folder = folder.replace('FOLDER', str(tmp_path))
    line = refusal(f'--{flag}', folder, '--max_duration', '9ba', '--results', tmp_path / 'results')
    assert line.startswith(f'--{flag} {folder}') and words in line
    assert sorted(os.listdir(tmp_path)) == ['file', 'gone']


def test_a_check_of_what_can_be_made_leaves_nothing_behind(tmp_path):
    refuse_unusable_folder('--save_folder', str(tmp_path / 'new' / 'deeper'))
    refuse_bad_results(str(tmp_path / 'results'))
    assert not list(tmp_path.iterdir())


def test_records_that_would_go_to_a_pipe_are_refused(tmp_path):
    os.mkfifo(tmp_path / 'pipe')
    with pytest.raises(ValueError, match=f'^--results {tmp_path}/pipe is a pipe'):
        refuse_bad_results(str(tmp_path / 'pipe'))


def test_what_comes_after_the_end_of_the_run_is_said():
    settings = settings_of(*SYNTHETIC, '--max_duration', '3ep', '--use_ema', '--ema_start', '99ep', '--save_interval',
                           '1ep', '--eval_interval', '13ba', '--sample_interval', '1000ba')
    average, evaluation = checks.too_late(settings, 12, 4)
    assert average.startswith('--ema_start 99ep comes after the end') and 'no average' in average
    assert evaluation.startswith('--eval_interval 13ba is longer')
    settings = settings_of(*SYNTHETIC, '--max_duration', '12ba', '--use_ema', '--ema_start', '1dur', '--save_interval',
                           '49sp', '--eval_interval', '3ep')
    [saving] = checks.too_late(settings, 12, 4)
    assert saving.startswith('--save_interval 49sp is longer')


def test_a_flag_that_does_nothing_is_said_before_the_start():
    def said(*flags):
        return checks.without_effect(settings_of(*SYNTHETIC, *flags))

    assert said() == said('--tokenizer', 'x', '--save_folder', 'y') == []
    assert said('--save_interval', '2ba') == ['--save_interval 2ba does nothing without --save_folder: nothing is '
                                              'saved']
    assert said('--tokenizer', 'x') == ['--tokenizer x does nothing here: synthetic captions are tokens already']


def test_an_average_that_a_run_is_too_short_for_is_said_with_what_would_do():
    def said(*argv: str) -> list[str]:
        return checks.too_late(settings_of('--use_synth_data', *TINY, '--use_ema', *argv), 40, 4)
    [sentence] = said('--max_duration', '10ep', '--save_folder', 'kept')
    assert sentence.startswith('--ema_half_life 1000ba is more than a quarter of this run of 40 batches')
    assert sentence.endswith('give 4ba')
    assert said('--max_duration', '10ep') == []  # nothing uses it
    assert said('--max_duration', '10ep', '--save_folder', 'kept', '--ema_half_life', '10ba') == []


@pytest.mark.parametrize('warmup, is_told', [('20ba', False), ('21ba', True), ('10000ba', True), ('6ep', True)])
def test_a_warm_up_that_lasts_for_most_of_the_run_is_told(warmup, is_told):
    settings = settings_of('--use_synth_data', *TINY, '--max_duration', '40ba', '--lr_warmup', warmup)
    told = checks.too_late(settings, 40, 4)
    assert len(told) == is_told and all(f'--lr_warmup {warmup} is more than half' in line for line in told)


def test_an_out_within_a_dataset_and_shards_as_source_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('data/sub').mkdir(parents=True)
    Path('photos').mkdir()
    for name in ('claim.json', 'index.json'):
        Path('data', name).write_text('{"program": "convert.py"}')
    parser = convert_parser('')
    with pytest.raises(ValueError, match='OUT data/sub/x lies in the dataset .*/data; name a folder elsewhere'):
        refuse_early_conversion(parser.parse_args(['photos', 'data/sub/x']))
    with pytest.raises(ValueError, match='SOURCE data holds shards already; train on it with'):
        refuse_early_conversion(parser.parse_args(['data', 'x']))
    with pytest.raises(ValueError, match='CHECKPOINT data is a dataset'):
        refuse_early_export(export_parser('').parse_args(['data', 'x']))
    refuse_early_conversion(parser.parse_args(['photos', 'data-too']))


@pytest.mark.parametrize('flag', ['--remote', '--local'])
@pytest.mark.parametrize('out', ['photos/sub', 'photos/sub/below', './link/sub', 'photos/../photos/sub'])
def test_latents_within_the_images_that_they_are_made_of_are_refused_whoever_made_these(flag, out, tmp_path,
                                                                                        monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('photos').mkdir()
    Path('photos/index.json').write_text('{"version": 2, "shards": []}')  # without a claim of ours
    Path('link').symlink_to('photos')

    def refuse(out: str) -> None:
        refuse_early_encoding(encode_parser('').parse_args([flag, 'photos', '--out', out, '--results', 'r.jsonl']))
    with pytest.raises(ValueError) as error:
        refuse(out)
    assert str(error.value) == f'--out {out} lies in {flag} photos; name a folder elsewhere'
    refuse('photos-latents')


@pytest.mark.parametrize('flag, parser, refuse, argv', [
    ('OUT', convert_parser, refuse_early_conversion, ['FOLDER', 'PLACE']),
    ('OUT', export_parser, refuse_early_export, ['FOLDER/file', 'PLACE']),
    ('--out', encode_parser, refuse_early_encoding, ['--remote', 's3://b/x', '--out', 'PLACE']),
    ('--out', evaluate_parser, refuse_early_evaluation, ['FOLDER/file', 'FOLDER', '--out', 'PLACE'])])
@pytest.mark.parametrize('place, words', [
    ('FOLDER/file/x', 'cannot be a folder, because FOLDER/file is a file; name another'),
    ('/proc/x', 'cannot be written: No such file or directory; name another'),
    ('s3:/bucket/x', 'is an address with one slash; write s3://bucket/x, or ./s3:/bucket/x for a folder')])
def test_an_out_that_cannot_be_is_refused_early_and_nothing_is_made(flag, parser, refuse, argv, place, words, tmp_path):
    (tmp_path / 'file').touch()
    argv = [argument.replace('PLACE', place).replace('FOLDER', str(tmp_path)) for argument in argv]
    with pytest.raises(ValueError) as error:
        refuse(parser('').parse_args(argv))
    assert str(error.value) == f'{flag} {place} {words}'.replace('FOLDER', str(tmp_path))
    assert os.listdir(tmp_path) == ['file']


@pytest.mark.parametrize('flag', ['remote', 'eval_remote', 'local', 'save_folder', 'tensorboard', 'profile'])
def test_an_address_with_one_slash_is_refused(flag):
    source = [] if flag == 'remote' else ['--use_synth_data']
    argv = [*source, *TINY, '--max_duration', '9ba', f'--{flag}', 'gs:/bucket/x']
    with pytest.raises(ValueError, match=f'^--{flag} gs:/bucket/x is an address with one slash; write gs://bucket/x,'):
        refuse_early_training(benchmark_parser('').parse_args(argv))


def test_a_folder_that_is_there_under_the_name_of_such_an_address_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('gs:/bucket').mkdir(parents=True)
    refuse_mistyped_address('--save_folder', 'gs:/bucket')
    refuse_mistyped_address('--save_folder', './gs:/other')
    refuse_mistyped_address('--remote', 'dbfs:/bucket')


def test_weights_that_are_gone_are_missed_where_a_run_begins_and_not_where_it_goes_on(tmp_path):
    argv = ['--use_synth_data', *TINY, '--max_duration', '9ba', '--load_weights', str(tmp_path / 'gone')]
    parser = benchmark_parser('')
    with pytest.raises(ValueError, match='gone does not exist'):
        refuse_early_training(parser.parse_args(argv))
    refuse_early_training(parser.parse_args([*argv, '--save_folder', str(tmp_path / 'kept'), '--autoresume']))
