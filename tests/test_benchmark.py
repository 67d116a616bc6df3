"""The model that is trained: what is frozen in it, what it is given and what it draws."""
import shutil
from types import SimpleNamespace

import torch

from benchmark import StableDiffusion
from tests.runs import TINY, one_error_line


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


def test_a_scheduler_that_predicts_something_else_is_refused(model_folder, tmp_path, capfd):
    shutil.copytree(model_folder, tmp_path / 'model')
    config = tmp_path / 'model' / 'scheduler' / 'scheduler_config.json'
    config.write_text(config.read_text().replace('v_prediction', 'sample'))
    argv = ['--use_synth_data', *TINY, '--model_name', tmp_path / 'model']
    assert 'prediction_type sample' in one_error_line(argv, capfd)
