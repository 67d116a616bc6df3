"""What a run puts somewhere for a while goes with it, or with a later run; what lives or is another's stays."""
import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.forks import living_child
from tests.privileges import without_privileges
from training import own_files
from training.own_files import PrivateFolder, folder_written_whole, remove_unfinished, written_whole


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    return tmp_path


def write_for_ever(folder: Path, ready) -> None:
    with written_whole(folder / 'ep0-ba1-rank0.pt') as file:
        file.write(b'half')
        file.flush()
        ready()
        signal.pause()


def test_a_file_that_a_killed_run_was_writing_is_removed_and_one_that_is_being_written_is_not(tmp_path):
    for name in ('ep0-ba1-rank0.pt.tmp', 'x.sd-benchmark-1.tmp', f'sd-benchmark-{"a" * 32}.tmp'):
        (tmp_path / name).touch()  # not ours
    others = set(os.listdir(tmp_path))
    with living_child(lambda ready: write_for_ever(tmp_path, ready)):
        [name] = set(os.listdir(tmp_path)) - others
        assert remove_unfinished(str(tmp_path)) == [] and (tmp_path / name).read_bytes() == b'half'
    assert remove_unfinished(str(tmp_path)) == [name]
    assert set(os.listdir(tmp_path)) == others


def test_a_folder_that_a_killed_export_was_writing_is_removed_and_one_that_is_being_written_is_not(tmp_path, capfd):
    for name in ('out.unfinished-1', f'x.sd-benchmark-{"a" * 32}.tmp', f'sd-benchmark-{"a" * 32}.tmp'):
        (tmp_path / name).mkdir()  # without a lock, or not of this program
    others = set(os.listdir(tmp_path))

    def live(ready):
        with folder_written_whole(tmp_path / 'out') as folder:
            Path(folder, 'half').touch()
            ready()
            signal.pause()

    with living_child(live):
        [name] = set(os.listdir(tmp_path)) - others
        assert remove_unfinished(str(tmp_path)) == [] and list((tmp_path / name).rglob('half'))
    assert remove_unfinished(str(tmp_path)) == [name] and set(os.listdir(tmp_path)) == others
    assert f'removed {tmp_path / name}, which a killed' in capfd.readouterr().err


def test_what_another_user_left_unfinished_is_left_alone(tmp_path):
    closed = tmp_path / f'x.sd-benchmark-{"a" * 32}.tmp'
    closed.touch(mode=0)
    assert without_privileges(remove_unfinished, str(tmp_path)) == [] and closed.exists()


def test_what_a_link_with_such_a_name_leads_to_is_left_alone(tmp_path):
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    for name in (own_files.LOCK, 'mine'):
        (elsewhere / name).touch()
    for name, target in (('a', elsewhere), ('b', elsewhere / 'mine')):
        (tmp_path / f'x.sd-benchmark-{name * 32}.tmp').symlink_to(target)
    assert remove_unfinished(str(tmp_path)) == []
    assert len(os.listdir(tmp_path)) == 3 and len(os.listdir(elsewhere)) == 2


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    with pytest.raises(SystemExit), folder_written_whole(tmp_path / 'new' / 'x') as folder:
        Path(folder, 'half').touch()
        raise SystemExit
    assert os.listdir(tmp_path / 'new') == []
    mode = os.umask(0o027)
    with folder_written_whole(tmp_path / 'x') as folder:
        Path(folder, 'whole').touch()
        assert not (tmp_path / 'x').exists()
    os.umask(mode)
    assert os.listdir(tmp_path / 'x') == ['whole'] and os.stat(tmp_path / 'x').st_mode & 0o777 == 0o750
    assert sorted(os.listdir(tmp_path)) == ['new', 'x']


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / 'x'
    path.write_text('before')
    with pytest.raises(SystemExit), written_whole(path) as file:
        file.write(b'half')
        raise SystemExit
    assert path.read_text() == 'before' and os.listdir(tmp_path) == ['x']
    with written_whole(path) as file:
        file.write(b'after')
    assert path.read_text() == 'after' and os.listdir(tmp_path) == ['x']


def test_a_private_folder_of_a_killed_run_goes_with_the_next_and_that_of_a_living_one_stays(temporary):
    (temporary / 'sd-benchmark-other').mkdir(mode=0o700)  # without a lock: perhaps one that is just being made

    def live(ready):
        folder = PrivateFolder()
        Path(folder.name, 'checkpoint.pt').touch()
        ready()
        signal.pause()

    with living_child(live):
        [its] = set(os.listdir(temporary)) - {'sd-benchmark-other'}
        with PrivateFolder() as mine:
            assert os.stat(mine).st_mode & 0o777 == 0o700 and its in os.listdir(temporary)
    with PrivateFolder():
        assert its not in os.listdir(temporary)
    assert os.listdir(temporary) == ['sd-benchmark-other']


def test_what_is_not_private_or_is_a_link_is_left_alone(temporary, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp('elsewhere')
    for folder in (elsewhere, temporary / 'sd-benchmark-open'):
        folder.mkdir(exist_ok=True)
        (folder / own_files.LOCK).touch()
    elsewhere.chmod(0o700)
    (temporary / 'sd-benchmark-link').symlink_to(elsewhere)
    with PrivateFolder():
        pass
    assert (elsewhere / own_files.LOCK).exists() and (temporary / 'sd-benchmark-open' / own_files.LOCK).exists()
