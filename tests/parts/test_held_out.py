"""convert.py --held_out: exactly so many samples, always the same, in a dataset of their own, whatever ends a run."""
import json
import shlex
import shutil
from pathlib import Path

import pytest
from streaming import StreamingDataset

import convert
from settings.flags import parse
from settings.train import Train
from inputs.errors import DataError
from inputs.verified_stream import own_shared_memory
from parts.names import held_out_beside
from parts.output import FolderOutput
from tests.local_s3 import local_s3
from tests.samples import end_of_first_sample, sample_files, write_tar

SHADES = range(24)  # of the images, a sample each
A_TAR = 6


class WorkersHere:
    """Workers of the engine that are calls in this process."""

    def __init__(self, make):
        self.worker = make(0)
        self.answers = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def places(self) -> int:
        return 1

    def start(self):
        return self.worker

    def call(self, worker, parts: list) -> int:
        self.answers.append(worker(parts))
        return len(self.answers) - 1

    def wait(self, calls: list, seconds: float) -> list:
        return calls

    def result(self, call: int) -> list:
        return self.answers[call]

    def end(self, worker) -> None:
        pass


@pytest.fixture
def workers_here(monkeypatch):
    monkeypatch.setattr(convert, 'open_workers', lambda args, make, num_parts: WorkersHere(make))


@pytest.fixture
def tars(tmp_path) -> Path:
    return write_tars(tmp_path / 'tars', A_TAR)


def write_tars(folder: Path, samples_a_tar: int) -> Path:
    for first in range(0, len(SHADES), samples_a_tar):
        shades = SHADES[first:first + samples_a_tar]
        files = [sample_files(f'{shade:02}', shade) for shade in shades]
        write_tar(folder / f'{first:02}.tar', {name: content for of_one in files for name, content in of_one.items()})
    return folder


def captions_in(out: Path, cache: Path | None = None) -> list[str]:
    """As Streaming's own reader finds them."""
    with own_shared_memory():
        places = {'local': str(out)} if cache is None else {'remote': str(out), 'local': str(cache)}
        dataset = StreamingDataset(**places, shuffle=False, batch_size=1, validate_hash='xxh64' if cache else None)
    return [dataset[index]['caption'] for index in range(len(dataset))]


def sides(out: Path) -> tuple[list[str], list[str]]:
    """The captions in OUT and those that are held out."""
    return captions_in(out), captions_in(Path(f'{out}-held-out'))


def contents(*folders: Path) -> list[dict[str, bytes]]:
    """All files of each folder by their names."""
    return [{str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}
            for folder in folders]


def error_line(capsys, *argv) -> str:
    """The one line of a conversion that is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        convert.main([str(argument) for argument in argv])
    *first_lines, error = capsys.readouterr().err.splitlines(keepends=True)
    assert all(line.startswith('converting ') for line in first_lines), first_lines
    assert exit.value.code == 2 and error.count('\n') == 1, error
    return error


ALL = [f'caption {shade}' for shade in SHADES]


@pytest.mark.parametrize('number', [1, 7, 23])
def test_so_many_samples_are_held_out_and_the_others_stay_in_their_order(tars, tmp_path, workers_here, number):
    out = tmp_path / 'out'
    assert convert.main([str(tars), str(out), '--held_out', str(number), '--size_limit', '1kb']) == 0
    kept, held_out = sides(out)
    assert len(held_out) == number and sorted(kept + held_out) == sorted(ALL)
    assert kept == [caption for caption in ALL if caption in kept]
    assert held_out == [caption for caption in ALL if caption in held_out]
    shards = json.loads((out / 'index.json').read_text())['shards']
    named = {shard['raw_data']['basename'] for shard in shards}
    assert named == {str(path.relative_to(out)) for path in out.rglob('*.mds')}  # no shard is left over


def test_which_depends_on_the_images_and_the_seed_alone(tars, tmp_path, workers_here):
    found = []
    other_tars = write_tars(tmp_path / 'others', 4)
    for name, source, flags in (('a', tars, []), ('b', tars, ['--size_limit', '1kb']), ('c', other_tars, []),
                                ('d', tars, ['--seed', '3'])):
        convert.main([str(source), str(tmp_path / name), '--held_out', '8', *flags])
        found.append(sides(tmp_path / name)[1])
    assert found[0] == found[1] == found[2] != found[3]


def test_no_number_of_workers_changes_a_file(tars, tmp_path):
    made = []
    for workers in ('1', '3'):
        out = tmp_path / workers
        convert.main([str(tars), str(out), '--held_out', '5', '--size_limit', '1kb', '--num_workers', workers])
        made.append(contents(out, Path(f'{out}-held-out')))
    assert made[0] == made[1] and len(made[0][1]) > 3


def test_copies_of_an_image_are_on_one_side_but_for_those_at_the_edge(tmp_path, workers_here):
    files = {}
    for copy in range(4):
        for shade in range(6):
            sample = sample_files(f'{copy}-{shade}', shade)
            files |= sample | {f'{copy}-{shade}.txt': f'{copy} of {shade}'.encode()}
    write_tar(tmp_path / 'tars/x.tar', files)
    convert.main([str(tmp_path / 'tars'), str(tmp_path / 'out'), '--held_out', '10'])
    kept, held_out = sides(tmp_path / 'out')
    assert len(held_out) == 10
    on_both = {caption[-1] for caption in kept} & {caption[-1] for caption in held_out}
    assert len(on_both) == 1  # two images with all four copies, and two copies of a third


class Killed(BaseException):
    """As a process is killed: nothing else is done."""


def kill_at(monkeypatch, moment: int) -> None:
    """The first `moment` changes of files of OUT happen, and none after them."""
    changes = []

    def counted(deed):
        def change(*args, **kwargs):
            changes.append(deed)
            if len(changes) > moment:
                raise Killed
            return deed(*args, **kwargs)
        return change
    for name in ('create', 'write', 'remove', 'remove_folder', 'remove_unfinished'):
        monkeypatch.setattr(FolderOutput, name, counted(getattr(FolderOutput, name)))


def test_a_run_that_is_killed_at_any_moment_and_started_again_ends_as_one_that_never_was(tmp_path, workers_here):
    write_tar(tmp_path / 'tars/x.tar', {**sample_files('a', 1), **sample_files('b', 2), **sample_files('c', 3)})
    argv = [str(tmp_path / 'tars'), '--held_out', '1']
    convert.main([*argv, str(tmp_path / 'undisturbed')])
    expected = contents(tmp_path / 'undisturbed', tmp_path / 'undisturbed-held-out')
    for moment in range(1000):
        out = tmp_path / f'out{moment}'
        try:
            with pytest.MonkeyPatch.context() as monkeypatch:
                kill_at(monkeypatch, moment)
                convert.main([*argv, str(out)])
            break
        except Killed:
            finish(argv, out)
        assert contents(out, Path(f'{out}-held-out')) == expected, moment
    assert moment > 20


def finish(argv: list[str], out: Path) -> None:
    """The same command again; one that was killed when all was done is refused."""
    if (out / 'index.json').exists():
        return
    convert.main([*argv, str(out)])


def test_a_damaged_tar_that_is_mended_moves_no_sample_to_the_other_side(tars, tmp_path, workers_here):
    out = tmp_path / 'out'
    whole = (tars / '06.tar').read_bytes()
    (tars / '06.tar').write_bytes(whole[:end_of_first_sample(tars / '06.tar') + 1000])
    argv = [str(tars), str(out), '--size_limit', '1kb', '--held_out', '1', '--seed', '1']  # the first is in 06.tar
    assert convert.main(argv) == 1
    kept, held_out = map(set, sides(out))
    assert len(held_out) == 1 and len(kept) == 24 - 5 - 1
    (tars / '06.tar').write_bytes(whole)
    assert convert.main(argv) == 0
    kept_now, held_out_now = map(set, sides(out))
    assert kept <= kept_now and held_out <= held_out_now
    assert sorted(kept_now | held_out_now) == sorted(ALL) and not kept_now & held_out_now


def test_more_than_there_are_is_one_line_with_the_most_that_can_be_held_out(tars, tmp_path, workers_here, capsys):
    out = tmp_path / 'out'
    line = error_line(capsys, tars, out, '--held_out', 24, '--size_limit', '1kb')
    assert '--held_out 24 leaves none of the 24 samples to train on; use at most 23' in line
    assert [list(folder) for folder in contents(out, Path(f'{out}-held-out'))] == [['claim.json'], ['claim.json']]
    assert convert.main([str(tars), str(out), '--held_out', '23']) == 0  # in the same place
    assert [len(side) for side in sides(out)] == [1, 23]


def test_somebodys_folder_beside_out_is_refused_and_stays(tars, tmp_path, workers_here, capsys):
    mine = tmp_path / 'out-held-out'
    mine.mkdir()
    (mine / 'notes.txt').write_text('mine')
    assert f'OUT {mine} already holds something' in error_line(capsys, tars, tmp_path / 'out', '--held_out', 3)
    assert not (tmp_path / 'out').exists() and [path.name for path in mine.iterdir()] == ['notes.txt']


def test_what_was_held_out_of_another_out_is_not_written_over(tars, tmp_path, workers_here, capsys):
    out = tmp_path / 'out'
    argv = [tars, out, '--held_out', 3]
    convert.main([str(argument) for argument in argv])
    before = contents(Path(f'{out}-held-out'))
    shutil.rmtree(out)
    assert 'held out of another OUT' in error_line(capsys, *argv)
    assert contents(Path(f'{out}-held-out')) == before and not out.exists()


def test_the_place_of_another_runs_held_out_samples_is_no_out(tars, tmp_path, workers_here, monkeypatch, capsys):
    out = tmp_path / 'out'
    argv = [str(tars), str(out), '--held_out', '3']
    with monkeypatch.context() as patches:
        kill_at(patches, 2)  # both are claimed
        with pytest.raises(Killed):
            convert.main(argv)
    assert [list(folder) for folder in contents(out, Path(f'{out}-held-out'))] == [['claim.json'], ['claim.json']]
    line = error_line(capsys, tars, f'{out}-held-out', '--held_out', 3)
    assert 'was begun with what was held out of another dataset' in line
    assert convert.main(argv) == 0
    assert [len(side) for side in sides(out)] == [21, 3]


def test_a_dataset_in_the_place_of_held_out_samples_is_not_written_over(tars, tmp_path, workers_here, monkeypatch,
                                                                        capsys):
    out, beside = tmp_path / 'out', tmp_path / 'out-held-out'
    argv = [str(tars), str(out), '--held_out', '3']
    with monkeypatch.context() as patches:
        kill_at(patches, 2)
        with pytest.raises(Killed):
            convert.main(argv)
    (beside / 'index.json').write_text('as an earlier version could end that took it for an OUT')
    before = contents(beside)
    assert f'OUT {beside} already holds a dataset' in error_line(capsys, *argv)
    assert contents(beside) == before


def test_what_was_held_out_and_is_gone_before_the_run_has_ended_is_made_anew(tars, tmp_path, workers_here, monkeypatch):
    argv = [str(tars), '--held_out', '7', '--size_limit', '1kb']
    convert.main([*argv, str(tmp_path / 'undisturbed')])
    out = tmp_path / 'out'

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt
    monkeypatch.setattr(convert, 'merge_parts', interrupted)
    with pytest.raises(SystemExit):
        convert.main([*argv, str(out)])
    monkeypatch.undo()
    monkeypatch.setattr(convert, 'open_workers', lambda args, make, num_parts: WorkersHere(make))
    shutil.rmtree(f'{out}-held-out')
    assert convert.main([*argv, str(out)]) == 0
    undisturbed = tmp_path / 'undisturbed'
    assert contents(out, Path(f'{out}-held-out')) == contents(undisturbed, Path(f'{undisturbed}-held-out'))


def test_where_the_held_out_samples_cannot_lie_out_is_not_begun(tars, tmp_path, workers_here, monkeypatch, capsys):
    out = tmp_path / 'out'
    create = FolderOutput.create

    def refuse_beside(output, name, content):
        if output.out.endswith('-held-out'):
            raise DataError(f'{output.place} cannot be written or read: Permission denied')
        return create(output, name, content)
    with monkeypatch.context() as patches:
        patches.setattr(FolderOutput, 'create', refuse_beside)
        with pytest.raises(SystemExit):
            convert.main([str(tars), str(out), '--held_out', '3'])
    assert 'out-held-out cannot be written' in capsys.readouterr().err
    assert convert.main([str(tars), str(out)]) == 0


def test_an_out_whose_last_image_is_gone_is_given_back_without_its_edge(tmp_path, workers_here, capsys):
    tar = write_tar(tmp_path / 'in/x.tar', {name: content for shade in (1, 2, 3)
                                                for name, content in sample_files(f'{shade}', shade).items()})
    whole = tar.read_bytes()
    tar.write_bytes(whole[:whole.index(b'3.jpg') + 600])
    out = tmp_path / 'out'
    argv = [str(tmp_path / 'in'), str(out), '--held_out', '1']
    assert convert.main(argv) == 1
    tar.write_bytes(b'no tar any more')
    with pytest.raises(SystemExit):
        convert.main(argv)
    assert 'nothing could be converted' in capsys.readouterr().err
    assert [sorted(folder) for folder in contents(out, Path(f'{out}-held-out'))] == [
        ['claim.json', 'skipped.jsonl'], ['claim.json']]


@pytest.mark.parametrize('flags, words', [
    (['--held_out', '4'], 'was begun with --held_out 3, not with --held_out 4'),
    (['--held_out', '3', '--seed', '1'], 'was begun with --seed 17, not with --seed 1;'),
    ([], 'was begun with --held_out 3, not without --held_out')])
def test_a_run_that_would_hold_out_others_does_not_go_on(tars, tmp_path, workers_here, monkeypatch, capsys, flags,
                                                         words):
    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(convert, 'hold_out', interrupted)
    with pytest.raises(SystemExit):
        convert.main([str(tars), str(tmp_path / 'out'), '--held_out', '3'])
    monkeypatch.undo()
    assert words in error_line(capsys, tars, tmp_path / 'out', *flags)


def test_the_next_command_evaluates_on_them(tars, tmp_path, workers_here, capsys):
    out = tmp_path / 'my photos'
    convert.main([str(tars), str(out), '--held_out', '3'])
    printed = capsys.readouterr().out
    assert f'held out   3 samples, in {out}-held-out\n' in printed
    [command] = [line.removeprefix('next') for line in printed.splitlines() if line.startswith('next')]
    args = parse(Train, '', shlex.split(command)[2:])
    assert (args.remote, args.eval_remote) == (str(out), f'{out}-held-out')


def test_in_a_store_they_lie_beside_out_as_well(tars, tmp_path, monkeypatch, workers_here):
    with local_s3(monkeypatch) as store:
        assert convert.main([str(tars), 's3://bucket/mds/', '--held_out', '9', '--size_limit', '1kb']) == 0
        kept = captions_in('s3://bucket/mds', tmp_path / 'one')
        held_out = captions_in('s3://bucket/mds-held-out', tmp_path / 'two')
        assert store.order[-1] == 'mds/index.json'
    assert len(held_out) == 9 and sorted(kept + held_out) == sorted(ALL)


@pytest.mark.parametrize('out, expected', [
    ('photos', 'photos-held-out'), ('a/b/', 'a/b-held-out'), ('s3://bucket/mds/', 's3://bucket/mds-held-out'),
    ('azure://me.blob.core.windows.net/box/mds', 'azure://me.blob.core.windows.net/box/mds-held-out')])
def test_the_place_is_beside_out(out, expected):
    assert held_out_beside(out) == expected


def test_the_place_beside_the_folder_one_is_in_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert held_out_beside('.') == f'{tmp_path}-held-out'


@pytest.mark.parametrize('out', ['s3://bucket', 's3://bucket/', 'azure://me.blob.core.windows.net/box'])
def test_beside_a_bucket_there_is_nothing(out, tmp_path, capsys):
    assert 'needs a folder beside OUT' in error_line(capsys, tmp_path, out, '--held_out', 3)
