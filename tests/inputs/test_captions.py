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


@pytest.mark.parametrize('num_workers', [0, 2])
def test_captions_are_chosen_again_in_each_epoch_and_identically_with_any_workers_and_after_a_resume(
        several_captions, samples, num_workers):
    def epoch_of(dataset) -> list[str]:
        dataset.gives_text = True
        loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=list)
        return [sample['caption'] for batch in loader for sample in batch]

    def expected_in(epoch: int) -> list[str]:
        chosen = []
        for index, sample in enumerate(samples):
            generator = np.random.default_rng((5, epoch, index))
            generator.random(2)  # for dropping the caption and mirroring the image
            chosen.append(choose_caption(three_captions(sample['caption']), {'short': 1, 'long': 2}, generator))
        return chosen

    options = {'batch_size': 4, 'shuffle_seed': 5, 'caption_weights': {'short': 1, 'long': 2}}
    dataset = StreamingLAIONDataset(several_captions, **options)
    assert [sorted(epoch_of(dataset)) for _ in range(2)] == [sorted(expected_in(0)), sorted(expected_in(1))]
    assert expected_in(0) != expected_in(1)
    evaluated = HeldOutSamples(dataset, 8, 1000, seed=5)
    assert [evaluated[index]['caption'] for index in range(24)] == [sample['caption'] for sample in samples]
    resumed = StreamingLAIONDataset(several_captions, **options)
    resumed.resume_at(1, 8)
    assert sorted(epoch_of(resumed)) == sorted(expected_in(1)[8:])
