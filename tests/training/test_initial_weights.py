"""A second phase: it starts from the weights of the first, and goes on from its own checkpoints when it is resumed."""
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from composer import Callback

from benchmark import StableDiffusion, main
from tests.forked_runs import RUN, run, traced
from tests.runs import TINY, assert_equal, assert_same_training, one_error_line
from tests.samples import Hostile, good, write_shards
from tests.test_evaluation import loss_by_hand
from training.checkpoints import checkpoints, load_checkpoint
from training.initial_weights import load_initial_weights


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
    unet, average = unet_and_average(load_checkpoint(checkpoints(str(first_phase))[-1])['state'])
    assert_equal(at_start['unet'], dict(unet))
    assert_equal(at_start['average'], dict(average))
    assert at_start['optimizer'] == 0 and record['first_batch'] == 0 and record['load_weights'] == str(first_phase)
    after_one = load_checkpoint(checkpoints(str(kept))[0])['state']
    assert after_one['timestamp']['Timestamp']['batch'] == 1
    weights, averages = unet_and_average(after_one)
    for name, before in average.items():
        moved = before + (weights[name] - before) * (1 - 2 ** (-1 / 1000))
        torch.testing.assert_close(averages[name], moved, atol=1e-7, rtol=1e-6)


def test_without_ema_or_with_a_later_start_the_average_is_not_taken_over(first_phase, results, tmp_path):
    argv = ['--use_synth_data', *TINY, '--max_duration', '2ba', '--load_weights', str(first_phase), '--results',
            str(results), '--use_ema', '--ema_start', '2ba', '--save_folder', str(tmp_path / 'kept')]
    main(argv)
    weights, averages = unet_and_average(load_checkpoint(tmp_path / 'kept' / 'latest-rank0.pt')['state'])
    for name, average in averages.items():
        assert torch.equal(average, weights[name])  # it has just started, as a copy


@pytest.mark.long
def test_two_ranks_resume_a_second_phase_from_its_own_checkpoints_exactly(server, tmp_path, first_phase, shards):
    held_out = [good(100 + i) for i in range(5)]
    argv = [*RUN, '--remote', shards, '--image_size', '96', '--max_duration', '4ba', '--save_interval', '1ba',
            '--caption_drop', '0.5', '--eval_remote', write_shards(tmp_path / 'held', held_out), '--eval_interval',
            '2ba', '--num_workers', '0']
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
    assert traced(killed, 2) == expected and all(sorted(rank) == list(range(4)) for rank in expected)
    assert_same_training(killed / 'checkpoints', whole / 'checkpoints')
    dropped = [caption[1] == 49407 for rank in expected for lines in rank.values() for line in lines
               for caption in json.loads(line)[1]]
    assert 0 < sum(dropped) < len(dropped) == 16
    for folder in (whole, killed):
        record = json.loads((folder / 'results.jsonl').read_text().splitlines()[-1])
        assert (record['eval_batch'], record['evaluations']) == (4, 2 if folder == whole else 1)
        by_hand = loss_by_hand(checkpoints(str(folder / 'checkpoints'))[-1], held_out, 96)
        assert record['eval_loss'] == pytest.approx(by_hand, rel=1e-3)  # two decoders of JPEG differ a little


def forms(first_phase: Path, folder: Path) -> dict[str, str]:
    """Each kind of place that weights can lie in, and what holds them."""
    model = StableDiffusion('tiny', 64)
    model.load_state_dict(load_checkpoint(checkpoints(str(first_phase))[-1])['state']['model'])
    model.unet.save_pretrained(folder / 'alone')
    model.unet.save_pretrained(folder / 'pipeline' / 'unet')
    model.scheduler.save_pretrained(folder / 'pipeline' / 'scheduler')
    return {'file': checkpoints(str(first_phase))[-1], 'folder': str(first_phase), 'link':
            str(first_phase / 'latest-rank0.pt'), 'unet': str(folder / 'alone'), 'pipeline': str(folder / 'pipeline')}


def fresh_model(seed: int = 17) -> StableDiffusion:
    torch.manual_seed(seed)
    return StableDiffusion('tiny', 64)


def test_weights_come_from_a_file_a_folder_a_unet_a_pipeline_and_a_store(first_phase, tmp_path, s3):
    places = forms(first_phase, tmp_path)
    for path in checkpoints(str(first_phase)):
        s3.client.upload_file(path, 'bucket', f'runs/1/{Path(path).name}')
    places |= {'store': 's3://bucket/runs/1', 'object': 's3://bucket/runs/1/ep0-ba4-rank0.pt'}
    expected, average = unet_and_average(load_checkpoint(places['file'])['state'])
    model = fresh_model()
    for form, place in places.items():
        for weight in model.unet.parameters():
            torch.nn.init.zeros_(weight)
        found = load_initial_weights(place, model)
        for name, weight in model.unet.state_dict().items():
            assert torch.equal(weight, expected[f'unet.{name}']), form
        if form in ('unet', 'pipeline'):
            assert found is None
        else:
            assert_equal(dict(found['ema_model']['named_parameters_dict']), dict(average))


def test_a_checkpoint_of_the_middle_of_an_evaluation_gives_the_live_weights(first_phase, tmp_path):
    whole = checkpoints(str(first_phase))[-1]
    checkpoint = load_checkpoint(whole)
    unet, average = unet_and_average(checkpoint['state'])
    checkpoint['state']['model'].update(average)
    ema = dict(checkpoint['state']['algorithms'])['EMA']
    ema['ema_model']['named_parameters_dict'] = {name: unet[name] for name in average}
    ema['ema_weights_active'] = True
    torch.save(checkpoint, tmp_path / 'swapped.pt')
    model = fresh_model()
    found = load_initial_weights(str(tmp_path / 'swapped.pt'), model)
    assert_equal({f'unet.{name}': weight for name, weight in model.unet.state_dict().items()}, dict(unet))
    assert_equal(dict(found['ema_model']['named_parameters_dict']), dict(average))
    assert not found['ema_weights_active']


def test_the_newest_whole_checkpoint_is_taken_and_an_unfinished_one_is_left_to_its_run(first_phase, tmp_path):
    shutil.copytree(first_phase, tmp_path / 'kept', symlinks=True)
    unfinished = tmp_path / 'kept' / 'ep0-ba9-rank0.pt'
    unfinished.write_bytes(Path(checkpoints(str(first_phase))[-1]).read_bytes()[:1000])
    assert load_initial_weights(str(tmp_path / 'kept'), fresh_model())
    assert unfinished.exists()


def bad_places(first_phase: Path, folder: Path, model_folder: str) -> dict[str, tuple[str, list[str]]]:
    """What cannot be started from, and words of the error."""
    checkpoint = load_checkpoint(checkpoints(str(first_phase))[-1])
    (folder / 'empty').mkdir()
    torch.save({'state': Hostile(folder / 'ran')}, folder / 'hostile.pt')
    torch.save({'some': 'tensors'}, folder / 'other.pt')
    (folder / 'half.pt').write_bytes(Path(checkpoints(str(first_phase))[-1]).read_bytes()[:1000])
    del checkpoint['state']['model']['unet.conv_in.bias']
    torch.save(checkpoint, folder / 'less.pt')
    unet = fresh_model().unet
    unet.register_to_config(norm_num_groups=16)
    unet.save_pretrained(folder / 'groups')
    unet.register_to_config(norm_num_groups=32)
    unet.save_pretrained(folder / 'pickled', safe_serialization=False)
    return {str(folder / 'nowhere'): ['does not exist'], str(folder / 'empty'): ['neither a whole checkpoint'],
            str(folder / 'hostile.pt'): ['would run code when loaded'],
            str(folder / 'other.pt'): ['is no checkpoint of a training'],
            str(folder / 'half.pt'): ['not written to its end'],
            str(folder / 'less.pt'): ['another UNet', 'conv_in.bias'],
            str(folder / 'groups'): ['norm_num_groups 16'], str(folder / 'pickled'): ['holds no UNet'],
            model_folder: ['predicts v_prediction', 'epsilon']}


def test_what_does_not_fit_is_one_line(first_phase, tmp_path, model_folder):
    for place, words in bad_places(first_phase, tmp_path, model_folder).items():
        with pytest.raises(ValueError) as error:
            load_initial_weights(place, fresh_model())
        line = str(error.value)
        assert line.startswith(f'--load_weights {place}') and all(word in line for word in words), line
        assert '\n' not in line
    assert not (tmp_path / 'ran').exists()


def test_weights_that_were_trained_with_another_text_encoder_are_refused(first_phase, results, capfd):
    line = one_error_line(['--use_synth_data', *TINY, '--seed', '18', '--load_weights', first_phase, '--results',
                           results], capfd)
    assert 'was trained with another vae' in line and '--seed' in line
