"""A run that is killed, at whatever moment, goes on as if nothing had happened, from whole and harmless checkpoints."""
import json
import os
import pickle
import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer import Callback, ComposerModel, Trainer
from composer.core import Timestamp
from torch.utils.data import DataLoader

from benchmark import main
from tests.forked_runs import RUN, on_small_disk, run, traced
from tests.runs import TINY, assert_same_training, error_line, one_error_line
from tests.samples import Hostile, good, write_shards
from training.checkpoints import (
    WholeCheckpoints,
    checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_interrupted,
    saving_alone,
    sound_checkpoint,
    tensors_alone_are_loaded,
)
from training.safeguard import Safeguard

# (moment, batch): at a batch's start, within the write of its checkpoint, or between the two steps in which Composer
# lets latest-rank0.pt point to it. Checkpoints are at batches 3, 6 (an epoch's end), 9 and 12.
KILLS = {'3ba': [('start', 2), ('write', 3), ('link', 6), ('start', 7), ('write', 9), ('update', 11)],
         '1ep': [('start', 4), ('start', 7), ('update', 11)]}


def batches_of_a_run_that_no_kill_changes(server, folder: Path, argv: list, ranks: int, kills: list) -> list[dict]:
    """What each rank saw and lost in each batch, the same with the kills and without; and so are the weights."""
    whole, killed = folder / 'whole', folder / 'killed'
    whole.mkdir(), killed.mkdir()
    assert run(server, ranks, argv, whole) == [0] * ranks, (whole / 'log').read_text()
    for kill in kills:
        codes = run(server, ranks, argv, killed, kill)
        assert -signal.SIGKILL in codes, (kill, codes, (killed / 'log').read_text())
    assert run(server, ranks, argv, killed) == [0] * ranks, (killed / 'log').read_text()
    batches = traced(whole, ranks)
    assert traced(killed, ranks) == batches
    assert_same_training(killed / 'checkpoints', whole / 'checkpoints')
    return batches


def test_a_run_killed_while_it_saves_goes_on_in_the_middle_of_an_epoch_as_if_it_never_was(server, tmp_path, shards):
    argv = [*RUN, '--remote', shards, '--save_interval', '3ba', '--max_duration', '6ba']
    [batches] = batches_of_a_run_that_no_kill_changes(server, tmp_path, argv, 1, [('write', 6)])
    assert sorted(batches) == list(range(6))


@pytest.mark.long
@pytest.mark.parametrize('data, interval, ranks', [
    ('synthetic', '3ba', 1), ('streamed', '3ba', 2), ('streamed', '1ep', 1)])
def test_a_run_killed_again_and_again_equals_one_that_never_was(server, tmp_path, shards, data, interval, ranks):
    argv = [*RUN, '--save_interval', interval, *(['--use_synth_data'] if data == 'synthetic' else ['--remote', shards])]
    expected = batches_of_a_run_that_no_kill_changes(server, tmp_path, argv, ranks, KILLS[interval])
    assert all(sorted(rank) == list(range(12)) for rank in expected)
    if data == 'streamed':
        seen = [caption for rank in expected for number in range(6) for line in rank[number]
                for caption in json.loads(line)[1]]
        assert len(seen) == 24 == len(set(map(tuple, seen)))


def test_a_disk_that_fills_leaves_the_last_good_checkpoint(server, tmp_path, results):
    disk = tmp_path / 'disk'
    disk.mkdir()
    argv = ['--use_synth_data', '--use_ema', *TINY, '--save_interval', '1ba', '--save_folder', disk / 'kept',
            '--results', results]
    line, _ = on_small_disk(server, 40, disk, argv, tmp_path / 'out')
    assert 'a disk is full' in line and json.loads(results.read_text())['status'] == 'failed'
    kept = tmp_path / 'out' / 'disk' / 'kept'
    [first] = checkpoints(str(kept))
    assert sorted(path.name for path in kept.iterdir()) == [Path(first).name, 'latest-rank0.pt']
    assert load_checkpoint(first)['state']['timestamp']['Timestamp']['batch'] == 1
    record = main(['--use_synth_data', '--use_ema', *TINY, '--save_folder', str(kept),
                   '--autoresume', '--results', str(results)])  # with room again
    assert record['first_batch'] == 1 and record['status'] == 'complete'


@pytest.mark.parametrize('protocol', [2, 4])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, capfd, protocol):
    folder, trace = tmp_path / 'checkpoints', tmp_path / 'ran'
    folder.mkdir()
    torch.save({'state': Hostile(trace)}, folder / 'ep0-ba1-rank0.pt', pickle_protocol=protocol)
    with pytest.raises(SystemExit):
        main(['--use_synth_data', *TINY, '--save_folder', str(folder), '--autoresume'])
    assert 'would run code when loaded' in error_line(capfd)
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(folder / 'ep0-ba1-rank0.pt')
    assert not trace.exists()


@pytest.mark.long
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
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'wrong')
    assert 'check its name and your credentials' in one_error_line([*flags, 's3://bucket/runs/1'], capfd)


def test_checkpoints_of_one_batch_are_in_the_order_of_their_epochs(tmp_path):
    for name in ('ep10-ba1000-rank0.pt', 'ep9-ba1000-rank0.pt', 'ep9-ba999-rank0.pt'):
        (tmp_path / name).touch()
    assert [Path(path).name for path in checkpoints(str(tmp_path))] == [
        'ep9-ba999-rank0.pt', 'ep9-ba1000-rank0.pt', 'ep10-ba1000-rank0.pt']


def test_a_run_in_epochs_that_ended_at_a_checkpoint_between_epochs_has_nothing_left_to_do(shards, results, tmp_path,
                                                                                         capfd):
    argv = ['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--max_duration', '1ep',
            '--save_folder', str(tmp_path / 'kept'), '--autoresume', '--save_interval', '3ba', '--results',
            str(results)]
    main(argv)  # of 3 batches: the last checkpoint is of batch 3, when the epoch is not yet over
    saved = checkpoints(str(tmp_path / 'kept'))
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 0 and 'nothing left to do' in capfd.readouterr().out
    assert checkpoints(str(tmp_path / 'kept')) == saved and len(results.read_text().splitlines()) == 1


class Line(ComposerModel):
    """The smallest model that Composer trains."""

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Linear(1, 1)

    def forward(self, batch):
        return self.slope(batch)

    def loss(self, outputs, batch):
        return outputs.square().mean()


def train_a_line(folder: Path, batches: int, to_keep: int | None = None, load_path: Path | None = None,
                 callbacks=()) -> None:
    """Train with checkpoints after every second batch."""
    saver = WholeCheckpoints(str(folder), '2ba', to_keep)
    trainer = Trainer(model=Line(), train_dataloader=DataLoader(torch.ones(20, 1)), max_duration=f'{batches}ba',
                      device='cpu', progress_bar=False, callbacks=[*callbacks, saver],
                      load_path=load_path and str(load_path))
    trainer.fit()
    trainer.close()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_what_the_run_or_the_one_that_it_resumes_has_written_makes_room_for_newer_checkpoints(tmp_path):
    train_a_line(tmp_path / 'before', 4)
    folder = (tmp_path / 'before').rename(tmp_path / 'after')
    own = folder / 'ep0-ba1-rank0.pt'
    own.write_text('mine')
    train_a_line(folder, 8, to_keep=1, load_path=folder / 'ep0-ba4-rank0.pt')
    assert names_in(folder) == [own.name, 'ep0-ba8-rank0.pt', 'latest-rank0.pt'] and own.read_text() == 'mine'


@pytest.mark.parametrize('moved', [2, 4])
def test_a_checkpoint_that_is_moved_away_in_a_run_does_not_end_it_and_leaves_its_place_to_an_older_one(tmp_path, moved):
    class User(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch.value == 5:
                (tmp_path / 'kept' / f'ep0-ba{moved}-rank0.pt').rename(tmp_path / 'mine.pt')

    train_a_line(tmp_path / 'kept', 6, to_keep=2, callbacks=[User()])
    assert [Path(path).name for path in checkpoints(tmp_path / 'kept')] == [
        f'ep0-ba{batch}-rank0.pt' for batch in (2, 4, 6) if batch != moved]
    assert (tmp_path / 'mine.pt').exists()


def test_a_latest_checkpoint_that_is_a_file_of_its_own_stays_as_it_is(tmp_path, capfd):
    train_a_line(tmp_path / 'linked', 2)
    kept = shutil.copytree(tmp_path / 'linked', tmp_path / 'kept')  # as `cp -rL` does: copies of what is linked to
    latest = kept / 'latest-rank0.pt'
    content = latest.read_bytes()
    assert not latest.is_symlink() and capfd.readouterr().err == ''
    train_a_line(kept, 4, load_path=kept / 'ep0-ba2-rank0.pt')
    assert not latest.is_symlink() and latest.read_bytes() == content
    assert f'warning: {latest} is no link' in capfd.readouterr().err


def test_a_signal_leaves_what_is_not_of_the_run_and_what_it_saves_is(tmp_path):
    saver = WholeCheckpoints(str(tmp_path), '2ba', to_keep=1)
    of_the_run, own = tmp_path / 'ep0-ba2-rank0.pt', tmp_path / 'ep0-ba1-rank0.pt'
    of_the_run.touch(), own.touch()
    saver.saved_checkpoints = [str(tmp_path / 'ep0-ba0-rank0.pt'), str(of_the_run)]  # the first was moved away
    state = SimpleNamespace(timestamp=Timestamp(epoch=0, batch=3), callbacks=[saver], state_dict=saver.state_dict)
    path = save_interrupted(state, str(tmp_path))
    assert names_in(tmp_path) == [own.name, 'ep0-ba3-rank0.pt', 'latest-rank0.pt']
    resumed = WholeCheckpoints(str(tmp_path), '2ba', to_keep=1)
    resumed.load_state_dict(load_checkpoint(path)['state'])
    assert resumed.saved_checkpoints == [path]


def test_a_signal_leaves_a_whole_checkpoint_of_the_same_batch_alone(tmp_path):
    state = SimpleNamespace(timestamp=Timestamp(epoch=0, batch=3), state_dict=lambda: {'new': torch.ones(3)},
                            callbacks=[WholeCheckpoints(str(tmp_path), '2ba')])
    path = tmp_path / 'ep0-ba3-rank0.pt'
    torch.save({'state': {'old': torch.zeros(3)}}, path)
    save_interrupted(state, str(tmp_path))
    assert 'old' in load_checkpoint(path)['state']
    path.write_bytes(path.read_bytes()[:100])  # a half-written one is replaced
    save_interrupted(state, str(tmp_path))
    assert 'new' in load_checkpoint(path)['state'] and (tmp_path / 'latest-rank0.pt').exists()
    assert not list(tmp_path.glob('*.tmp'))


def test_what_an_interrupted_run_saves_counts_among_those_to_keep(tmp_path, results):
    folder = tmp_path / 'checkpoints'

    class Interrupted(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch.value == 7:
                raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit:
        main(['--use_synth_data', *TINY, '--max_duration', '9ba', '--save_folder', str(folder), '--save_interval',
              '2ba', '--save_num_checkpoints_to_keep', '2', '--results', str(results)], [Interrupted()])
    assert exit.value.code == 130
    assert [Path(path).name for path in checkpoints(folder)] == ['ep0-ba6-rank0.pt', 'ep0-ba7-rank0.pt']
    record = json.loads(results.read_text())
    assert (record['status'], record['trained_batches']) == ('interrupted', 7)


@pytest.mark.parametrize('places', [('CPU', 'GPU'), ('GPU', 'CPU')], ids=str)
def test_a_checkpoint_of_a_cpu_is_resumed_on_a_gpu_and_the_reverse(tmp_path, monkeypatch, smallest_model, places):
    """As far as Composer's GradScaler tells them apart, whose state is empty where torch finds no CUDA."""
    argv = ['--use_synth_latents', *TINY, '--model_name', smallest_model, '--autoresume',
            '--save_folder', str(tmp_path / 'kept'), '--results', '/dev/null']
    for place, duration, first_batch in zip(places, ('2ba', '4ba'), (0, 2), strict=True):
        monkeypatch.setattr(torch.cuda.amp.common, 'amp_definitely_not_available', lambda place=place: place == 'CPU')
        record = main([*argv, '--max_duration', duration])
        assert (record['status'], record['first_batch']) == ('complete', first_batch)


@pytest.fixture
def kept(tmp_path) -> Path:
    """A folder with three small checkpoints."""
    folder = tmp_path / 'kept'
    folder.mkdir()
    for batch in (1, 2, 3):
        torch.save({'state': {'batch': batch, 'model': torch.full((5000,), 1.5)}}, folder / f'ep0-ba{batch}-rank0.pt')
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change(path: Path) -> None:
    """Other bytes within a tensor: torch loads them without a word."""
    content = bytearray(path.read_bytes())
    start = content.index(bytes(torch.full((9,), 1.5).numpy()))
    content[start:start + 4000] = bytes(4000)
    path.write_bytes(content)
    assert load_checkpoint(path)['state']['model'].sum() == 6000


@pytest.mark.parametrize('damage', [cut, change, lambda path: path.write_bytes(b'')])
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_it_is_taken(kept, capfd, damage):
    newest = kept / 'ep0-ba3-rank0.pt'
    damage(newest)
    content = newest.read_bytes()
    with newest_checkpoint(str(kept)) as path:
        assert Path(path).name == 'ep0-ba2-rank0.pt'
    assert (kept / 'ep0-ba3-rank0.pt.damaged').read_bytes() == content and not newest.exists()
    assert f'{newest} is damaged' in capfd.readouterr().err
    torch.save({'state': {}}, newest)
    cut(newest)
    with newest_checkpoint(str(kept)):
        assert len(list(kept.iterdir())) == 4  # the first that was set aside stays
    assert (kept / 'ep0-ba3-rank0.pt.damaged').read_bytes() == content


def test_where_no_checkpoint_is_before_a_damaged_one_it_is_said_that_the_run_starts_anew(kept, capfd):
    for path in checkpoints(str(kept)):
        cut(Path(path))
    with newest_checkpoint(str(kept)) as path:
        assert path is None
    words = [line.rsplit('; ', 1)[1] for line in capfd.readouterr().err.splitlines()]
    assert words == 2 * ['going back to the checkpoint before it'] + ['there is none before it: the run starts anew']


def test_a_file_whose_name_only_ends_as_that_of_a_checkpoint_is_none_and_stays(kept):
    saved = checkpoints(str(kept))
    own = [kept / name for name in ('best-ep0-ba2-rank0.pt', '0-ep0-ba1-rank0.pt', 'thesis-ep0-ba99-rank0.pt')]
    for path in own:
        path.write_text('mine')
    with newest_checkpoint(str(kept)) as path:
        assert Path(path).name == 'ep0-ba3-rank0.pt'
    assert checkpoints(str(kept)) == saved and all(path.read_text() == 'mine' for path in own)


@pytest.mark.parametrize('target, words', [
    ('ep0-ba9-rank0.pt', 'Too many levels of symbolic links'), ('/proc/self/mem', 'Input/output error'),
    ('/nowhere', 'No such file'), ('/', 'is no file')])
def test_a_newest_checkpoint_that_cannot_be_read_ends_the_run_and_everything_stays(kept, target, words):
    unreadable = kept / 'ep0-ba9-rank0.pt'
    unreadable.symlink_to(target)
    before = sorted(kept.iterdir())
    with pytest.raises(ValueError, match=words) as error, newest_checkpoint(str(kept)):
        pass
    assert str(unreadable) in str(error.value) and '\n' not in str(error.value)
    assert sorted(kept.iterdir()) == before


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path):
    (tmp_path / 'loop').symlink_to('loop')
    with pytest.raises(ValueError, match='cannot be read'), newest_checkpoint(str(tmp_path / 'loop')):
        pass


def test_only_the_newest_checkpoint_is_looked_at(kept):
    cut(kept / 'ep0-ba1-rank0.pt')
    with newest_checkpoint(str(kept)) as path:
        assert Path(path).name == 'ep0-ba3-rank0.pt'
    assert len(checkpoints(str(kept))) == 3


def test_a_damaged_newest_checkpoint_in_a_store_falls_back_and_stays_and_downloads_do_not(kept, s3, tmp_path, capfd,
                                                                                          monkeypatch):
    downloads = tmp_path / 'downloads'
    downloads.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(downloads))
    change(kept / 'ep0-ba3-rank0.pt')
    for path in checkpoints(str(kept)):
        s3.client.upload_file(path, 'bucket', f'runs/1/{Path(path).name}')
    s3.client.put_object(Bucket='bucket', Key='runs/1/best-ep0-ba9-rank0.pt', Body=b'of the user')
    with newest_checkpoint('s3://bucket/runs/1') as path:
        assert load_checkpoint(path)['state']['batch'] == 2
        assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    assert os.listdir(downloads) == []
    assert len(s3.client.list_objects_v2(Bucket='bucket', Prefix='runs/1/')['Contents']) == 4
    errors = capfd.readouterr().err
    assert 'ep0-ba3-rank0.pt is damaged' in errors and 'best' not in errors


def test_what_is_swapped_in_after_the_look_runs_no_code(kept, tmp_path):
    trace = tmp_path / 'ran'
    with sound_checkpoint(str(kept / 'ep0-ba3-rank0.pt'), 'X') as path:
        torch.save({'state': Hostile(trace)}, path)
    with tensors_alone_are_loaded(), pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=False)  # as Composer does
    assert not trace.exists()


def test_a_resume_notices_a_dataset_that_was_made_anew_and_keeps_no_password():
    kept = Safeguard(17, flags={'remote': 's3://***@bucket', 'dataset': 'abc'}).state_dict()
    Safeguard(17, flags={'remote': 's3://***@bucket', 'dataset': 'abc'}).load_state_dict(kept)
    Safeguard(17, flags={'remote': 's3://***@bucket', 'dataset': 'abc'}).load_state_dict(
        {'flags': {'remote': 's3://key:secret@bucket'}})  # of an earlier version
    with pytest.raises(ValueError, match='the dataset of --remote was made anew'):
        Safeguard(17, flags={'remote': 's3://***@bucket', 'dataset': 'abd'}).load_state_dict(kept)


@pytest.mark.long
def test_a_run_on_a_dataset_that_was_made_anew_is_refused(tmp_path, results, capfd):
    shards = tmp_path / 'shards'
    argv = ['--remote', write_shards(shards, [good(index) for index in range(8)]), *TINY, '--max_duration', '2ba',
            '--save_folder', tmp_path / 'kept', '--autoresume', '--results', results, '--num_workers', '0']
    main([str(argument) for argument in argv])
    shutil.rmtree(shards)
    write_shards(shards, [good(index) for index in range(1, 9)])
    assert 'the dataset of --remote was made anew' in one_error_line([*argv, '--max_duration', '3ba'], capfd)


def test_a_second_run_in_a_save_folder_is_refused(tmp_path):
    with saving_alone(str(tmp_path / 'kept')):
        with pytest.raises(ValueError, match='kept is in use by another run'):
            with saving_alone(str(tmp_path / 'kept')):
                pass
    assert not (tmp_path / 'kept').exists()  # nothing was saved
    with saving_alone(str(tmp_path / 'kept')), saving_alone(None), saving_alone('s3://bucket/kept'):
        pass
