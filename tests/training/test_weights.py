"""A second phase: it starts from the weights of the first, and goes on from its own checkpoints when it is resumed."""
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from composer import Callback

from benchmark import StableDiffusion, main
from sdbench.models.loading import find_model
from sdbench.training.checkpoints import checkpoints_in, load_checkpoint
from sdbench.training.weights import load_initial_weights
from tests.forked_runs import RUN, run, traced
from tests.runs import TINY, assert_equal, assert_same_training, flags_of, one_error_line
from tests.samples import Hostile, good, write_shards


@pytest.fixture(scope='module')
def first_phase(tmp_path_factory) -> Path:
    """The folder with the checkpoints of 2 and 4 batches at 64 pixels."""
    folder = tmp_path_factory.mktemp('first')
    main(['--use_synth_data', '--use_ema', '--ema_half_life', '2ba', *TINY, '--save_folder', str(folder / 'kept'),
          '--save_interval', '2ba', '--results', str(folder / 'results')])
    return folder / 'kept'


def unet_and_average(state: dict) -> tuple[dict, dict]:
    unet = {name: tensor for name, tensor in state['model'].items() if name.startswith('unet.')}
    return unet, dict(state['algorithms'])['EMA']['ema_model']['named_parameters_dict']


def test_a_second_phase_starts_from_weights_and_average_with_another_size_and_all_else_fresh(first_phase, results,
                                                                                            tmp_path, shards):
    at_start = {}

    class Witness(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch.value == 0:
                [optimizer], [ema] = state.optimizers, state.algorithms
                at_start['unet'] = {f'unet.{name}': p.clone() for name, p in state.model.unet.state_dict().items()}
                at_start['average'] = {name: p.clone() for name, p in ema.ema_model.named_parameters()}
                at_start['optimizer'] = len(optimizer.state)

    kept = tmp_path / 'kept'
    record = main(['--remote', shards, *TINY, '--image_size', '96', '--device_train_microbatch_size', '2', '--use_ema',
                   '--load_weights', str(first_phase), '--save_folder', str(kept), '--max_duration', '2ba',
                   '--save_interval', '1ba', '--num_workers', '0', '--results', str(results)], [Witness()])
    unet, average = unet_and_average(load_checkpoint(checkpoints_in(str(first_phase))[-1])['state'])
    assert_equal(at_start['unet'], dict(unet))
    assert_equal(at_start['average'], dict(average))
    assert at_start['optimizer'] == 0
    assert record['first_batch'] == 0
    assert record['load_weights'] == str(first_phase)
    after_one = load_checkpoint(checkpoints_in(str(kept))[0])['state']
    assert after_one['timestamp']['Timestamp']['batch'] == 1
    weights, averages = unet_and_average(after_one)
    for name, before in average.items():
        moved = before + (weights[name] - before) * (1 - 2 ** (-1 / 1000))
        torch.testing.assert_close(averages[name], moved, atol=1e-7, rtol=1e-6)


@pytest.mark.long
def test_two_ranks_resume_a_second_phase_from_its_own_checkpoints_exactly(server, tmp_path, first_phase, shards):
    held_out = write_shards(tmp_path / 'held', [good(100 + i) for i in range(5)])
    argv = [*RUN, '--remote', shards, '--image_size', '96', '--max_duration', '4ba', '--save_interval', '1ba',
            '--caption_drop', '0.5', '--eval_remote', held_out, '--eval_interval', '2ba', '--num_workers', '0']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    whole.mkdir(), killed.mkdir()
    copied = tmp_path / 'first'
    shutil.copytree(first_phase, copied, symlinks=True)
    argv += ['--load_weights', str(copied)]
    assert run(server, 2, argv, whole) == [0, 0], (whole / 'log').read_text()
    assert -signal.SIGKILL in run(server, 2, argv, killed, ('start', 2))
    shutil.rmtree(copied)  # a resumed run needs it no more
    assert run(server, 2, argv, killed) == [0, 0], (killed / 'log').read_text()
    expected = traced(whole, 2)
    assert traced(killed, 2) == expected
    assert all(sorted(rank) == list(range(4)) for rank in expected)
    assert_same_training(killed / 'checkpoints', whole / 'checkpoints')
    losses = [json.loads((folder / 'results.jsonl').read_text().splitlines()[-1])['eval_loss']
              for folder in (whole, killed)]
    assert losses[0] == losses[1]


def fresh_model(seed: int = 17) -> StableDiffusion:
    torch.manual_seed(seed)
    return StableDiffusion('tiny', 64)


def test_weights_come_from_a_file_a_folder_a_unet_a_pipeline_and_a_store(first_phase, tmp_path, s3, capfd):
    trained = StableDiffusion('tiny', 64)
    trained.load_state_dict(load_checkpoint(checkpoints_in(str(first_phase))[-1])['state']['model'])
    trained.unet.save_pretrained(tmp_path / 'alone')
    trained.unet.save_pretrained(tmp_path / 'pipeline' / 'unet')
    trained.scheduler.save_pretrained(tmp_path / 'pipeline' / 'scheduler')
    for path in checkpoints_in(str(first_phase)):
        s3.client.upload_file(path, 'bucket', f'runs/1/{Path(path).name}')
    cut = shutil.copytree(first_phase, tmp_path / 'cut', symlinks=True) / 'ep0-ba9-rank0.pt'
    cut.write_bytes(Path(checkpoints_in(str(first_phase))[-1]).read_bytes()[:1000])  # its run is about to write it
    of_checkpoints = [checkpoints_in(str(first_phase))[-1], str(first_phase), str(first_phase / 'latest-rank0.pt'),
                      str(cut.parent), 's3://bucket/runs/1', 's3://bucket/runs/1/ep0-ba4-rank0.pt']
    expected, average = unet_and_average(load_checkpoint(of_checkpoints[0])['state'])
    model = fresh_model()
    for place in (*of_checkpoints, str(tmp_path / 'alone'), str(tmp_path / 'pipeline')):
        for weight in model.unet.parameters():
            torch.nn.init.zeros_(weight)
        found = load_initial_weights(place, model, find_model('tiny'))
        for name, weight in model.unet.state_dict().items():
            assert torch.equal(weight, expected[f'unet.{name}']), place
        if place in of_checkpoints:
            assert_equal(dict(found['ema_model']['named_parameters_dict']), dict(average))
        else:
            assert found is None
    assert cut.exists()


def bad_places(first_phase: Path, folder: Path, model_folder: str) -> dict[str, tuple[str, list[str]]]:
    """What cannot be started from, and words of the error."""
    checkpoint = load_checkpoint(checkpoints_in(str(first_phase))[-1])
    (folder / 'empty').mkdir()
    torch.save({'state': Hostile(folder / 'ran')}, folder / 'hostile.pt')
    torch.save({'some': 'tensors'}, folder / 'other.pt')
    (folder / 'half.pt').write_bytes(Path(checkpoints_in(str(first_phase))[-1]).read_bytes()[:1000])
    bias = checkpoint['state']['model'].pop('unet.conv_in.bias')
    torch.save(checkpoint, folder / 'less.pt')
    checkpoint['state']['model'] |= {'unet.conv_in.bias': bias, 'unet.foreign': bias}
    torch.save(checkpoint, folder / 'more.pt')
    fresh_model().unet.save_pretrained(folder / 'pickled', safe_serialization=False)
    fresh_model().unet.save_pretrained(folder / 'heads')
    config = folder / 'heads' / 'config.json'
    config.write_text(json.dumps(json.loads(config.read_text()) | {'attention_head_dim': [4, 4]}))
    checkpoint['state']['model'].pop('unet.foreign')
    flags_of(checkpoint)['model']['scheduler']['prediction_type'] = 'v_prediction'
    torch.save(checkpoint, folder / 'v.pt')
    return {str(folder / 'nowhere'): ['is not there'], str(folder / 'empty'): ['holds no whole checkpoint'],
            str(folder / 'hostile.pt'): ['could run code'],
            str(folder / 'other.pt'): ['is no checkpoint of a training'],
            str(folder / 'half.pt'): ['is no checkpoint of a training'],
            str(folder / 'less.pt'): ['another UNet', 'conv_in.bias'],
            str(folder / 'more.pt'): ['another UNet', 'foreign'],
            str(folder / 'pickled'): ['holds no UNet'],
            str(folder / 'heads'): ['attention_head_dim of its unet was [4, 4], and is [2, 4] now'],
            str(folder / 'v.pt'): ['prediction_type of its scheduler was "v_prediction", and is "epsilon" now', 'copy'],
            model_folder: ['prediction_type of its scheduler was "v_prediction", and is "epsilon" now']}


def test_what_does_not_fit_is_one_line(first_phase, tmp_path, model_folder):
    for place, words in bad_places(first_phase, tmp_path, model_folder).items():
        with pytest.raises(ValueError) as error:
            load_initial_weights(place, fresh_model(), find_model('tiny'))
        line = str(error.value)
        assert line.startswith(f'--load_weights {place}'), line
        assert all(word in line for word in words), line
        assert '\n' not in line
    assert not (tmp_path / 'ran').exists()


def test_weights_that_were_trained_with_another_text_encoder_are_refused(first_phase, results, capfd):
    line = one_error_line(['--use_synth_data', *TINY, '--seed', '18', '--load_weights', first_phase, '--results',
                           results], capfd)
    assert 'was trained with another vae' in line
    assert '--seed' in line
