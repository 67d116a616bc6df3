"""The average against a plain loop in float64, through swaps, checkpoints and exports."""
import copy

import pytest
import torch
from composer import ComposerModel, Trainer
from torch.utils.data import DataLoader, TensorDataset

from ema import EMA, ShadowModel, compute_ema


class Line(ComposerModel):
    """Two layers, one of them frozen."""

    def __init__(self):
        super().__init__()
        self.frozen, self.layer = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 1)
        self.seen: list[torch.Tensor] = []  # weights at each evaluation

    def forward(self, batch):
        if not self.training:
            self.seen.append(self.layer.weight.detach().clone())
        return self.layer(self.frozen(batch[0]))

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def eval_forward(self, batch, outputs=None):
        return self(batch)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def train(ema: EMA, model: Line, max_duration: str = '6ba', **options) -> Trainer:
    """Train on the CPU; `trainer.history` holds the live weights after every batch."""
    from composer import Callback
    history = []

    class Recorder(Callback):
        def batch_end(self, state, logger):
            history.append(model.layer.weight.detach().clone())

    trainer = Trainer(model=model, train_dataloader=loader(), max_duration=max_duration, algorithms=[ema],
                      optimizers=torch.optim.SGD(model.layer.parameters(), lr=0.1), callbacks=[Recorder()],
                      progress_bar=False, device='cpu', seed=3, **options)
    trainer.fit()
    trainer.history = history
    return trainer


def average_of(history: list[torch.Tensor], smoothing: float, every: int = 1, first: int = 0) -> torch.Tensor:
    """A plain loop in float64, which starts as a copy of the weights of batch `first`."""
    average = history[first].double()
    for index, weight in enumerate(history):
        if index > first and (index + 1) % every == 0:
            average = smoothing * average + (1 - smoothing) * weight.double()
    return average


def test_one_update_is_the_formula_in_float64():
    model, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    shadow = ShadowModel(model)
    expected = {name: 0.9 * p.double() + (1 - 0.9) * dict(other.named_parameters())[name].double()
                for name, p in model.named_parameters()}
    compute_ema(other, shadow, 0.9)
    for name, average in shadow.named_parameters():
        torch.testing.assert_close(average.double(), expected[name].detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize('arguments, smoothing, every, first', [
    ({}, 2 ** (-1 / 1000), 1, 0),
    ({'half_life': '4ba', 'update_interval': '2ba'}, 2 ** (-2 / 4), 2, 0),
    ({'smoothing': 0.7, 'ema_start': '0.5dur'}, 0.7, 1, 2),
    ({'half_life': '1ep'}, 0.5, 4, 3),
])
def test_training_keeps_the_average_of_a_plain_loop(arguments, smoothing, every, first):
    ema, model = EMA(**arguments), Line()
    history = train(ema, model, '8ba' if 'ep' in str(arguments) else '6ba').history
    expected = average_of(history, smoothing, every, first)
    averages = ema.ema_model.named_parameters_dict
    assert set(averages) == {'layer.weight', 'layer.bias'}, 'the frozen ones never move'
    torch.testing.assert_close(averages['layer.weight'].double(), expected, atol=1e-6, rtol=0)


def test_evaluation_sees_the_average_and_training_the_live_weights():
    plain, model = Line(), Line()
    model.load_state_dict(plain.state_dict())
    without = train(EMA(ema_start='100ba'), plain)
    ema = EMA(smoothing=0.5)
    trainer = train(ema, model, eval_dataloader=loader(), eval_interval='2ba')
    for live, expected in zip(trainer.history, without.history, strict=True):
        torch.testing.assert_close(live, expected, atol=0, rtol=0)  # evaluations leave the training alone
    for batches, seen in zip((2, 4, 6), model.seen[::4], strict=True):  # 4 batches an evaluation
        torch.testing.assert_close(seen.double(), average_of(trainer.history[:batches], 0.5), atol=1e-6, rtol=0)


def test_prediction_runs_on_the_average():
    ema, model = EMA(smoothing=0.5), Line()
    trainer = train(ema, model)
    model.seen.clear()
    trainer.predict(loader())
    torch.testing.assert_close(model.seen[0].double(), average_of(trainer.history, 0.5), atol=1e-6, rtol=0)
    torch.testing.assert_close(model.layer.weight, trainer.history[-1], atol=0, rtol=0)


def test_a_checkpoint_resumes_the_average_to_the_bit(tmp_path):
    whole_ema, whole = EMA(smoothing=0.8), Line()
    start = copy.deepcopy(whole.state_dict())
    train(whole_ema, whole, '7ba')

    first = Line()
    first.load_state_dict(start)
    train(EMA(smoothing=0.8), first, '3ba', save_folder=str(tmp_path), save_interval='3ba', save_filename='half.pt')
    ema, model = EMA(smoothing=0.8), Line()
    train(ema, model, '7ba', load_path=str(tmp_path / 'half.pt'))
    assert torch.equal(model.layer.weight, whole.layer.weight)
    for name, average in whole_ema.ema_model.named_parameters_dict.items():
        assert torch.equal(ema.ema_model.named_parameters_dict[name], average)


def test_a_checkpoint_of_another_model_is_told_by_name():
    ema = EMA()
    averages = {'named_parameters_dict': {'layer.weight': torch.zeros(2, 2)}, 'named_buffers_dict': {}}
    ema.load_state_dict({'ema_model': averages, 'ema_started': True})
    with pytest.raises(ValueError, match='layer.bias'):
        train(ema, Line())


def test_tensors_pair_by_name_and_a_mismatch_fails():
    shadow = ShadowModel(torch.nn.Linear(3, 3, bias=False))
    with pytest.raises(ValueError, match='first weight'):
        compute_ema(torch.nn.Linear(3, 4, bias=False), shadow, 0.9)


def test_the_view_shares_memory_with_the_average_and_the_frozen_parts():
    ema, model = EMA(smoothing=0.5), Line()
    history = train(ema, model).history
    view = ema.get_ema_model(model)
    assert view.layer.weight.data_ptr() == ema.ema_model.named_parameters_dict['layer.weight'].data_ptr()
    assert view.frozen.weight.data_ptr() == model.frozen.weight.data_ptr()
    assert torch.equal(model.layer.weight, history[-1]) and not torch.equal(view.layer.weight, model.layer.weight)


def test_there_is_no_average_before_the_first_update():
    with pytest.raises(ValueError, match='no average'):
        EMA().get_ema_model(Line())


@pytest.mark.parametrize('arguments', [
    {'half_life': '10ba', 'smoothing': 0.9}, {'half_life': '10ba', 'update_interval': '1ep'}, {'half_life': '0ba'},
    {'half_life': '10tok'}, {'update_interval': '0ba'}, {'smoothing': 1.0}, {'smoothing': -0.1}, {'half_life': 'long'},
])
def test_arguments_that_make_no_sense_are_value_errors(arguments):
    with pytest.raises(ValueError):
        EMA(**arguments)



def test_an_average_is_put_back_into_a_model_by_one_call_also_from_its_state():
    model = Line()
    shadow = ShadowModel(model)
    for average in shadow.parameters():
        average.add_(1)
    expected = {name: average.clone() for name, average in shadow.named_parameters()}
    for source in (shadow, ShadowModel(model, copy.deepcopy(shadow.state_dict()))):
        other = Line()
        frozen = other.frozen.weight.clone()
        source.copy_to(other)
        assert all(torch.equal(parameter, expected[name]) for name, parameter in other.named_parameters()
                   if parameter.requires_grad)
        assert torch.equal(other.frozen.weight, frozen) and other.layer.weight.requires_grad
        assert other.layer.weight.data_ptr() != dict(source.named_parameters())['layer.weight'].data_ptr()
    with pytest.raises(ValueError, match='differ in'):
        shadow.copy_to(torch.nn.Linear(4, 1))
