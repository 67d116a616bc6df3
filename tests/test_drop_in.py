"""What people wrote for mosaicml/diffusion-benchmark works here: flags, classes, and their arguments in order."""
import pickle
import shutil
import signal

import pytest
import torch
import torch.nn.functional as F
from composer import Trainer
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch.utils.data import DataLoader
from torchvision import transforms

from benchmark import StableDiffusion
from data import StreamingLAIONDataset, SyntheticImageCaptionDataset, build_loader
from ema import EMA
from export import main as export
from sdbench.inputs.tokenizer import build_tokenizer
from sdbench.models.folders import BUILT_IN
from sdbench.training.ranks import SIGNALS
from sdbench.training.resuming import ExactResume
from tests.runs import ROOT, Signalled, assert_equal
from tests.samples import encoded, picture, pillow_square, pixels, write_shards
from tests.test_docs import blocks


def test_a_program_of_your_own_resumes_exactly_and_is_exported(shards, smallest_model, capfd):
    def train(epochs: int, folder: str) -> dict[str, torch.Tensor]:
        dataset = StreamingLAIONDataset(shards, shuffle=True, batch_size=4, image_size=16)
        torch.manual_seed(5)
        model = StableDiffusion(smallest_model, image_size=16, pretrained=True)
        optimizer = torch.optim.SGD(model.unet.parameters(), lr=0.1)
        Trainer(model=model, optimizers=optimizer, train_dataloader=build_loader(dataset, 4, 0), run_name='mine',
                algorithms=[EMA(half_life='1ba')], callbacks=[ExactResume(seed=5)], max_duration=f'{epochs}ep',
                save_folder=folder, autoresume=True, device='cpu', progress_bar=False).fit()
        return model.unet.state_dict()

    train(1, 'stopped')
    assert_equal(train(2, 'stopped'), train(2, 'straight'))
    capfd.readouterr()
    export(['stopped', 'pipeline'])
    assert 'warning' not in capfd.readouterr().err


def test_the_programs_of_the_page_train_evaluate_fine_tune_and_go_on_after_a_signal(
        shards, smallest_with_attention, tmp_path, monkeypatch):
    (tmp_path / 'api-mds').symlink_to(shards)
    (tmp_path / 'api-mds-held-out').symlink_to(shards)
    (tmp_path / 'sd15').symlink_to(smallest_with_attention)
    monkeypatch.setitem(BUILT_IN, 'tiny', tmp_path / 'sd15')
    in_pytorch, fine_tuning, with_composer, evaluation, ema_of_checkpoint = (
        program.replace('image_size=64', 'image_size=16').replace('latent_size=8', 'latent_size=16')  # as its VAE has
        for program in blocks(ROOT / 'docs/api.md', 'python'))

    # Run the loop in plain PyTorch and the fine-tuning.
    torch.manual_seed(3)
    before = StableDiffusion('tiny', image_size=16).unet
    torch.manual_seed(3)
    variables = {}
    exec(in_pytorch, variables)
    saved = UNet2DConditionModel.from_pretrained('my-unet').state_dict()
    assert_equal(variables['model'].unet.state_dict(), saved)
    assert not torch.equal(saved['conv_out.bias'], before.conv_out.bias)
    variables = {}
    exec(fine_tuning, variables)
    trained = UNet2DConditionModel.from_pretrained(tmp_path / 'sd15' / 'unet').state_dict()
    assert_equal(variables['model'].unet.state_dict(), trained)

    # Train with Composer's Trainer and a repeatable evaluation. A signal ends the first run after a batch, an epoch,
    # also for later calls of `fit`.
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with_composer = with_composer.replace(
        'callbacks=[', "eval_dataloader=evaluation, eval_interval='1ba', callbacks=[HeldOutLoss(), *signalled, ")
    for signalled, batches in (([Signalled(signal.SIGTERM, batch=0)], 1), ([], 2)):
        variables = {'signalled': signalled}
        exec(evaluation, variables)
        exec(with_composer, variables)
        trainer = variables['trainer']
        if signalled:
            trainer.fit(duration='1ep')
        assert trainer.state.timestamp.batch == batches
        assert variables['stop'].interrupted == bool(signalled)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    evaluated = trainer.state.eval_metrics['eval']['MeanSquaredError'].compute()
    trainer.eval()
    assert trainer.state.eval_metrics['eval']['MeanSquaredError'].compute() == evaluated
    trainer.eval(build_loader(variables['dataset'], batch_size=16, num_workers=0))  # samples without a fixed noise

    # Load the EMA weights of its checkpoint.
    with pytest.raises(pickle.UnpicklingError):
        torch.load('api-checkpoints/latest-rank0.pt')
    exec(ema_of_checkpoint, variables)
    unet = {f'unet.{name}': tensor for name, tensor in variables['model'].unet.state_dict().items()}
    assert_equal(unet, dict(variables['ema_weights']['named_parameters_dict']))


@pytest.mark.parametrize('latent_size, name, shape', [(None, 'image', (3, 16, 16)), (2, 'moments', (8, 2, 2))])
def test_torchs_own_loader_takes_the_synthetic_dataset(latent_size, name, shape):
    dataset = SyntheticImageCaptionDataset(16, num_samples=10, latent_size=latent_size)
    batches = list(DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2))
    assert [batch[name].shape for batch in batches] == [(4, *shape), (4, *shape), (2, *shape)]
    assert (batches[0]['caption'].shape, batches[0]['caption'].dtype) == ((4, 77), torch.int64)
    assert len(torch.cat([batch[name] for batch in batches]).unique(dim=0)) == 10
    assert SyntheticImageCaptionDataset(16, 9, 1000)[999]['caption'].shape == (9,)  # the arguments of the original


def test_the_call_of_the_original_gives_the_same_batches(shards, samples, tmp_path):
    transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    dataset = StreamingLAIONDataset(remote=shards, local='cache', split=None, shuffle=True,
                                    transform=transform, batch_size=8)
    loader = DataLoader(dataset=dataset, batch_size=8, sampler=None, drop_last=True, prefetch_factor=2, num_workers=2,
                        persistent_workers=True)
    batches = list(loader)
    captions = torch.cat([batch['caption'] for batch in batches])
    images = torch.cat([batch['image'] for batch in batches])
    tokenizer = build_tokenizer()
    expected = {tuple(tokenizer.encode(sample['caption']).ids): transform(pillow_square(sample['jpg']))
                for sample in samples}
    assert (captions.dtype, images.dtype) == (torch.int64, torch.float32)
    assert len(captions) == len(expected) == 24
    for ids, image in zip(captions.tolist(), images, strict=True):
        torch.testing.assert_close(image, expected[tuple(ids)], atol=1e-6, rtol=0)


def test_all_ten_arguments_may_be_positional(shards, samples, tmp_path, model_folder):
    dataset = StreamingLAIONDataset(shards, 'cache', None, False, model_folder, None, 100, 3, 60.0, 4, image_size=64)
    assert (dataset.predownload, dataset.batch_size, dataset.shuffle) == (100, 4, False)
    assert dataset.streams[0].retry == (3, 60.0)
    sample = dataset[5]
    assert sample.keys() == {'image', 'caption'}
    assert sample['caption'].tolist() == build_tokenizer(model_folder).encode(samples[5]['caption']).ids
    assert (sample['image'].numpy() == pixels(pillow_square(samples[5]['jpg']))).all()


def test_images_smaller_than_image_size_are_enlarged_and_a_transform_gets_the_uncropped_image_in_rgb(tmp_path):
    images = [picture(3, 40, 24), picture(3, 96, 80).convert('L')]
    shards = write_shards(tmp_path / 'shards', [{'jpg': encoded(image, 'PNG'), 'caption': 'a'} for image in images])
    [batch] = DataLoader(StreamingLAIONDataset(shards, image_size=48, batch_size=2), batch_size=2)
    assert batch['image'].shape == (2, 3, 48, 48)
    dataset = StreamingLAIONDataset(local=shards, transform=lambda image: (image.mode, image.size), batch_size=1)
    assert [sample['image'] for sample in dataset] == [('RGB', (40, 24)), ('RGB', (96, 80))]


@pytest.mark.parametrize('arguments, named', [
    ({'remote': 'SHARDS', 'transform': str}, 'transform'), ({}, 'remote'),
    ({'remote': 'SHARDS', 'tokenizer_name_or_path': 'no-such-tokenizer'}, 'no-such-tokenizer')])
def test_unsupported_arguments_are_a_one_line_error(shards, arguments, named):
    arguments = {name: shards if value == 'SHARDS' else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=fr'^.*{named}.*\Z'):  # . is no line break
        build_loader(StreamingLAIONDataset(batch_size=1, **arguments), 1, 0)


def diffusers_step(model: StableDiffusion, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute loss and target like diffusers' text-to-image training script, with random numbers in the same order."""
    scheduler = DDPMScheduler.from_config(model.noise_scheduler.config)
    latents = model.vae.encode(batch['image']).latent_dist.sample() * model.vae.config.scaling_factor
    noise = torch.randn_like(latents)
    timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (len(latents),)).long()
    noisy_latents = scheduler.add_noise(latents, noise, timesteps)
    hidden_states = model.text_encoder(batch['caption'], return_dict=False)[0]
    target = {'epsilon': noise, 'v_prediction': scheduler.get_velocity(latents, noise, timesteps)}
    target = target[scheduler.config.prediction_type]
    prediction = model.unet(noisy_latents, timesteps, hidden_states, return_dict=False)[0]
    return F.mse_loss(prediction.float(), target.float(), reduction='mean'), target


@pytest.mark.parametrize('prediction_type', ['epsilon', 'v_prediction'])
def test_loss_target_and_gradients_are_those_of_diffusers_training_with_frozen_encoders(prediction_type, tmp_path):
    folder = shutil.copytree(BUILT_IN['tiny'], tmp_path / 'model')
    config = folder / 'scheduler/scheduler_config.json'
    config.write_text(config.read_text().replace('v_prediction', prediction_type))
    model = StableDiffusion(str(folder), image_size=64).train()
    assert model.prediction_type == prediction_type
    encoders = (model.vae, model.text_encoder)
    assert not any(module.training for encoder in encoders for module in encoder.modules())
    batch = {'image': torch.rand(3, 3, 64, 64) * 2 - 1, 'caption': torch.randint(49408, (3, 77))}
    parameters = list(model.unet.parameters())
    torch.manual_seed(5)
    loss, target = diffusers_step(model, batch)
    expected = torch.autograd.grad(loss, parameters)
    torch.manual_seed(5)
    outputs = model(batch)
    torch.testing.assert_close(outputs[1], target, atol=1e-6, rtol=0)
    torch.testing.assert_close(model.loss(outputs, batch), loss, atol=1e-6, rtol=1e-6)
    model.loss(outputs, batch).backward()
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)
    assert not any(parameter.requires_grad for encoder in encoders for parameter in encoder.parameters())
