"""The caption of a sample depends only on seed, epoch, sample and weights."""
from collections import Counter

import numpy as np
import pytest
from torch.utils.data import DataLoader

from data import HeldOutSamples, StreamingLAIONDataset
from sdbench.inputs.batches import choose_caption
from tests.samples import three_captions

CAPTIONS = {'short': ['a'], 'long': ['b', 'c'], 'tags': ['d']}


@pytest.mark.parametrize('captions, weights, expected', [
    (CAPTIONS, {}, {'a': 1, 'b': 1, 'c': 1, 'd': 1}),
    (CAPTIONS, {'short': 1, 'long': 3}, {'a': 2, 'b': 3, 'c': 3}),
    ({'short': ['a'], 'tags': ['d']}, {'short': 1, 'long': 3}, {'a': 1}),  # the image has no long caption
    ({'short': [], 'tags': ['d']}, {'short': 1, 'long': 3}, {'d': 1}),  # nor a short caption
])
def test_captions_are_chosen_in_proportion_to_the_weights_of_the_names_that_an_image_has(captions, weights, expected):
    generator = np.random.default_rng(17)
    chosen = Counter(choose_caption(captions, weights, generator) for _ in range(10_000))
    assert chosen.keys() == expected.keys()
    for caption, weight in expected.items():
        assert chosen[caption] / 10_000 == pytest.approx(weight / sum(expected.values()), abs=0.025)  # 5 deviations


def test_captions_are_chosen_again_in_each_epoch_and_identically_with_any_workers_and_after_a_resume(
        several_captions, samples):
    def captions_of(dataset, num_workers: int) -> list[str]:
        """Return the captions of an epoch, sorted, because their order depends on the number of workers."""
        dataset.gives_text = True
        loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=list)
        return sorted(sample['caption'] for batch in loader for sample in batch)

    options = {'batch_size': 4, 'caption_weights': {'short': 0, 'long': 1}}
    plain, with_workers, resumed, of_other_seed = (
        StreamingLAIONDataset(several_captions, shuffle_seed=seed, **options) for seed in (5, 5, 5, 6))
    epochs = [captions_of(plain, 0) for _ in range(2)]
    for short, *of_epochs in zip(sorted(sample['caption'] for sample in samples), *epochs, strict=True):
        assert set(of_epochs) <= set(three_captions(short)['long'])
    assert epochs[0] != epochs[1]
    assert [captions_of(with_workers, 2) for _ in range(2)] == epochs
    assert captions_of(of_other_seed, 0) != epochs[0]
    resumed.resume_at(1, 8)
    rest = captions_of(resumed, 2)
    assert len(rest) == 16
    assert set(rest) <= set(epochs[1])
    evaluated = HeldOutSamples(plain, 8, 1000, seed=5)
    assert [evaluated[index]['caption'] for index in range(24)] == [sample['caption'] for sample in samples]
