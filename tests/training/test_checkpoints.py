"""A killed run resumes exactly from its newest complete checkpoint, and loading a checkpoint never runs code."""
import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from composer import Callback, Trainer

from benchmark import StableDiffusion, main
from export import main as export
from sdbench.inputs.tokenizer import build_tokenizer
from sdbench.training.checkpoints import (
    LOCK_FILE,
    RECORD,
    checkpoints_in,
    load_checkpoint,
    locked_save_folder,
    newest_checkpoint,
)
from tests.forked_runs import RUN, on_small_disk, run
from tests.runs import TINY, Weights, assert_equal, assert_same_training, failed, one_error_line
from tests.samples import Hostile, good, write_several_captions

# (moment, batch) of a kill: at the start of a batch, while its checkpoint is written, during its optimizer step, or
# before latest-rank0.pt points to its checkpoint. Checkpoints are at batches 3, 6 (the end of an epoch), 9 and 12.
EVERY_3_BATCHES = [('start', 2), ('link', 6), ('write', 9), ('update', 11)]
EVERY_EPOCH = [('start', 4), ('update', 11)]
SECOND_PHASE = ('--remote SHARDS --load_weights FIRST --image_size 32 --max_duration 4ba --save_interval 1ba '
                '--caption_drop 0.5 --snr_gamma 5 --eval_remote HELD_OUT --eval_interval 2ba --num_workers 0 '
                '--model_name MODEL --pretrained --sample_prompts PROMPTS --sample_interval 2ba')


@pytest.mark.parametrize('flags, ranks, kills', [
    pytest.param('--remote SEVERAL --caption_weights short=1 long=2 --save_interval 3ba --max_duration 9ba', 1,
                 [('write', 9)], id='as it saves'),
    pytest.param('--use_synth_data --save_interval 3ba', 1, [('update', 11)], marks=pytest.mark.long, id='no data'),
    pytest.param('--remote SHARDS --save_interval 3ba', 2, EVERY_3_BATCHES, marks=pytest.mark.long, id='two ranks'),
    pytest.param('--remote SHARDS --save_interval 1ep', 1, EVERY_EPOCH, marks=pytest.mark.long, id='saved at epochs'),
    pytest.param(SECOND_PHASE, 2, [('start', 2)], marks=pytest.mark.long, id='a second phase')])
def test_a_run_that_is_killed_at_any_moment_resumes_exactly(
        server, tmp_path, shards, several_captions, held_out, smallest_model, flags, ranks, kills):
    places = {'SHARDS': shards, 'SEVERAL': several_captions, 'HELD_OUT': held_out, 'FIRST': str(tmp_path / 'first'),
              'MODEL': smallest_model, 'PROMPTS': str(tmp_path / 'prompts')}
    if flags == SECOND_PHASE:
        (tmp_path / 'prompts').write_text('a cat')
        main(['--use_synth_data', '--use_ema', *TINY, '--model_name', smallest_model, '--pretrained', '--save_folder',
              places['FIRST'], '--results', '-'])
    argv = [*RUN, *(places.get(word, word) for word in flags.split())]
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    assert run(server, ranks, argv, whole) == [0] * ranks, (whole / 'log').read_text()
    for kill in kills:
        codes = run(server, ranks, argv, killed, kill)
        assert -signal.SIGKILL in codes, (kill, codes, (killed / 'log').read_text())
        shutil.rmtree(places['FIRST'], ignore_errors=True)  # a resumed run does not need it
    assert run(server, ranks, argv, killed) == [0] * ranks, (killed / 'log').read_text()
    records = [json.loads((place / 'results.jsonl').read_text().splitlines()[-1]) for place in (whole, killed)]
    assert_same_training(killed / 'checkpoints', whole / 'checkpoints')
    for key in ('evaluations', 'eval_loss', 'eval_batch', 'skipped_batches'):  # these cover the whole training
        assert records[0][key] == records[1][key]
    images = {path.name for path in (killed / 'checkpoints-samples').glob('*/*')}  # the other rank waits for them
    assert images == ({'ba0.png', 'ba2.png', 'ba4.png'} if flags == SECOND_PHASE else set())
    assert (records[0]['sampling_seconds'] > 0) == bool(images)


def test_a_full_disk_leaves_the_last_complete_checkpoint(server, tmp_path, results):
    disk = tmp_path / 'disk'
    argv = ['--use_synth_data', '--use_ema', *TINY, '--save_interval', '1ba', '--save_folder', disk / 'kept',
            '--results', results]
    line = on_small_disk(server, 5, disk, argv, tmp_path / 'out')
    assert 'a disk is full' in line
    assert json.loads(results.read_text())['status'] == 'failed'
    kept = tmp_path / 'out' / 'disk' / 'kept'
    assert [Path(path).name for path in checkpoints_in(str(kept))] == ['ep0-ba1-rank0.pt']
    assert not list(kept.glob('.*.unfinished'))
    record = main([*argv[:-4], '--save_folder', str(kept), '--autoresume'])  # now the disk has room
    assert (record['first_batch'], record['status']) == (1, 'complete')


class ReadOnlyUntil(Callback):
    """Makes the store refuse writes from the start of a training until a batch; None until its end."""

    def __init__(self, store, batch: int | None):
        self.store = store
        self.batch = batch

    def fit_start(self, state, logger):
        self.store.is_read_only = True

    def batch_start(self, state, logger):
        if self.batch == state.timestamp.batch.value:
            self.store.is_read_only = False


SAVING_IN_S3 = ['--use_synth_data', *TINY, '--save_folder', 's3://bucket/runs/1', '--save_interval', '1ba',
                '--autoresume', '--max_duration']


def test_checkpoints_are_sent_with_credentials_from_a_file_with_a_relative_path(s3, monkeypatch):
    Path('keys').write_text('[default]\naws_access_key_id = a\naws_secret_access_key = b\n')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', 'keys')
    for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
        monkeypatch.delenv(name)
    main([*SAVING_IN_S3, '1ba'])
    assert 'runs/1/ep0-ba1-rank0.pt' in s3.objects
    with pytest.raises(SystemExit) as exit:  # the record there says that nothing is left to do
        main([*SAVING_IN_S3, '1ba'])
    assert exit.value.code == 0


@pytest.mark.long
def test_a_failed_upload_is_a_warning_and_the_next_checkpoint_replaces_it_and_the_last_one_stays_here(
        s3, results, capfd):
    main([*SAVING_IN_S3, '1ba'])
    assert main([*SAVING_IN_S3, '4ba'], [ReadOnlyUntil(s3, batch=3)])['status'] == 'complete'
    sent = [key for key in s3.objects if key.endswith('.pt')]
    assert (sent[0], sent[-1]) == ('runs/1/ep0-ba1-rank0.pt', 'runs/1/ep0-ba4-rank0.pt')
    assert 'runs/1/ep0-ba2-rank0.pt' not in sent
    assert 'warning: ep0-ba2-rank0.pt could not be sent to --save_folder s3://bucket/runs/1' in capfd.readouterr().err
    line = failed([*SAVING_IN_S3, '5ba'], results, capfd, [ReadOnlyUntil(s3, batch=None)])
    assert json.loads(results.read_text().splitlines()[-1])['first_batch'] == 4
    path = Path(line.split()[-1])
    assert load_checkpoint(path)['state']['timestamp']['Timestamp']['batch'] == 5
    assert [other.name for other in path.parent.iterdir()] == ['ep0-ba5-rank0.pt']

    # A run that fails while the store refuses names the file, too.
    s3.is_read_only = False
    with pytest.raises(SystemExit):
        main([*SAVING_IN_S3, '6ba'], [ReadOnlyUntil(s3, batch=None), Weights(5)])
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith('warning: the last checkpoint')]
    assert load_checkpoint(line.split()[-1])['state']['timestamp']['Timestamp']['batch'] == 5


def test_a_full_quota_is_a_full_disk(monkeypatch, results, capfd):
    def fail(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    monkeypatch.setattr(torch, 'save', fail)
    argv = ['--use_synth_data', *TINY, '--save_folder', 'kept', '--max_duration', '2ba']
    assert 'a disk is full: for --save_folder kept' in failed(argv, results, capfd)


def test_a_complete_run_has_nothing_left_to_do_and_a_longer_one_resumes_at_the_end_of_its_epoch(
        shards, capfd):
    argv = ['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--max_duration', '1ep',
            '--save_folder', 'kept', '--autoresume', '--save_interval', '3ba']
    main(argv)  # of 3 batches; Composer ends the epoch only after the last checkpoint
    saved = checkpoints_in('kept')
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 0
    assert 'nothing left to do' in capfd.readouterr().out
    assert checkpoints_in('kept') == saved
    main([*argv, '--max_duration', '2ep', '--save_interval', '1ep'])  # saves each batch once
    assert [Path(path).name for path in checkpoints_in('kept')] == ['ep0-ba3-rank0.pt', 'ep1-ba6-rank0.pt']


def test_a_resume_that_keeps_less_removes_the_oldest_before_it_writes_because_the_disk_may_be_full(monkeypatch):
    argv = ['--use_synth_latents', *TINY, '--save_interval', '1ba', '--autoresume', '--save_folder', 'kept']
    main([*argv, '--max_duration', '3ba'])
    Path('kept/ep0-ba4-rank0.pt').write_bytes(b'truncated')  # it does not count as one that is kept
    while_writing = []
    save = torch.save

    def counting(*arguments) -> None:
        while_writing.append([Path(path).name for path in checkpoints_in('kept')])
        save(*arguments)

    monkeypatch.setattr(torch, 'save', counting)
    main([*argv, '--max_duration', '4ba', '--save_num_checkpoints_to_keep', '1'])
    assert while_writing == [['ep0-ba3-rank0.pt', 'ep0-ba4-rank0.pt']]
    assert [Path(path).name for path in checkpoints_in('kept')] == ['ep0-ba4-rank0.pt']


def test_a_checkpoint_that_the_user_has_moved_away_and_back_stays():
    class User(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch.value == 2:
                Path('kept/ep0-ba1-rank0.pt').rename('away.pt')
            if state.timestamp.batch.value == 3:
                Path('away.pt').rename('kept/ep0-ba1-rank0.pt')

    main(['--use_synth_latents', *TINY, '--save_interval', '1ba', '--max_duration', '5ba', '--save_folder', 'kept',
          '--save_num_checkpoints_to_keep', '2'], [User()])
    assert [Path(path).name for path in checkpoints_in('kept')] == [f'ep0-ba{batch}-rank0.pt' for batch in (1, 4, 5)]


def test_a_run_removes_only_files_that_it_or_the_resumed_run_has_written(tmp_path):
    class User(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch.value == 7:
                (tmp_path / 'after' / 'ep0-ba6-rank0.pt').rename(tmp_path / 'mine.pt')

    argv = ['--use_synth_latents', *TINY, '--save_interval', '2ba', '--autoresume', '--save_folder']
    main([*argv, 'before', '--max_duration', '4ba'])
    folder = (tmp_path / 'before').rename(tmp_path / 'after')
    (folder / f'.ep0-ba3-rank0.pt.{"0f" * 16}.unfinished').write_text('half')
    (folder / 'latest-rank0.pt').unlink()
    others = {'ep0-ba1-rank0.pt', '.mine.unfinished', '.ep0-ba3-rank0.pt', 'ep0-ba3-rank0.pt.unfinished',
              'latest-rank0.pt'}  # copying a folder can turn the link into a file
    for name in others:
        (folder / name).write_text('mine')
    main([*argv, str(folder), '--max_duration', '8ba', '--save_num_checkpoints_to_keep', '1'], [User()])
    own = {'ep0-ba8-rank0.pt', LOCK_FILE, *(RECORD.format(batch=batch) for batch in (4, 8))}
    assert {path.name for path in folder.iterdir()} == others | own
    assert all((folder / name).read_text() == 'mine' for name in others)
    assert (tmp_path / 'mine.pt').exists()


def test_composers_trainer_loads_a_checkpoint(smallest_model):
    main(['--use_synth_latents', *TINY, '--model_name', smallest_model, '--save_folder', 'kept'])
    newest = checkpoints_in('kept')[-1]
    model = StableDiffusion(smallest_model, 16, latents=True)
    optimizer = torch.optim.AdamW(model.unet.parameters())
    trainer = Trainer(model=model, optimizers=optimizer, load_path=newest, device='cpu')
    assert trainer.state.timestamp.batch.value == 4
    assert_equal(dict(model.state_dict()), dict(load_checkpoint(newest)['state']['model']))
    assert len(optimizer.state) > 0


def test_a_file_system_without_links_gets_checkpoints_and_one_warning(monkeypatch, capfd):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, 'Operation not permitted')
    monkeypatch.setattr(os, 'symlink', refuse)
    main(['--use_synth_latents', *TINY, '--save_interval', '2ba', '--save_folder', 'linkless'])
    assert len(checkpoints_in('linkless')) == 2
    assert capfd.readouterr().err.count('cannot be a link to the newest checkpoint (Operation not permitted)') == 1


CHECKPOINTS = ('ep9-ba999-rank0.pt', 'ep9-ba1000-rank0.pt', 'ep10-ba1000-rank0.pt')  # the oldest first


@pytest.fixture
def kept(tmp_path) -> Path:
    """Return a folder with small checkpoints, and with files of the user whose names are similar."""
    folder = tmp_path / 'kept'
    folder.mkdir()
    for name in CHECKPOINTS:
        torch.save({'state': {'name': name, 'model': torch.full((90_000,), 1.5)}}, folder / name)
    for name in ('best-ep99-ba9999-rank0.pt', '0-ep9-ba9999-rank0.pt'):
        (folder / name).write_text('mine')
    return folder


@pytest.mark.parametrize('size', [0, 100, 300_000])
def test_the_newest_checkpoint_has_the_most_batches_and_a_truncated_one_is_skipped(kept, capfd, size):
    for name in reversed(CHECKPOINTS):
        assert newest_checkpoint(str(kept)) == str(kept / name)
        os.truncate(kept / name, size)
        capfd.readouterr()
    assert newest_checkpoint(str(kept)) is None
    said = capfd.readouterr().err
    for name in CHECKPOINTS:
        assert f'{kept / name} is truncated' in said
        assert (kept / name).stat().st_size == size


@pytest.mark.parametrize('content, words', [('/proc/self/mem', 'Input/output error'), ('/nowhere', 'No such file'),
                                            (Hostile, 'could run code')])
def test_a_newest_checkpoint_that_is_unreadable_or_could_run_code_ends_the_run_and_stays(kept, capfd, content, words):
    newest = kept / 'ep0-ba2000-rank0.pt'
    if content is Hostile:
        torch.save({'state': Hostile(kept / 'ran')}, newest)
    else:
        newest.symlink_to(content)
    before = {*kept.iterdir(), kept / LOCK_FILE}
    line = one_error_line(['--use_synth_data', *TINY, '--save_folder', kept, '--autoresume'], capfd)
    assert words in line and str(newest) in line
    assert {*kept.iterdir()} == before


def test_a_resume_allows_moved_shards_and_models_and_refuses_other_flags_and_other_contents(
        several_captions, smallest_model, tmp_path, capfd):
    data = shutil.copytree(several_captions, tmp_path / 'moved')
    model = shutil.copytree(smallest_model, tmp_path / 'model')
    argv = [*TINY, '--use_ema', '--num_workers', '0', '--save_folder', 'kept', '--autoresume']
    main([*argv, '--remote', several_captions, '--model_name', smallest_model, '--max_duration', '2ba',
          '--caption_weights', 'short=0.1', 'long=0.3'])
    there = [*argv, '--remote', str(data), '--model_name', str(model), '--caption_weights', 'long=6', 'short=2',
             '--max_duration']
    resumed = main([*there, '3ba'])  # with the same probabilities of the captions
    assert (resumed['first_batch'], resumed['captions']) == (2, {'short': 24, 'long': 48})
    further = [*there, '4ba']
    for flag, values, said in (
            ('--batch_size', ['8'], '4, and is 8'), ('--snr_gamma', ['5.0'], 'None, and is 5.0'),
            ('--ema_half_life', ['2ba'], '1ba, and is 2ba'), ('--caption_weights', ['long=6', 'short=3'], '')):
        assert f'{flag} was {said}' in one_error_line([*further, flag, *values], capfd)

    config = model / 'scheduler/scheduler_config.json'
    content = config.read_text()
    config.write_text(content.replace('epsilon', 'v_prediction'))
    assert 'prediction_type of its scheduler was "epsilon"' in one_error_line(further, capfd)
    same_in_effect = {'_diffusers_version': '9', 'trained_betas': None}
    config.write_text(json.dumps(json.loads(content) | same_in_effect))
    assert main(further)['first_batch'] == 3

    shutil.rmtree(data)
    write_several_captions(data, [good(index) for index in range(24)])
    line = one_error_line([*there, '5ba'], capfd)
    assert 'the data of --remote has changed since' in line
    *_, flag, checkpoint = line.split()  # the error ends with how to start from these weights
    assert main([*there, '5ba', '--save_folder', 'new', flag, checkpoint])['load_weights'] == checkpoint


def test_a_resume_and_an_export_keep_the_token_ids_of_the_run(shards, smallest_model, model_folder, tmp_path, capfd):
    model = shutil.copytree(smallest_model, tmp_path / 'model')
    kept = tmp_path / 'kept'
    argv = [*TINY, '--num_workers', '0', '--save_folder', str(kept), '--autoresume', '--remote', shards,
            '--model_name', str(model), '--max_duration']
    main([*argv, '1ba'])
    shutil.copytree(Path(model_folder, 'tokenizer'), model / 'tokenizer')  # pads with another token
    assert f'the tokenizer of {model} gives other token ids' in one_error_line([*argv, '2ba'], capfd)
    export([str(kept), 'out'])
    assert build_tokenizer('out').encode('a cat').ids == build_tokenizer().encode('a cat').ids
    assert main([*argv, '2ba', '--tokenizer', 'out'])['first_batch'] == 1


def test_a_second_run_in_a_save_folder_is_refused_until_the_first_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr('sdbench.training.checkpoints.SECONDS_FOR_LOCK', 0)
    (tmp_path / LOCK_FILE).touch()  # a killed run leaves this file
    with locked_save_folder(str(tmp_path), autoresume=False):
        with pytest.raises(ValueError, match=f'{tmp_path} is in use by another run'), \
                locked_save_folder(str(tmp_path), autoresume=False):
            pass
        # A measurement of the loader saves nothing.
        main(['--use_synth_data', *TINY, '--loader_only', '--save_folder', str(tmp_path), '--results', '-'])
    with locked_save_folder(str(tmp_path), autoresume=False), locked_save_folder(None, autoresume=False):
        pass


@pytest.mark.parametrize('number', [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capfd, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr('fcntl.flock', flock)
    (tmp_path / LOCK_FILE).write_text('4711\nnode-1\n')  # from a machine that no longer exists
    with locked_save_folder(str(tmp_path), autoresume=False), locked_save_folder(str(tmp_path), autoresume=False):
        said = capfd.readouterr().err
    assert f'warning: --save_folder {tmp_path}' in said and os.strerror(number) in said
