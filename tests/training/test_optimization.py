"""Optimizer, learning rate schedule, gradient clipping and EMA follow their flags, in a run and in its checkpoints."""
from types import SimpleNamespace

import pytest
import torch
from composer import Callback
from composer.core import Time, Timestamp
from composer.optim import ConstantScheduler
from diffusers.training_utils import compute_snr

import benchmark
from benchmark import main
from sdbench.training.optimization import min_snr_weights
from tests.runs import SMALLEST, TINY, final_state, settings_of

FLAGS = {'learning_rate': 3e-4, 'weight_decay': 0.02, 'lr_warmup': '4ba', 'ema_half_life': '3ba', 'ema_start': '2ba',
         'clip_grad_norm': 0.25, 'snr_gamma': 5.0, 'save_folder': 'kept', 'max_duration': '7ba'}


class Witness(Callback):
    """Records for each step: learning rate, `fused`, gradient norm, weights, and whether the EMA has started."""

    def __init__(self):
        self.rates, self.fused, self.norms, self.ema_started, self.weights = [], [], [], [], []

    def after_train_batch(self, state, logger):
        [group] = state.optimizers[0].param_groups
        self.rates.append(group['lr'])
        self.fused.append(group['fused'])

    def batch_end(self, state, logger):
        [ema] = [algorithm for algorithm in state.algorithms if isinstance(algorithm, benchmark.EMA)]
        self.ema_started.append(ema.ema_started)
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in state.model.unet.parameters()])))
        self.weights.append(state.model.unet.conv_in.bias.detach().clone())


def test_a_run_does_what_its_flags_say_and_has_them_in_its_record():
    witness = Witness()
    flags = [f'--{flag}={value}' for flag, value in FLAGS.items()]
    record = main(['--use_synth_data', *TINY, '--use_ema', '--adam_betas', '0.8', '0.95', *flags], [witness])
    assert {flag: record[flag] for flag in FLAGS} == FLAGS

    # The warm-up has four batches. Without clipping the gradient norms would be about 1.
    assert witness.rates == sorted(witness.rates)
    assert sorted(set(witness.rates)) == pytest.approx([0, 0.75e-4, 1.5e-4, 2.25e-4, 3e-4])
    assert witness.norms == pytest.approx([0.25] * 7, rel=1e-4)
    state = final_state('kept')
    [group] = state['optimizers']['AdamW']['param_groups']
    assert (group['initial_lr'], group['weight_decay'], group['betas']) == (3e-4, 0.02, (0.8, 0.95))

    # The EMA starts after the second batch, and is updated after each later one.
    assert witness.ema_started == [False] + 6 * [True]
    _, expected, *later = witness.weights
    for weights in later:
        expected = expected + (weights - expected) * (1 - 2 ** (-1 / 3))
    ema = dict(state['algorithms'])['EMA']['ema_model']['named_parameters_dict']
    torch.testing.assert_close(ema['unet.conv_in.bias'], expected, atol=1e-7, rtol=1e-5)


def test_a_resumed_optimizer_has_its_new_arguments_and_the_learning_rate_of_the_schedule():
    witness = Witness()
    argv = ['--use_synth_latents', *TINY, '--use_ema', '--lr_warmup', '4ba', '--save_folder', 'kept', '--autoresume',
            '--max_duration']
    main([*argv, '2ba'], [witness])
    record = main([*argv, '4ba', '--no-fused_optimizer'], [witness])
    assert witness.fused == [True, True, False, False]
    assert record['fused_optimizer'] is False
    assert witness.rates == pytest.approx([0, 0, 0.25e-4, 0.5e-4])  # Composer's first two steps have one rate


@pytest.mark.parametrize('schedule, shares', [
    ('constant', [1, 1, 1, 1, 1]), ('linear', [1, 0.75, 0.5, 0.25, 0]),
    ('cosine', [1, 0.5 + 0.5 ** 1.5, 0.5, 0.5 - 0.5 ** 1.5, 0])])
@pytest.mark.parametrize('warmup', [0, 4])
@pytest.mark.parametrize('final', [0.0, 0.1])
def test_the_learning_rate_goes_as_its_schedule_says_after_the_warm_up(schedule, shares, warmup, final):
    if schedule == 'constant':
        final = 0.0  # constant has no end
    shares = [final + (1 - final) * share for share in shares]
    rate = benchmark.build_schedule(schedule, f'{warmup}ba' if warmup else None, final)
    state = SimpleNamespace(max_duration=Time.from_batch(warmup + 8), timestamp=Timestamp())

    def rate_at(batch: int) -> float:
        state.timestamp = Timestamp(batch=batch)
        return rate(state)
    assert [rate_at(batch) for batch in range(warmup)] == [batch / 4 for batch in range(warmup)]
    assert [rate_at(warmup + batch) for batch in (0, 2, 4, 6, 8)] == pytest.approx(shares, abs=1e-9)


@pytest.mark.parametrize('prediction_type', ['epsilon', 'v_prediction'])
def test_the_loss_has_the_min_snr_weights_of_diffusers(prediction_type, smallest_with_attention, model_folder):
    """The reference is the formula of its train_text_to_image.py, with its own function for the SNR."""
    name = smallest_with_attention if prediction_type == 'epsilon' else model_folder
    model = benchmark.StableDiffusion(name, 16, snr_gamma=0.5)
    batch = {'image': torch.rand(8, 3, 16, 16) * 2 - 1, 'caption': torch.randint(49408, (8, 77))}
    prediction, target = model(batch)
    snr = compute_snr(model.scheduler, batch['timestep'])
    weights = snr.clamp(max=0.5) / (snr if prediction_type == 'epsilon' else snr + 1)
    expected = (weights * (prediction - target).square().mean(dim=(1, 2, 3))).mean()
    torch.testing.assert_close(model.loss((prediction, target), batch), expected)
    weight_of_pure_noise = 1 if prediction_type == 'epsilon' else 0
    assert min_snr_weights(torch.tensor([0.0]), 5.0, prediction_type).tolist() == [weight_of_pure_noise]


def test_without_the_flags_all_is_as_in_the_original_but_that_the_unet_alone_is_optimized():
    settings = settings_of('--use_synth_data', '--use_ema', *TINY, '--max_duration', '10000ba')
    [ema] = benchmark.build_algorithms(settings)
    assert ema.smoothing == 2 ** (-1 / 1000)
    assert ema.ema_start.value == 0
    model = benchmark.StableDiffusion(SMALLEST, 16)
    [group] = benchmark.build_optimizer(model, settings).param_groups
    assert (group['lr'], group['weight_decay'], group['fused']) == (1e-4, 0.001, True)
    assert group['betas'] == (0.9, 0.999)
    assert {id(p) for p in group['params']} == {id(p) for p in model.unet.parameters()}
    assert isinstance(benchmark.build_schedule('constant', None), ConstantScheduler)
