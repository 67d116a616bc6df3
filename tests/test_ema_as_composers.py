"""The average as users of Composer's EMA and of the original know it: Composer's own algorithm is the reference."""
import copy
import itertools

import pytest
import torch
from composer import Callback, ComposerModel, Event, Trainer
from composer.algorithms.ema import ema as composers
from torch.utils.data import DataLoader, TensorDataset

from ema import EMA, ShadowModel, compute_ema

AVERAGES = [{'half_life': '2ba'}, {'half_life': '1000ba'}, {'half_life': '1ep'}, {'half_life': '2ep'},
            {'half_life': None, 'smoothing': 0.7}]
STARTS = ['0.0dur', '0.3dur', '0.5dur', '0ba', '3ba', '5ba', '1ep', '2ep']
INTERVALS = [None, '1ba', '2ba', '3ba', '5ba', '1ep', '2ep']


def combinations() -> list[dict]:
    """All arguments that fit together; Composer wants a unit for a half-life, and an interval beside a smoothing."""
    found = []
    for average, start, interval in itertools.product(AVERAGES, STARTS, INTERVALS):
        half_life = average['half_life']
        if half_life is None:
            fits = interval is not None
        else:
            fits = interval is None or interval[-2:] == half_life[-2:]
        if fits:
            found.append({**average, 'ema_start': start, 'update_interval': interval})
    return found


class Net(ComposerModel):
    """Layers that train and one that does not, with buffers of floats and of whole numbers."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer('position_ids', torch.arange(200), persistent=False)

    def forward(self, batch):
        return self.layer(self.norm(self.frozen(batch[0])))

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])


def seeded_net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net()


def trainer_of(model: Net, algorithms, max_duration: str = '12ba', **options) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, generator=generator)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    return Trainer(model=model, train_dataloader=loader, max_duration=max_duration, algorithms=algorithms, seed=3,
                   optimizers=torch.optim.SGD(model.parameters(), lr=0.1), progress_bar=False, device='cpu', **options)


def tensors(shadow) -> dict[str, torch.Tensor]:
    return dict(shadow.named_parameters()) | dict(shadow.named_buffers())


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Equal but for position_ids, which never change, and which Composer's rounding makes others."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name == 'position_ids':
            assert torch.equal(ours[name], torch.arange(200))
            continue
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=0, msg=lambda text, name=name: f'{name}: {text}')


class Comparison(Callback):
    """After every batch and every epoch both algorithms have the same average."""

    def __init__(self, ours: EMA, theirs: composers.EMA):
        self.ours = ours
        self.theirs = theirs
        self.compared = 0

    def batch_end(self, state, logger):
        assert self.ours.ema_started == self.theirs.ema_started, state.timestamp
        if self.theirs.ema_started:
            assert_same(tensors(self.ours.ema_model), tensors(self.theirs.ema_model))
            self.compared += 1

    epoch_end = batch_end


@pytest.mark.parametrize('start', [
    start if start in ('0.3dur', '3ba') else pytest.param(start, marks=pytest.mark.long) for start in STARTS])
def test_every_combination_of_arguments_averages_as_composers(start):
    chosen = [arguments for arguments in combinations() if arguments['ema_start'] == start]
    assert len(chosen) > 15
    for arguments in chosen:
        ours, theirs = EMA(**arguments), composers.EMA(**arguments)
        comparison = Comparison(ours, theirs)
        trainer_of(seeded_net(), [ours, theirs], callbacks=[comparison]).fit()
        assert comparison.compared > 2, arguments


@pytest.mark.parametrize('smoothing', [0, 0.5, 0.99, 1])
def test_two_modules_average_as_composers(smoothing):
    model, ours = seeded_net(1), seeded_net(2)
    model.norm.num_batches_tracked.fill_(100)
    theirs = copy.deepcopy(ours)
    compute_ema(model, ours, smoothing)
    composers.compute_ema(model, theirs, smoothing)
    assert_same(tensors(ours), tensors(theirs))
    if smoothing == 0.5:
        expected = (seeded_net(2).layer.weight.double() + seeded_net(1).layer.weight.double()) / 2
        torch.testing.assert_close(ours.layer.weight.double(), expected, atol=1e-7, rtol=0)


def test_two_modules_that_differ_are_told_by_name():
    with pytest.raises(ValueError, match='first bias'):
        compute_ema(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False))


def test_whole_numbers_that_never_change_stay_whatever_the_rounding():
    net = seeded_net()
    shadow = ShadowModel(net)
    for smoothing in torch.rand(200).tolist():
        compute_ema(net, shadow, smoothing)
    assert torch.equal(shadow.named_buffers_dict['position_ids'], torch.arange(200))


def test_a_shadow_lists_its_tensors_as_composers_and_the_originals_did():
    net = seeded_net()
    shadow, theirs = ShadowModel(net), composers.EMAParameters(net)
    assert_same(tensors(shadow), tensors(theirs))
    trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
    assert [tensor.shape for tensor in shadow.parameters()] == [parameter.shape for parameter in trainable]
    assert len(shadow.buffers()) == len(list(net.buffers()))


def test_events_applied_by_hand_average_and_swap_as_composers():
    models, shadows = [], []
    for kind, shadow_kind in ((EMA, ShadowModel), (composers.EMA, composers.EMAParameters)):
        algorithm = kind(half_life='10ba', update_interval='1ba')
        algorithm.ema_model = shadow_kind(seeded_net(1))
        trainer = trainer_of(seeded_net(2), [])
        for event in (Event.BATCH_END, Event.EVAL_START):
            algorithm.apply(event, trainer.state, trainer.logger)
        models.append(tensors(copy.deepcopy(trainer.state.model)))
        algorithm.apply(Event.EVAL_END, trainer.state, trainer.logger)
        assert torch.equal(trainer.state.model.layer.weight, seeded_net(2).layer.weight)
        shadows.append(tensors(algorithm.ema_model))
    assert_same(*models)
    assert_same(*shadows)


@pytest.mark.parametrize('start', ['0ba', '9ba'])
def test_a_checkpoint_of_composers_ema_goes_on_as_if_it_had_been_ours(tmp_path, start):
    arguments = {'half_life': '4ba', 'ema_start': start}
    whole, ours = EMA(**arguments), EMA(**arguments)
    whole_net, net = seeded_net(), seeded_net(7)
    trainer_of(whole_net, [whole]).fit()
    trainer_of(seeded_net(), [composers.EMA(**arguments)], '6ba', save_folder=str(tmp_path), save_interval='6ba',
               save_filename='half.pt').fit()
    trainer_of(net, [ours], load_path=str(tmp_path / 'half.pt')).fit()
    assert_same(tensors(ours.ema_model), tensors(whole.ema_model))
    assert_same(dict(net.named_parameters()), dict(whole_net.named_parameters()))


def test_our_state_goes_into_composers_ema(tmp_path):
    whole, theirs = composers.EMA('4ba'), composers.EMA('4ba')
    trainer_of(seeded_net(), [whole]).fit()
    trainer_of(seeded_net(), [EMA('4ba')], '6ba', save_folder=str(tmp_path), save_interval='6ba',
               save_filename='half.pt').fit()
    trainer_of(seeded_net(7), [theirs], load_path=str(tmp_path / 'half.pt')).fit()
    assert_same(tensors(theirs.ema_model), tensors(whole.ema_model))


def state_of(ema: EMA) -> dict:
    return copy.deepcopy(ema.state_dict())


def test_names_of_several_devices_are_those_of_one():
    ema, loaded = EMA('4ba'), EMA('4ba')
    trainer_of(seeded_net(), [ema], '6ba').fit()
    state = state_of(ema)
    for kind, averages in state['ema_model'].items():
        state['ema_model'][kind] = {f'module.{name}': tensor for name, tensor in averages.items()}
    loaded.load_state_dict(state)
    view = loaded.get_ema_model(seeded_net(5))
    assert torch.equal(view.layer.weight, ema.ema_model.named_parameters_dict['layer.weight'])


def test_the_live_weights_are_at_hand_during_an_evaluation():
    ema = EMA(smoothing=0.5)
    trainer = trainer_of(seeded_net(), [ema], '6ba')
    trainer.fit()
    live = trainer.state.model.layer.weight.clone()
    with pytest.raises(ValueError, match='in the model itself'):
        ema.get_training_model(trainer.state.model)
    ema.apply(Event.EVAL_START, trainer.state, trainer.logger)
    assert torch.equal(ema.get_training_model(trainer.state.model).layer.weight, live)
    assert not torch.equal(trainer.state.model.layer.weight, live)
