"""Captions that are left out and images that are mirrored: the right share, the same again, and nothing else."""
from types import SimpleNamespace

import pytest
import torch
from composer.core import Event, Timestamp

import benchmark
from benchmark import main
from sdbench.inputs.images import FLIP
from sdbench.training import augmentation
from sdbench.training.augmentation import CaptionDrop, RandomFlip
from tests.runs import TINY

EMPTY = torch.arange(77)


def dropped(batch: int, device_batch: int = 64, seed: int = 17, share: float = 0.5) -> torch.Tensor:
    """Return which captions are left out, bool (device_batch,)."""
    captions = torch.full((device_batch, 77), 320)
    state = SimpleNamespace(timestamp=Timestamp(batch=batch), batch={'caption': captions, 'image': 'untouched'})
    random_before = torch.get_rng_state()
    CaptionDrop(share, seed, EMPTY).apply(Event.BATCH_START, state, None)
    assert torch.equal(torch.get_rng_state(), random_before)
    assert state.batch['image'] == 'untouched'
    assert (captions == 320).all(), 'a synthetic batch is one for all steps, so it is not written to'
    is_empty = (state.batch['caption'] == EMPTY).all(dim=1)
    assert (state.batch['caption'][~is_empty] == 320).all()
    return is_empty


def flipped(batch: int, device_batch: int = 64, seed: int = 17) -> torch.Tensor:
    """Return which images are mirrored, bool (device_batch,)."""
    state = SimpleNamespace(timestamp=Timestamp(batch=batch), batch={'caption': torch.zeros(device_batch, 77)})
    before = state.batch
    RandomFlip(seed).apply(Event.BATCH_START, state, None)
    assert FLIP not in before
    return state.batch[FLIP]


def test_the_share_that_is_asked_for_is_drawn_and_each_batch_others():
    drops = torch.stack([dropped(batch, 1000, share=0.1) for batch in range(10)])
    flips = torch.stack([flipped(batch) for batch in range(100)])
    assert 900 < int(drops.sum()) < 1100  # of 10,000: 3.3 standard deviations
    assert 3000 < int(flips.sum()) < 3400  # of 6,400: 5 standard deviations
    for drawn in (drops, flips):
        assert len({tuple(row.tolist()) for row in drawn}) == len(drawn)


@pytest.mark.parametrize('drawn', [dropped, flipped])
def test_what_is_drawn_depends_on_seed_and_batch_alone_and_ranks_draw_what_one_would(drawn, monkeypatch):
    whole = drawn(3)
    assert torch.equal(drawn(3), whole)
    assert not torch.equal(drawn(4), whole)
    assert not torch.equal(drawn(3, seed=18), whole)
    monkeypatch.setattr(augmentation.dist, 'get_world_size', lambda: 4)
    parts = []
    for rank in range(4):
        monkeypatch.setattr(augmentation.dist, 'get_global_rank', lambda rank=rank: rank)
        parts.append(drawn(3, 16))
    assert torch.equal(torch.cat(parts), whole)


def test_the_model_is_given_the_empty_captions_and_the_mirrored_images_that_are_drawn(monkeypatch):
    seen = []

    class Model(benchmark.StableDiffusion):
        def forward(self, batch):
            seen.append({name: tensor.clone() for name, tensor in batch.items()})
            return super().forward(batch)

    monkeypatch.setattr(benchmark, 'StableDiffusion', Model)
    flags = ['--use_synth_data', *TINY, '--device_train_microbatch_size', '2']
    main(flags)
    images = torch.cat([microbatch['image'] for microbatch in seen])
    seen.clear()
    record = main([*flags, '--random_flip', '--caption_drop', '0.5'])
    assert (record['random_flip'], record['caption_drop']) == (True, 0.5)
    empty = torch.tensor([49406, 49407] + [0] * 75)  # the tokenizer's
    is_empty = torch.cat([(microbatch['caption'] == empty).all(dim=1) for microbatch in seen])
    assert torch.equal(is_empty, torch.cat([dropped(batch, 4) for batch in range(4)]))
    drawn = torch.cat([flipped(batch, 4) for batch in range(4)])
    for some in (drawn, is_empty):
        assert 0 < some.sum() < len(some)
    images[drawn] = images[drawn].flip(3)
    assert torch.equal(torch.cat([microbatch['image'] for microbatch in seen]), images)
