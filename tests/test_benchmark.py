"""The model that is trained, its optimizer, and the run through the real Trainer."""
import shutil
from types import SimpleNamespace

import pytest
import torch

import benchmark
from benchmark import StableDiffusion, main
from sdbench.models.loading import find_model
from tests.runs import TINY, check_record, settings_of


def batch_of(size: int = 64, num: int = 2, vocab: int = 49408) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {'image': torch.rand(num, 3, size, size, generator=generator) * 2 - 1,
            'caption': torch.randint(vocab, (num, 77), generator=generator)}


def test_the_encoders_are_frozen_in_eval_mode_and_get_no_gradient():
    model = StableDiffusion('tiny', image_size=64).train()
    assert model.unet.training
    assert not model.vae.training
    assert not model.text_encoder.training
    assert not any(module.training for module in model.vae.modules())
    outputs = model(batch_of())
    model.loss(outputs, batch_of()).backward()
    assert all(p.grad is None and not p.requires_grad for part in (model.vae, model.text_encoder)
               for p in part.parameters())
    assert all(p.grad is not None for p in model.unet.parameters())


def test_bytes_that_reach_the_model_train_as_the_same_images_scaled():
    model, batch = StableDiffusion('tiny', image_size=64), batch_of()
    image = torch.randint(256, batch['image'].shape, dtype=torch.uint8)
    torch.manual_seed(7)
    prediction, target = model(batch | {'image': image})  # as torch's own DataLoader gives them
    torch.manual_seed(7)
    expected, expected_target = model(batch | {'image': image / 127.5 - 1})
    assert torch.equal(prediction, expected)
    assert torch.equal(target, expected_target)


@pytest.mark.parametrize('prediction_type', ['epsilon', 'v_prediction'])
def test_the_loss_is_that_of_the_ddpm_papers_formula(prediction_type):
    model, batch = StableDiffusion('tiny', image_size=64), batch_of()
    model.prediction_type = prediction_type
    torch.manual_seed(7)
    prediction, target = model(batch)
    torch.manual_seed(7)  # the same draws, in the same order
    latents = model.vae.encode(batch['image']).latent_dist.sample() * 0.18215
    noise, timesteps = torch.randn_like(latents), torch.randint(1000, (2,))
    betas = torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, 1000, dtype=torch.float64) ** 2
    alpha = torch.cumprod(1 - betas, 0)[timesteps].view(-1, 1, 1, 1)
    noised = (alpha.sqrt() * latents + (1 - alpha).sqrt() * noise).float()
    expected = noise if prediction_type == 'epsilon' else (alpha.sqrt() * noise - (1 - alpha).sqrt() * latents).float()
    text = model.text_encoder(batch['caption']).last_hidden_state
    torch.testing.assert_close(target, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(prediction, model.unet(noised, timesteps, text).sample, atol=1e-5, rtol=0)
    loss = float(model.loss((prediction, target), batch))
    assert loss == pytest.approx(float((prediction - target).pow(2).mean()))


def test_every_timestep_is_drawn_the_first_and_the_last_too():
    seen = set()

    def noting_timesteps(noised, timesteps, text) -> SimpleNamespace:
        seen.update(timesteps.tolist())
        return SimpleNamespace(sample=noised)

    model = StableDiffusion('tiny', image_size=64)
    model.encode = lambda batch: (torch.zeros(4000, 4, 1, 1), torch.zeros(4000, 77, 64))
    model.unet.forward = noting_timesteps
    for _ in range(5):
        model({})
    assert min(seen) == 0
    assert max(seen) == 999


def test_the_loss_falls_when_one_batch_is_learned():
    model, batch = StableDiffusion('tiny', image_size=64), batch_of()
    optimizer = torch.optim.AdamW(model.unet.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        torch.manual_seed(1)  # the same noise and timesteps at every step
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_a_run_on_real_shards_reads_jpegs_with_workers(results, shards):
    record = main(['--remote', shards, *TINY, '--num_workers', '2', '--results', str(results)])
    check_record(record)
    assert (record['dataset'], record['num_workers']) == ('streaming', 2)


def test_the_optimizer_holds_the_unet_alone(results):
    settings = settings_of('--use_synth_data', *TINY, '--results', str(results))
    files = find_model('tiny')
    data = benchmark.build_data(settings, files)
    model, trainer = benchmark.build_training(settings, files, data, benchmark.StopAtSignal())
    [group] = trainer.state.optimizers[0].param_groups
    assert {id(p) for p in group['params']} == {id(p) for p in model.unet.parameters()}
    assert (group['lr'], group['weight_decay'], group['fused']) == (1e-4, 0.001, True)


def test_a_scheduler_that_predicts_something_else_is_refused(model_folder, tmp_path, capfd):
    shutil.copytree(model_folder, tmp_path / 'model')
    config = tmp_path / 'model' / 'scheduler' / 'scheduler_config.json'
    config.write_text(config.read_text().replace('v_prediction', 'sample'))
    with pytest.raises(SystemExit):
        main(['--use_synth_data', *TINY, '--model_name', str(tmp_path / 'model')])
    assert 'prediction_type sample' in capfd.readouterr().err
