"""Images that are mirrored: half of them, the same again after a resume, and nothing else changed."""
from types import SimpleNamespace

import pytest
import torch
from composer.core import Event, Timestamp

import benchmark
from benchmark import main
from data import normalize
from inputs.images import FLIP
from tests.runs import TINY, one_error_line
from training import augmentation
from training.augmentation import RandomFlip


def flips(batch: int, device_batch: int = 64, seed: int = 17) -> torch.Tensor:
    state = SimpleNamespace(timestamp=Timestamp(batch=batch), batch={'caption': torch.zeros(device_batch, 77)})
    before = state.batch
    RandomFlip(seed).apply(Event.BATCH_START, state, None)
    assert FLIP not in before  # a synthetic batch is one for all steps, so it is not written to
    return state.batch[FLIP]


def test_half_of_the_images_are_mirrored_by_seed_and_batch_alone():
    drawn = torch.stack([flips(batch) for batch in range(100)])
    assert 3000 < int(drawn.sum()) < 3400  # of 6,400: 5 standard deviations
    assert len({tuple(row.tolist()) for row in drawn}) == 100
    assert torch.equal(flips(3), flips(3)) and not torch.equal(flips(3), flips(3, seed=18))


def test_ranks_mirror_what_one_rank_would(monkeypatch):
    whole = flips(3)
    monkeypatch.setattr(augmentation.dist, 'get_world_size', lambda: 4)
    parts = []
    for rank in range(4):
        monkeypatch.setattr(augmentation.dist, 'get_global_rank', lambda rank=rank: rank)
        parts.append(flips(3, 16))
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize('size', [8, 16])
def test_the_images_that_are_named_are_mirrored_left_to_right_and_the_others_are_not(size):
    image = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    plain = normalize({'image': image}, size)['image']
    batch = normalize({'image': image, FLIP: torch.tensor([True, False])}, size)
    assert set(batch) == {'image'}
    torch.testing.assert_close(batch['image'][0], plain[0].flip(2), atol=0, rtol=0)
    torch.testing.assert_close(batch['image'][1], plain[1], atol=0, rtol=0)


def test_the_model_is_given_the_mirrored_images_microbatch_by_microbatch(results, monkeypatch):
    seen = []

    class Model(benchmark.StableDiffusion):
        def forward(self, batch):
            seen.append(batch['image'].clone())
            return super().forward(batch)

    monkeypatch.setattr(benchmark, 'StableDiffusion', Model)
    flags = ['--use_synth_data', *TINY, '--device_train_microbatch_size', '2', '--results', str(results)]
    assert main(flags)['random_flip'] is False
    plain = list(seen)
    seen.clear()
    assert main([*flags, '--random_flip'])['random_flip'] is True
    drawn = torch.cat([flips(batch, 4) for batch in range(4)])
    assert drawn.any() and not drawn.all()
    mirrored = torch.cat(plain)
    mirrored[drawn] = mirrored[drawn].flip(3)
    assert torch.equal(torch.cat(seen), mirrored)


def test_latents_are_not_mirrored(capfd):
    line = one_error_line(['--use_synth_latents', *TINY, '--random_flip'], capfd)
    assert '--random_flip mirrors images' in line
