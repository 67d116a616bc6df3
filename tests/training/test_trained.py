"""What a checkpoint holds is told apart, whoever wrote it: the live weights, and their average."""
import pytest
import torch

from sdbench.models.loading import find_model
from sdbench.training.weights import load_initial_weights, read_trained, trained_pipeline
from tests.forked_runs import run_ranks
from tests.training import composers_average


@pytest.fixture(scope='module', params=[1, 2], ids=['one rank', 'two ranks'])
def trained_by_composer(request, tmp_path_factory, server, smallest_model):
    """A folder with a checkpoint that Composer's own EMA wrote, and what the weights then were."""
    folder = tmp_path_factory.mktemp('composer')
    logs = [folder / f'log{rank}' for rank in range(request.param)]
    codes = run_ranks(server, logs, composers_average.main, [(smallest_model, folder)] * request.param)
    assert codes == [0] * request.param, [log.read_text() for log in logs]
    return folder / 'kept', torch.load(folder / 'weights.pt')


def test_the_average_and_the_weights_that_composers_own_ema_saved_are_told_apart(trained_by_composer):
    checkpoints, expected = trained_by_composer
    trained = read_trained(str(checkpoints), 'CHECKPOINT')
    assert trained.batch == composers_average.BATCHES
    assert not torch.equal(expected['live'], expected['averaged'])
    torch.testing.assert_close(trained.live['conv_in.bias'], expected['live'], atol=0, rtol=0)
    torch.testing.assert_close(trained.averaged['conv_in.bias'], expected['averaged'], atol=1e-7, rtol=1e-5)


def test_the_pipeline_of_such_a_checkpoint_draws_with_the_average_unless_it_is_told_otherwise(
        trained_by_composer, smallest_model):
    checkpoints, expected = trained_by_composer
    for live, weights in ((False, 'averaged'), (True, 'live')):
        trained = read_trained(str(checkpoints), 'CHECKPOINT')
        pipeline = trained_pipeline(trained, 'CHECKPOINT', smallest_model, live=live)
        torch.testing.assert_close(pipeline.unet.conv_in.bias.detach(), expected[weights], atol=1e-7, rtol=1e-5)


def test_a_training_that_starts_from_such_a_checkpoint_has_its_weights_and_its_average(trained_by_composer,
                                                                                       smallest_model):
    checkpoints, expected = trained_by_composer
    torch.manual_seed(3)  # of the random encoders, which have to be the same
    model = composers_average.StableDiffusion(smallest_model, image_size=16)
    state = load_initial_weights(str(checkpoints), model, find_model(smallest_model))
    average = state['ema_model']['named_parameters_dict']['unet.conv_in.bias']
    torch.testing.assert_close(model.unet.conv_in.bias.detach(), expected['live'], atol=0, rtol=0)
    torch.testing.assert_close(average, expected['averaged'], atol=1e-7, rtol=1e-5)
    assert not state['ema_weights_active']
