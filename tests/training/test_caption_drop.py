"""Captions that are left out: the right share, the same again, and nothing else changed."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composer.core import Event, Timestamp

import benchmark
from benchmark import main
from models.loading import find_model
from tests.runs import TINY, settings_of
from training import augmentation
from training.augmentation import CaptionDrop

EMPTY = torch.arange(77)


def state_of(batch: int, captions: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(timestamp=Timestamp(batch=batch), batch={'caption': captions, 'image': 'untouched'})


def test_a_share_of_the_captions_becomes_the_empty_one_and_the_batch_itself_is_not_written_to():
    captions = torch.full((1000, 77), 320)
    dropped = []
    for batch in range(10):
        state = state_of(batch, captions)
        random_before = torch.get_rng_state()
        CaptionDrop(0.1, 17, EMPTY).apply(Event.BATCH_START, state, None)
        assert torch.equal(torch.get_rng_state(), random_before) and state.batch['image'] == 'untouched'
        is_empty = (state.batch['caption'] == EMPTY).all(dim=1)
        assert torch.equal(state.batch['caption'][~is_empty], captions[~is_empty])
        dropped.append(is_empty)
    assert (captions == 320).all()
    assert 900 < int(torch.stack(dropped).sum()) < 1100  # 10 % of 10,000: 3.3 standard deviations
    assert len({tuple(drop.tolist()) for drop in dropped}) == 10  # each batch others


@pytest.mark.parametrize('other', [(17, 4), (18, 3)])
def test_what_is_left_out_depends_on_seed_and_batch_alone(other):
    def drawn(seed: int, batch: int) -> torch.Tensor:
        return CaptionDrop(0.5, seed, EMPTY).dropped(batch, 64)
    assert torch.equal(drawn(17, 3), drawn(17, 3)) and not torch.equal(drawn(17, 3), drawn(*other))


def test_ranks_leave_out_what_one_rank_would(monkeypatch):
    whole = CaptionDrop(0.5, 17, EMPTY).dropped(3, 64)
    monkeypatch.setattr(augmentation.dist, 'get_world_size', lambda: 4)
    parts = []
    for rank in range(4):
        monkeypatch.setattr(augmentation.dist, 'get_global_rank', lambda rank=rank: rank)
        parts.append(CaptionDrop(0.5, 17, EMPTY).dropped(3, 16))
    assert torch.equal(torch.cat(parts), whole)


def test_the_empty_caption_is_the_tokenizers_and_the_model_is_given_it(results, monkeypatch):
    settings = settings_of('--use_synth_data', *TINY, '--caption_drop', '0.2')
    [algorithm] = benchmark.build_algorithms(settings, find_model('tiny'))
    empty = [49406, 49407] + [0] * 75
    assert algorithm.empty_caption.tolist() == empty
    seen = []

    class Model(benchmark.StableDiffusion):
        def forward(self, batch):
            seen.append((batch['caption'] == torch.tensor(empty)).all(dim=1).tolist())
            return super().forward(batch)

    monkeypatch.setattr(benchmark, 'StableDiffusion', Model)
    record = main(['--use_synth_data', *TINY, '--caption_drop', '0.5', '--results', str(results)])
    expected = [CaptionDrop(0.5, 17, EMPTY).dropped(batch, 4).tolist() for batch in range(4)]
    assert seen == expected and 0 < np.mean(seen) < 1 and record['caption_drop'] == 0.5
