"""A run that is killed, at whatever moment, goes on as if nothing had happened, from whole and harmless checkpoints."""
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from composer import Callback, Trainer
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset

from benchmark import main
from export import main as export
from sdbench.inputs.tokenizer import build_tokenizer
from sdbench.training.checkpoints import (
    LOCK_FILE,
    AtomicCheckpointSaver,
    checkpoints_in,
    load_checkpoint,
    locked_save_folder,
    newest_checkpoint,
)
from sdbench.training.safeguard import Safeguard
from sdbench.training.weights import read_trained_model
from tests.forked_runs import RUN, on_small_disk, run, run_program, traced
from tests.runs import TINY, assert_same_training, failed, one_error_line
from tests.samples import Hostile, good, write_shards

# (moment, batch): at a batch's start, within the write of its checkpoint, within its update, or between the two steps
# in which Composer lets latest-rank0.pt point to it. Checkpoints are at batches 3, 6 (an epoch's end), 9 and 12.
EVERY_3_BATCHES = [('start', 2), ('write', 3), ('link', 6), ('start', 7), ('write', 9), ('update', 11)]
EVERY_EPOCH = [('start', 4), ('start', 7), ('update', 11)]
SECOND_PHASE = ('--remote SHARDS --load_weights FIRST --image_size 32 --max_duration 4ba --save_interval 1ba '
                '--caption_drop 0.5 --snr_gamma 5 --eval_remote HELD_OUT --eval_interval 2ba --num_workers 0')


@pytest.mark.parametrize('flags, ranks, kills', [
    pytest.param('--remote SHARDS --save_interval 3ba --max_duration 6ba', 1, [('write', 6)], id='as it saves'),
    pytest.param('--use_synth_data --save_interval 3ba', 1, EVERY_3_BATCHES, marks=pytest.mark.long, id='no data'),
    pytest.param('--remote SHARDS --save_interval 3ba', 2, EVERY_3_BATCHES, marks=pytest.mark.long, id='two ranks'),
    pytest.param('--remote SHARDS --save_interval 1ep', 1, EVERY_EPOCH, marks=pytest.mark.long, id='saved at epochs'),
    pytest.param(SECOND_PHASE, 2, [('start', 2)], marks=pytest.mark.long, id='a second phase')])
def test_a_run_that_is_killed_at_whatever_moment_equals_one_that_never_was(
        server, tmp_path, shards, held_out, flags, ranks, kills):
    places = {'SHARDS': shards, 'HELD_OUT': held_out, 'FIRST': str(tmp_path / 'first')}
    if flags == SECOND_PHASE:
        main(['--use_synth_data', '--use_ema', *TINY, '--save_folder', places['FIRST'], '--results', '-'])
    argv = [*RUN, *(places.get(word, word) for word in flags.split())]
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    whole.mkdir(), killed.mkdir()
    assert run(server, ranks, argv, whole) == [0] * ranks, (whole / 'log').read_text()
    for kill in kills:
        codes = run(server, ranks, argv, killed, kill)
        assert -signal.SIGKILL in codes, (kill, codes, (killed / 'log').read_text())
        shutil.rmtree(places['FIRST'], ignore_errors=True)  # a run that resumes does not need it
    assert run(server, ranks, argv, killed) == [0] * ranks, (killed / 'log').read_text()
    records = [json.loads((place / 'results.jsonl').read_text().splitlines()[-1]) for place in (whole, killed)]
    batches = traced(whole, ranks)
    assert all(sorted(rank) == list(range(records[0]['trained_batches'])) for rank in batches)
    assert traced(killed, ranks) == batches
    assert_same_training(killed / 'checkpoints', whole / 'checkpoints')
    assert records[0]['eval_loss'] == records[1]['eval_loss']


def test_a_disk_that_fills_leaves_the_last_good_checkpoint(server, tmp_path, results):
    disk = tmp_path / 'disk'
    disk.mkdir()
    argv = ['--use_synth_data', '--use_ema', *TINY, '--save_interval', '1ba', '--save_folder', disk / 'kept',
            '--results', results]
    line, _ = on_small_disk(server, 5, disk, argv, tmp_path / 'out')
    assert 'a disk is full' in line
    assert json.loads(results.read_text())['status'] == 'failed'
    kept = tmp_path / 'out' / 'disk' / 'kept'
    [first] = checkpoints_in(str(kept))
    assert not list(kept.glob('.*.unfinished'))
    assert load_checkpoint(first)['state']['timestamp']['Timestamp']['batch'] == 1
    record = main(['--use_synth_data', '--use_ema', *TINY, '--save_folder', str(kept),
                   '--autoresume', '--results', str(results)])  # with room again
    assert record['first_batch'] == 1
    assert record['status'] == 'complete'


def test_a_run_removes_what_a_killed_save_left_and_no_other_file(tmp_path):
    left = tmp_path / f'.ep0-ba3-rank0.pt.{"0f" * 16}.unfinished'
    others = [tmp_path / name for name in ('ep0-ba2-rank0.pt', '.mine.unfinished', '.ep0-ba3-rank0.pt',
                                           'ep0-ba3-rank0.pt.unfinished')]
    for path in (left, *others):
        path.write_text('half')
    with locked_save_folder(str(tmp_path), autoresume=True):
        assert not left.exists()
        assert all(path.exists() for path in others)


class ReadOnlyUntil(Callback):
    """The store refuses whatever is written from the start of a training to the end of a batch."""

    def __init__(self, store, batch: int | None):
        self.store = store
        self.batch = batch

    def fit_start(self, state, logger):
        self.store.is_read_only = True

    def batch_start(self, state, logger):
        if self.batch == state.timestamp.batch.value:
            self.store.is_read_only = False

    def fit_end(self, state, logger):
        """No process of Composer's waits for a checkpoint: if one was killed, the next checkpoint would end the run."""
        [saver] = [callback for callback in state.callbacks if isinstance(callback, AtomicCheckpointSaver)]
        assert not saver.remote_uploader.check_remote_files_exist_executor._processes


SAVING_IN_S3 = ['--use_synth_data', *TINY, '--max_duration', '3ba', '--save_folder', 's3://bucket/runs/1',
                '--save_interval', '1ba']


@pytest.mark.long
def test_a_checkpoint_that_a_store_refuses_is_said_the_next_takes_its_place_and_a_run_resumes_from_that(
        s3, capfd):
    record = main(SAVING_IN_S3, [ReadOnlyUntil(s3, batch=2)])
    assert record['status'] == 'complete'
    sent = [key for key in s3.objects if key.endswith('.pt')]
    assert sent[-1] == 'runs/1/ep0-ba3-rank0.pt'
    assert 'runs/1/ep0-ba1-rank0.pt' not in sent
    assert 'warning: ep0-ba1-rank0.pt could not be sent to --save_folder s3://bucket/runs/1' in capfd.readouterr().err
    assert main([*SAVING_IN_S3, '--autoresume', '--max_duration', '5ba'])['first_batch'] == 3
    assert 'resuming from s3://bucket/runs/1/ep0-ba3-rank0.pt, batch 3 of 5' in capfd.readouterr().out


@pytest.mark.long
def test_the_last_checkpoint_that_a_store_refuses_twice_stays_on_this_machine(s3, results, capfd):
    line = failed(SAVING_IN_S3, results, capfd, [ReadOnlyUntil(s3, batch=None)])
    assert 'the last checkpoint could not be sent to --save_folder s3://bucket/runs/1' in line
    path = Path(line.split()[-1])
    assert path.name == 'ep0-ba3-rank0.pt'
    assert load_checkpoint(path)['state']['timestamp']['Timestamp']['batch'] == 3
    assert [other.name for other in path.parent.iterdir()] == [path.name]


def test_a_full_disk_on_the_way_to_a_store_is_named_with_its_variable(server, s3, tmp_path, tmp_path_factory, results):
    disk = tmp_path_factory.mktemp('d')  # a short path: sockets of processes are in TMPDIR
    argv = [*SAVING_IN_S3, '--results', results]
    code, _, errors = run_program(server, tmp_path / 'out', main, argv, (1, str(disk)), TMPDIR=str(disk))
    line = errors.splitlines()[-1]
    assert code == 1
    assert f'a checkpoint is written to {disk}' in line
    assert 'set TMPDIR to a folder with more room' in line


def test_an_s3_folder_in_use_or_out_of_reach_is_one_line(s3, capfd, monkeypatch):
    s3.client.put_object(Bucket='bucket', Key='runs/1/ep0-ba2-rank0.pt', Body=b'')
    flags = ['--use_synth_data', *TINY, '--save_folder']
    assert 'already holds files' in one_error_line([*flags, 's3://bucket/runs/1'], capfd)
    assert '--save_folder s3://nobody/runs cannot be read' in one_error_line([*flags, 's3://nobody/runs'], capfd)
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'wrong')
    assert 'check its name, and your permissions' in one_error_line([*flags, 's3://bucket/runs/1'], capfd)


def test_a_run_in_epochs_that_ended_at_a_checkpoint_between_epochs_has_nothing_left_to_do(shards, results, tmp_path,
                                                                                         capfd):
    argv = ['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--max_duration', '1ep',
            '--save_folder', 'kept', '--autoresume', '--save_interval', '3ba']
    main(argv)  # of 3 batches: the last checkpoint is of batch 3, when the epoch is not yet over
    saved = checkpoints_in('kept')
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 0
    assert 'nothing left to do' in capfd.readouterr().out
    assert checkpoints_in('kept') == saved
    assert len(results.read_text().splitlines()) == 1
    main([*argv, '--max_duration', '2ep', '--save_interval', '1ep'])  # goes on at the epoch's end, and saves it once
    assert [Path(path).name for path in checkpoints_in('kept')] == ['ep0-ba3-rank0.pt', 'ep1-ba6-rank0.pt']


def test_only_what_the_run_or_the_one_that_it_resumes_has_written_makes_room_for_newer_checkpoints(tmp_path):
    class User(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch.value == 7:
                (tmp_path / 'after' / 'ep0-ba6-rank0.pt').rename(tmp_path / 'mine.pt')

    argv = ['--use_synth_latents', *TINY, '--save_interval', '2ba', '--autoresume', '--save_folder']
    main([*argv, 'before', '--max_duration', '4ba'])
    folder = (tmp_path / 'before').rename(tmp_path / 'after')
    own = folder / 'ep0-ba1-rank0.pt'
    own.write_text('mine')
    main([*argv, str(folder), '--max_duration', '8ba', '--save_num_checkpoints_to_keep', '1'], [User()])
    assert sorted(path.name for path in folder.glob('*.pt')) == [own.name, 'ep0-ba8-rank0.pt', 'latest-rank0.pt']
    assert own.read_text() == 'mine'
    assert (tmp_path / 'mine.pt').exists()


@pytest.fixture
def kept(tmp_path) -> Path:
    """A folder with small checkpoints, and with files of the user's whose names only end as theirs."""
    folder = tmp_path / 'kept'
    folder.mkdir()
    for name in ('ep9-ba999-rank0.pt', 'ep9-ba1000-rank0.pt', 'ep10-ba1000-rank0.pt'):
        torch.save({'state': {'name': name, 'model': torch.full((90_000,), 1.5)}}, folder / name)
    for name in ('best-ep99-ba9999-rank0.pt', '0-ep9-ba9999-rank0.pt'):
        (folder / name).write_text('mine')
    return folder


@pytest.mark.parametrize('size', [0, 100, 300_000])
def test_the_newest_checkpoint_is_that_of_most_batches_and_one_that_is_cut_is_passed_over_and_stays(kept, capfd, size):
    assert newest_checkpoint(str(kept)) == str(kept / 'ep10-ba1000-rank0.pt')
    for name, before in (('ep10-ba1000-rank0.pt', 'ep9-ba1000-rank0.pt'),
                         ('ep9-ba1000-rank0.pt', 'ep9-ba999-rank0.pt'), ('ep9-ba999-rank0.pt', None)):
        cut = kept / name
        content = cut.read_bytes()[:size]
        cut.write_bytes(content)
        assert newest_checkpoint(str(kept)) == (before and str(kept / before))
        assert f'{cut} was not written to its end, and is passed over' in capfd.readouterr().err
        assert cut.read_bytes() == content


@pytest.mark.parametrize('target, words', [('/proc/self/mem', 'Input/output error'), ('/nowhere', 'No such file')])
def test_a_newest_checkpoint_that_cannot_be_read_ends_the_run_and_everything_stays(kept, target, words):
    unreadable = kept / 'ep0-ba2000-rank0.pt'
    unreadable.symlink_to(target)
    before = sorted(kept.iterdir())
    with pytest.raises(ValueError, match=words) as error:
        newest_checkpoint(str(kept))
    assert str(unreadable) in str(error.value)
    assert '\n' not in str(error.value)
    assert sorted(kept.iterdir()) == before


def test_a_resume_with_another_flag_or_on_data_that_has_changed_is_refused_with_a_way_to_go_on(tmp_path, capfd):
    shards = tmp_path / 'shards'
    argv = ['--remote', write_shards(shards, [good(index) for index in range(8)]), *TINY, '--max_duration', '2ba',
            '--save_folder', 'kept', '--autoresume', '--num_workers', '0']
    main(argv)
    assert '--batch_size was 4, and is 8 now' in one_error_line([*argv, '--batch_size', '8'], capfd)
    assert '--snr_gamma was None, and is 5.0 now' in one_error_line([*argv, '--snr_gamma', '5.0'], capfd)
    shutil.rmtree(shards)
    write_shards(shards, [good(index) for index in range(1, 9)])
    line = one_error_line([*argv, '--max_duration', '3ba'], capfd)
    assert 'the data of --remote has changed since' in line
    assert 'or give a new --save_folder; to start there from these weights, add --load_weights kept/' in line
    remedy = ['--save_folder', 'new', '--load_weights', line.split()[-1]]
    assert main([*argv, *remedy])['status'] == 'complete'


def test_shards_and_a_model_may_have_moved_when_a_run_resumes(shards, smallest_model, tmp_path, capfd):
    """Their addresses are others then; the hash of the index and the model's configuration are the same."""
    moved = shutil.copytree(shards, tmp_path / 'moved')
    model = shutil.copytree(smallest_model, tmp_path / 'model')
    argv = [*TINY, '--image_size', '16', '--num_workers', '0', '--save_folder', 'kept', '--autoresume']
    main([*argv, '--remote', shards, '--model_name', smallest_model, '--max_duration', '2ba'])
    there = [*argv, '--remote', str(moved), '--model_name', str(model), '--max_duration', '3ba']
    assert main(there)['first_batch'] == 2
    config = model / 'scheduler' / 'scheduler_config.json'
    content = config.read_text()
    config.write_text(content.replace('epsilon', 'v_prediction'))
    line = one_error_line([*there, '--max_duration', '4ba'], capfd)
    assert f'--model_name {model} has another configuration: prediction_type of its scheduler was "epsilon"' in line
    config.write_text(json.dumps(json.loads(content) | {'_diffusers_version': '9', 'trained_betas': None}))  # the same
    assert main([*there, '--max_duration', '4ba'])['first_batch'] == 3


def test_a_run_goes_on_and_is_exported_with_the_token_ids_that_it_was_trained_with(shards, smallest_model, model_folder,
                                                                                   tmp_path, capfd):
    model = shutil.copytree(smallest_model, tmp_path / 'model')
    kept = tmp_path / 'kept'
    argv = [*TINY, '--image_size', '16', '--num_workers', '0', '--save_folder', str(kept), '--autoresume', '--remote',
            shards, '--model_name', str(model), '--max_duration']
    main([*argv, '1ba'])
    shutil.copytree(Path(model_folder, 'tokenizer'), model / 'tokenizer')  # of another padding
    assert f'the tokenizer of {model} gives other token ids' in one_error_line([*argv, '2ba'], capfd)
    export([str(kept), 'out'])
    assert build_tokenizer('out').encode('a cat').ids == build_tokenizer().encode('a cat').ids
    assert main([*argv, '2ba', '--tokenizer', 'out'])['first_batch'] == 1


@pytest.mark.parametrize('name', ['runs/{run_name}', 'set {1}', 'a {b} %s c', '{rank}', 'a{'])
def test_a_save_folder_is_one_folder_whatever_braces_are_in_its_name(tmp_path, name):
    argv = ['--use_synth_latents', *TINY, '--save_folder', name, '--run_name', 'mine', '--autoresume',
            '--save_num_checkpoints_to_keep', '1', '--max_duration']
    main([*argv, '2ba'])
    assert main([*argv, '3ba'])['first_batch'] == 2
    folder = tmp_path / name.replace('{run_name}', 'mine')
    assert sorted(path.name for path in folder.glob('*.pt')) == ['ep0-ba3-rank0.pt', 'latest-rank0.pt']
    others = {path.name for path in tmp_path.iterdir()} - {name.partition('/')[0], 'results.jsonl'}
    assert not others
    assert read_trained_model(name, 'CHECKPOINT').batch == 3


def test_a_save_folder_is_not_named_after_a_run_without_a_name_and_is_found_by_one_run_alone(tmp_path, capfd):
    argv = ['--use_synth_latents', *TINY, '--save_folder', 'runs/{run_name}']
    assert '--save_folder runs/{run_name} needs --run_name NAME' in one_error_line(argv, capfd)
    for name in ('one', 'other'):
        (tmp_path / 'runs' / name).mkdir(parents=True)
    assert 'there are runs/one, runs/other; give the name' in one_error_line(['runs/{run_name}', 'out'], capfd, export)


def test_a_checkpoint_that_could_run_code_is_refused_where_a_run_would_resume(tmp_path, capfd):
    kept = tmp_path / 'kept'
    kept.mkdir()
    torch.save({'state': Hostile(tmp_path / 'ran')}, kept / 'ep0-ba1-rank0.pt')
    line = one_error_line(['--use_synth_data', *TINY, '--save_folder', str(kept), '--autoresume'], capfd)
    assert 'ep0-ba1-rank0.pt' in line and 'could run code' in line
    assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize('to_keep, left', [(None, 2), (1, 1), (0, 0)])
def test_the_saver_resumes_in_somebodys_own_trainer_as_composers_does(to_keep, left):
    data = DataLoader(TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.long)), batch_size=2)
    for epochs in (1, 2):
        net = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
        saver = AtomicCheckpointSaver('kept', '1ep', to_keep)
        saver.load_state_dict({})
        saver.load_state_dict(AtomicCheckpointSaver('kept', '1ep').state_dict())
        trainer = Trainer(model=net, optimizers=torch.optim.SGD(net.parameters(), lr=0.1), train_dataloader=data,
                          max_duration=f'{epochs}ep', callbacks=[saver, Safeguard(seed=1)], run_name='mine',
                          autoresume=True, progress_bar=False)
        assert trainer.state.timestamp.batch == (2 * epochs - 2 if left else 0)
        trainer.fit()
    assert len(checkpoints_in('kept')) == left


def test_a_second_run_in_a_save_folder_is_refused_until_the_first_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr('sdbench.training.checkpoints.SECONDS_FOR_LOCK', 0)
    (tmp_path / LOCK_FILE).touch()  # as a run that was killed leaves it
    with locked_save_folder(str(tmp_path), autoresume=False):
        with pytest.raises(ValueError, match=f'{tmp_path} is in use by another run'), \
                locked_save_folder(str(tmp_path), autoresume=False):
            pass
    with locked_save_folder(str(tmp_path), autoresume=False), locked_save_folder(None, autoresume=False):
        pass
