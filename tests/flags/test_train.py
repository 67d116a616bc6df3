"""What cannot be is refused with its flag, its value and the remedy; what was not given follows from the machine."""

import pytest
import torch
from composer.utils import dist

from benchmark import main
from sdbench.costs import TRAINING_IMAGES
from sdbench.exits import one_line_errors
from sdbench.flags.commands import Convert, Encode
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.training.resolve import broadcast_from_rank_0, resolve_encoding_defaults
from tests.runs import TINY, settings_of

SYNTHETIC = ['--use_synth_data', *TINY]


def refused(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as exit:
        parse(Train, '', argv, 'benchmark.py')
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert error.count('\n') == 1
    return error


@pytest.mark.parametrize('flags, words', [
    ([], 'give one of --remote, --use_synth_data and --use_synth_latents'),
    (['--use_synth_data', '--remote', 'x'], 'give only one of --remote, --use_synth_data'),
    ([*SYNTHETIC, '--batch_size', '6', '--device_train_microbatch_size', '4'], '--device_train_microbatch_size 4 does '
     'not divide the 6 images that a device gets of --batch_size 6; use 3'),
    ([*SYNTHETIC, '--device_train_microbatch_size', 'two'], '--device_train_microbatch_size: two is not'),
    ([*SYNTHETIC, '--image_size', '100'], '--image_size 100 is not a multiple of 8; use 96'),
    ([*SYNTHETIC, '--learning_rate', '0'], '--learning_rate: 0 is not a number above 0'),
    ([*SYNTHETIC, '--dollars_per_gpu_hour', 'nan'], '--dollars_per_gpu_hour: nan is not an amount'),
    ([*SYNTHETIC, '--caption_drop', '10'], '--caption_drop: 10 is not a share between 0 and 1'),
    ([*SYNTHETIC, '--max_duration', '50'], '--max_duration: 50 is not a time such as 5000ba or 2ep'),
    ([*SYNTHETIC, '--save_interval', '0.5dur', '--max_duration', '0.5dur'], '0.5dur is not a time such as 5000ba'),
    ([*SYNTHETIC, '--random_flip', '--use_synth_latents', '--no-use_synth_data'], '--random_flip mirrors images'),
    ([*SYNTHETIC, '--compile_blocks'], '--compile_blocks needs --compile'),
    ([*SYNTHETIC, '--autoresume'], '--autoresume needs --save_folder'),
    ([*SYNTHETIC, '--sample_prompts', 'README.md'], '--sample_prompts README.md needs a VAE that can decode'),
    ([*SYNTHETIC, '--sample_prompts', 'nowhere'], '--sample_prompts nowhere is no file'),
    ([*SYNTHETIC, '--dry_run', '--loader_only'], '--loader_only has no training for --dry_run or --profile'),
    ([*SYNTHETIC, '--results', 'tests'], '--results tests is no file that can be written'),
    ([*SYNTHETIC, '--results', '/nowhere/results.jsonl'], '--results /nowhere/results.jsonl is no file that can be'),
])
def test_what_cannot_be_is_one_line_that_names_the_flag_its_value_and_the_remedy(flags, words, capsys):
    assert words in refused(capsys, *flags)


def test_a_batch_that_does_not_divide_over_the_devices_is_refused_with_a_better_one(monkeypatch, capsys):
    monkeypatch.setenv('WORLD_SIZE', '3')
    assert '--batch_size 8 does not divide over 3 devices; use 6' in refused(capsys, *SYNTHETIC, '--batch_size', '8')
    assert 'use 3' in refused(capsys, *SYNTHETIC, '--batch_size', '2')


@pytest.mark.parametrize('flags, words', [
    (['--device_train_microbatch_size', 'auto'], '--device_train_microbatch_size auto needs a GPU; give a number, '
     'such as 4'),
    (['--compile', 'reduce-overhead', '--device_train_microbatch_size', '2'], 'use --device_train_microbatch_size 4')])
def test_what_this_machine_cannot_do_is_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        settings_of(*SYNTHETIC, *flags)


@pytest.mark.parametrize('attention, version, is_faulty', [
    ('cudnn', 91500, True), ('cudnn', 91501, False), ('flash', 90501, False)])
def test_cudnns_attention_is_refused_in_the_versions_that_have_faults(as_on_a_gpu, monkeypatch, attention, version,
                                                                      is_faulty):
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: version)
    argv = [*SYNTHETIC, '--attention', attention, '--precision', 'amp_bf16']
    if not is_faulty:
        settings_of(*argv)
        return
    with pytest.raises(ValueError, match='--attention cudnn needs cuDNN 9.15.1 .*leave it out'):
        settings_of(*argv)


def test_more_ranks_than_gpus_are_refused(as_on_a_gpu, monkeypatch):
    as_on_a_gpu(count=2)
    monkeypatch.setattr(dist, 'get_local_world_size', lambda: 4)
    with pytest.raises(ValueError, match='composer -n 4 is more than the GPUs of this machine; use -n 2'):
        settings_of(*SYNTHETIC)


def test_what_was_not_given_follows_from_the_machine(as_on_a_gpu, monkeypatch):
    as_on_a_gpu(count=0)
    here = settings_of(*SYNTHETIC, '--use_ema')
    assert (here.ema_half_life, here.max_duration, here.training_images) == ('1000ba', '4ba', None)
    assert (here.precision, here.encoder_precision, here.channels_last) == ('fp32', 'fp32', False)
    assert here.device_train_microbatch_size == 4
    assert here.measures
    as_on_a_gpu(count=8)
    monkeypatch.setenv('WORLD_SIZE', '8')
    on_gpus = settings_of('--use_synth_data', '--compile')
    assert on_gpus.searches_microbatch
    assert on_gpus.channels_last
    assert on_gpus.compile_blocks
    assert (on_gpus.precision, on_gpus.encoder_precision) == ('amp_bf16', 'bf16')
    assert not settings_of('--use_synth_data', '--compile', 'max-autotune-no-cudagraphs', '--no-compile_blocks'
                           ).compile_blocks
    assert not settings_of('--use_synth_data', '--no-channels_last').channels_last


def test_a_length_that_is_given_is_trained_and_all_of_it_after_the_warm_up_measured(tmp_path):
    given = settings_of(*SYNTHETIC[:-2], '--max_duration', '40ba', '--save_folder', tmp_path / 'x')
    assert (given.max_duration, given.measure_batches, given.measures) == ('40ba', None, False)


def test_a_dry_run_of_a_training_whose_length_is_given_costs_its_images(shards):
    sized = ['--dry_run', '1', '--batch_size', '5']
    assert settings_of(*sized, '--max_duration', '2000ba').training_images == 10_000
    assert settings_of(*sized, '--remote', shards, '--max_duration', '3ep').training_images == 3 * 20  # of 24
    assert settings_of(*sized, '--max_duration', '3ep').training_images == TRAINING_IMAGES
    assert settings_of(*sized).training_images == TRAINING_IMAGES


def test_ranks_whose_hosts_differ_take_what_the_first_has_but_for_their_own_folders(monkeypatch):
    lengths = {6: '75ba', 8: '99ba'}  # by the processes of the loader
    ranks = [settings_of(*SYNTHETIC, '--num_workers', workers, '--max_duration', length, '--local', f'cache-{workers}')
             for workers, length in lengths.items()]
    monkeypatch.setattr(dist, 'all_gather_object', lambda mine: ranks)
    for mine in ranks:
        together = broadcast_from_rank_0(mine)
        assert (together.num_workers, together.max_duration) == (6, '75ba')
        assert together.local == mine.local


def test_what_starts_processes_of_its_own_is_refused_under_a_launcher(monkeypatch, capsys):
    monkeypatch.setenv('LOCAL_RANK', '0')
    for kind, argv in ((Encode, ['--remote', 'shards', '--out', 'x']), (Convert, ['photos', 'x'])):
        with pytest.raises(SystemExit):
            parse(kind, '', argv)
        assert 'start it with python, not with a launcher' in capsys.readouterr().err


def test_the_devices_that_encode_share_the_cores_and_a_clusters_precision_is_not_guessed(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr('os.sched_getaffinity', lambda process: range(16))
    flags = ['--remote', 'shards', '--out', 'x']
    as_on_a_gpu(count=0)
    with pytest.raises(ValueError, match='--ray auto needs --encoder_precision'):
        resolve_encoding_defaults(parse(Encode, '', [*flags, '--ray', 'auto']))
    as_on_a_gpu(count=8)
    assert resolve_encoding_defaults(parse(Encode, '', flags)).num_workers == 2


def test_a_local_without_a_remote_is_the_data():
    here = settings_of('--local', 'shards', *TINY)
    assert (here.remote, here.local) == ('shards', None)
    there = resolve_encoding_defaults(parse(Encode, '', ['--local', 'shards', '--out', 'x']))
    assert (there.remote, there.local, there.num_workers_by_default) == ('shards', None, True)


def test_a_dry_run_speaks_of_gpus_without_one_and_without_data(monkeypatch):
    here = settings_of('--dry_run', '8', '--use_ema')
    assert (here.dry_run, here.use_synth_data, here.precision) == (8, True, 'amp_bf16')
    assert settings_of('--dry_run').dry_run == 1
    monkeypatch.setenv('WORLD_SIZE', '4')
    assert settings_of('--dry_run').dry_run == 4


@pytest.mark.parametrize('error, status, line', [
    (ValueError('--x 1 is bad'), 2, '--x 1 is bad'), (FileNotFoundError('no such file'), 1, 'no such file; it stays'),
    (KeyboardInterrupt(), 130, 'interrupted; it stays')])
def test_a_command_ends_in_one_line_with_its_status(error, status, line, capsys):
    with pytest.raises(SystemExit) as exit, one_line_errors('x.py', 'it stays'):
        raise error
    assert exit.value.code == status
    assert capsys.readouterr().err == f'x.py: error: {line}\n'


def test_an_unexpected_error_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), one_line_errors('x.py'):
        raise ZeroDivisionError


def test_what_a_run_of_the_program_is_given_wrong_ends_in_one_line(capfd, shards):
    for argv, words in (
            ([*SYNTHETIC, '--model_name', 'nobody/nothing'], '--model_name nobody/nothing is no folder here, '
             'and the hub has no such repository or cannot be reached; check the name and the network\n'),
            (['--remote', 'nowhere', *TINY], '--remote nowhere'),
            ([*SYNTHETIC, '--precision', 'amp_fp16'], '--precision amp_fp16 needs a GPU, and this machine has none; '
             'give --precision fp32'),
            (['--remote', shards, *TINY, '--batch_size', '25'], 'holds 24 samples, fewer than --batch_size 25')):
        with pytest.raises(SystemExit) as exit:
            main(argv)
        error = capfd.readouterr().err
        assert exit.value.code == 2, error
        assert error.count('\n') == 1, error
        assert words in error, error
