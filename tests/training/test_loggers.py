"""The curves of a run, at Weights & Biases and in TensorBoard's files."""
import json
import re
import subprocess
import sys
import urllib.request
from urllib.parse import urlencode

from torch.utils.tensorboard import SummaryWriter

from benchmark import main
from tests.runs import TINY
from tests.samples import encoded, picture, write_shards
from training.loggers import OneFolderTensorboardLogger, new_folder


def test_a_run_leaves_its_record_and_nothing_else_without_the_flags_of_a_logger(plain_run):
    assert [path.name for path in plain_run.folder.iterdir()] == ['results.jsonl']


def test_a_logger_that_fails_does_not_take_the_record_with_it(results, tmp_path, monkeypatch, capfd):
    def fail(*_):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(OneFolderTensorboardLogger, 'keep_record', fail)
    record = main(['--use_synth_data', *TINY, '--tensorboard', str(tmp_path / 'board'), '--results', str(results)])
    assert json.loads(results.read_text()) == record and record['status'] == 'complete'
    assert 'OneFolderTensorboardLogger did not take the record' in capfd.readouterr().err


def test_one_tensorboard_file_in_a_folder_of_models_name_size_and_date_holds_loss_settings_and_record(tmp_path, shards,
                                                                                                      results):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    held_out = write_shards(tmp_path / 'held', [{'jpg': encoded(picture(1)), 'caption': 'held out'}] * 4)
    record = main(['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--max_duration', '2ep',
                   '--eval_remote', held_out, '--eval_interval', '1ep', '--tensorboard', str(tmp_path / 'board'),
                   '--results', str(results)])
    [folder] = (tmp_path / 'board').iterdir()
    assert re.fullmatch(r'tiny-64px-20\d\d-\d\d-\d\d-\d{6}', folder.name)
    [file] = folder.iterdir()
    events = EventAccumulator(str(file)).Reload()
    assert len(events.Scalars('loss/train/total')) == 6
    assert len(events.Scalars('metrics/eval/MeanSquaredError')) == record['evaluations'] == 2
    for name, content in (('settings', {'batch_size': 8, 'image_size': 64}), ('record', record)):
        [text] = events.Tensors(f'{name}/text_summary')
        shown = json.loads(text.tensor_proto.string_val[0])
        assert shown.items() >= content.items()


def asked(server: subprocess.Popen, question: str):
    """What a TensorBoard answers, which tells its address when it has read its folder."""
    lines = []
    for line in server.stderr:
        lines.append(line)
        if address := re.search(r'at (http://localhost:\d+/)', line):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # past any proxy of this machine
            with opener.open(address[1] + question) as answer:
                return json.load(answer)
    raise AssertionError(''.join(lines))


def test_tensorboard_starts_and_shows_the_losses_of_a_run(results, tmp_path):
    board = tmp_path / 'board'
    record = main(['--use_synth_data', *TINY, '--tensorboard', str(board), '--results', str(results)])
    [run] = board.iterdir()
    command = [sys.executable, '-m', 'tensorboard.main', '--logdir', board, '--port', '0']
    read_first = ['--load_fast', 'false', '--reload_interval', '0', '--reload_task', 'blocking']
    with subprocess.Popen([*command, *read_first], stderr=subprocess.PIPE, text=True) as server:
        try:
            question = urlencode({'run': run.name, 'tag': 'loss/train/total'})
            losses = asked(server, f'data/plugin/scalars/scalars?{question}')
        finally:
            server.terminate()
    assert [batch for _, batch, _ in losses] == [0, 1, 2, 3]
    assert losses[-1][2] == record['loss']


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path):
    assert len({new_folder(str(tmp_path / 'board'), 'tiny-64px') for _ in range(5)}) == 5


def test_a_logger_that_fails_while_it_trains_is_warned_of_once_and_the_training_goes_on(results, tmp_path, monkeypatch,
                                                                                      capfd):
    def fail(*_, **__):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(SummaryWriter, 'add_scalar', fail)
    record = main(['--use_synth_data', *TINY, '--tensorboard', str(tmp_path / 'board'), '--results', str(results)])
    assert record['status'] == 'complete'
    assert capfd.readouterr().err.count('warning: OneFolderTensorboardLogger failed (OSError: [Errno 28] No space') == 1
