"""The synthetic batch goes to a GPU as the streamed one does, from pinned memory, and is pinned only once."""
import pytest
import torch

from data import SyntheticImageCaptionDataset, build_loader


@pytest.fixture
def pinned(as_on_a_gpu, monkeypatch) -> list[torch.Tensor]:
    """What was pinned, on a machine that says it has a GPU. Pinning copies, as it does there."""
    copies = []

    def pin_memory(tensor, *device):
        copies.append(tensor.clone())
        return copies[-1]
    monkeypatch.setattr(torch.Tensor, 'pin_memory', pin_memory)
    return copies


def test_the_synthetic_batch_is_pinned_once_however_many_batches(pinned):
    dataset = SyntheticImageCaptionDataset(64, num_samples=20)
    batches = list(build_loader(dataset, batch_size=4, num_workers=0).dataloader)
    assert len(batches) == 5
    assert len(pinned) == 2
    for batch in batches:
        assert {batch['image'].data_ptr(), batch['caption'].data_ptr()} == {tensor.data_ptr() for tensor in pinned}
