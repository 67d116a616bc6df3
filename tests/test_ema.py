"""The EMA equals Composer's EMA and a plain loop in float64, through evaluations, swaps and checkpoints."""
import copy

import pytest
import torch
from composer import Callback, ComposerModel, Trainer
from composer.algorithms.ema import ema as composers
from torch.utils.data import DataLoader, TensorDataset

from ema import EMA, ShadowModel, compute_ema
from tests.runs import assert_equal

BATCHES = [{'half_life': '2ba', 'update_interval': interval} for interval in (None, '1ba', '3ba', '5ba')]
EPOCHS = [{'half_life': '2ep', 'update_interval': interval} for interval in (None, '1ep', '2ep')]
SMOOTHING = [{'half_life': None, 'smoothing': 0.7, 'update_interval': interval} for interval in ('1ba', '2ba', '2ep')]


class Net(ComposerModel):
    """A network with a frozen layer, trained layers, and buffers of floats and integers."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer('position_ids', torch.arange(200), persistent=False)
        self.seen: list[torch.Tensor] = []  # weights during each batch of an evaluation or a prediction

    def forward(self, batch):
        if not self.training:
            self.seen.append(self.layer.weight.detach().clone())
        return self.layer(self.norm(self.frozen(batch[0])))

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def eval_forward(self, batch, outputs=None):
        return self(batch)


def seeded_net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net()


def loader() -> DataLoader:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


class Recorder(Callback):
    """Records the raw weights after each batch."""

    def __init__(self):
        self.weights: list[torch.Tensor] = []

    def batch_end(self, state, logger):
        self.weights.append(state.model.layer.weight.detach().clone())


def train(model: Net, algorithms, max_duration: str = '12ba', callbacks=(), **options) -> Trainer:
    """Train on the CPU and return the trainer; its `history` has the raw weights after every batch."""
    recorder = Recorder()
    trainer = Trainer(model=model, train_dataloader=loader(), max_duration=max_duration, algorithms=algorithms, seed=3,
                      optimizers=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[recorder, *callbacks],
                      progress_bar=False, device='cpu', **options)
    trainer.fit()
    trainer.history = recorder.weights
    return trainer


def reference_ema(history: list[torch.Tensor], smoothing: float, first: int = 0) -> torch.Tensor:
    """Compute the EMA in a plain loop in float64, starting with a copy of the weights after batch `first`."""
    average = history[first].double()
    for weight in history[first + 1:]:
        average = smoothing * average + (1 - smoothing) * weight.double()
    return average


def tensors(shadow) -> dict[str, torch.Tensor]:
    return dict(shadow.named_parameters()) | dict(shadow.named_buffers())


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Compare all tensors except integers: Composer treats them like weights, and its rounding changes position ids."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name == 'position_ids':
            assert torch.equal(ours[name], torch.arange(200))
        elif tensor.is_floating_point():
            torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=0, msg=lambda text, n=name: f'{n}: {text}')


class Comparison(Callback):
    """Checks after every batch and every epoch that both algorithms have the same EMA weights."""

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


@pytest.mark.parametrize('arguments', [*BATCHES, *EPOCHS, *SMOOTHING], ids=str)
@pytest.mark.parametrize('start', ['3ba', '0.3dur', '2ep'])
def test_every_combination_of_arguments_equals_composers_ema(arguments, start):
    ours, theirs = EMA(**arguments, ema_start=start), composers.EMA(**arguments, ema_start=start)
    comparison = Comparison(ours, theirs)
    train(seeded_net(), [ours, theirs], callbacks=[comparison])
    assert comparison.compared > 2


@pytest.mark.parametrize('smoothing', [0, 0.5, 0.99, 1])
def test_compute_ema_with_two_modules_equals_composers(smoothing):
    ours, theirs = seeded_net(2), seeded_net(2)
    compute_ema(seeded_net(), ours, smoothing)
    composers.compute_ema(seeded_net(), theirs, smoothing)
    assert_same(tensors(ours), tensors(theirs))


def test_evaluation_and_prediction_use_the_ema_weights_and_training_the_raw_weights():
    plain, model = seeded_net(), seeded_net()
    without = train(plain, [])
    ema = EMA(smoothing=0.5)
    trainer = train(model, [ema], eval_dataloader=loader(), eval_interval='2ba')
    for raw, expected in zip(trainer.history, without.history, strict=True):
        torch.testing.assert_close(raw, expected, atol=0, rtol=0)  # evaluations do not change the training
    evaluated = model.seen[::4]  # an evaluation has 4 batches
    trainer.predict(loader())
    for batches, seen in zip((2, 4, 6, 8, 10, 12, 12), [*evaluated, model.seen[-1]], strict=True):
        torch.testing.assert_close(seen.double(), reference_ema(trainer.history[:batches], 0.5), atol=1e-6, rtol=0)
    torch.testing.assert_close(model.layer.weight, trainer.history[-1], atol=0, rtol=0)
    view = ema.get_ema_model(model)
    assert view.layer.weight.data_ptr() == ema.ema_model.named_parameters_dict['layer.weight'].data_ptr()
    assert view.frozen.weight.data_ptr() == model.frozen.weight.data_ptr()


@pytest.mark.parametrize('start', ['0ba', '9ba'])
@pytest.mark.parametrize('begun_by, resumed_by', [(EMA, EMA), (composers.EMA, EMA), (EMA, composers.EMA)])
def test_a_training_resumes_exactly_also_from_composers_ema_and_with_it(tmp_path, begun_by, resumed_by, start):
    arguments = ('4ba', None, start, None)  # positional, in the order of Composer and of the original benchmark
    whole, resumed = resumed_by(*arguments), resumed_by(*arguments)
    whole_model, model = seeded_net(), seeded_net(7)
    train(whole_model, [whole])
    train(seeded_net(), [begun_by(*arguments)], '6ba', save_folder=str(tmp_path), save_filename='half.pt',
          save_interval='6ba')
    train(model, [resumed], load_path=str(tmp_path / 'half.pt'))
    compare = assert_equal if begun_by is resumed_by else assert_same
    compare(tensors(resumed.ema_model), tensors(whole.ema_model))
    compare(dict(model.named_parameters()), dict(whole_model.named_parameters()))


def test_an_ema_state_from_several_devices_loads_on_one():
    model, ema, loaded = seeded_net(), EMA('4ba'), EMA('4ba')
    train(model, [ema], '6ba')
    state = ema.state_dict()
    prefixed = {kind: {f'module.{name}': tensor for name, tensor in tensors_of_kind.items()}
                for kind, tensors_of_kind in state['ema_model'].items()}
    loaded.load_state_dict(state | {'ema_model': prefixed})
    assert_same(tensors(loaded.get_ema_model(seeded_net())), tensors(ema.get_ema_model(model)))


def test_tensors_are_paired_by_name_and_an_error_names_a_mismatch():
    ema = EMA()
    with pytest.raises(ValueError, match='no EMA weights'):
        ema.get_ema_model(seeded_net())
    state = {'named_parameters_dict': {'layer.weight': torch.zeros(2, 2)}, 'named_buffers_dict': {}}
    ema.load_state_dict({'ema_model': state, 'ema_started': True})
    with pytest.raises(ValueError, match='layer.bias'):
        train(seeded_net(), [ema])
    for copy_of in (ShadowModel, copy.deepcopy):
        with pytest.raises(ValueError, match='first weight'):
            compute_ema(torch.nn.Linear(3, 4, bias=False), copy_of(torch.nn.Linear(3, 3, bias=False)), 0.9)
