"""What is wrong with a network that pictures are judged by is one line."""
import pytest
import torch

from models.feature_extractors import load_clip, load_inception
from tests.judges import processor_of, save_clip


def test_a_clip_model_that_was_saved_without_its_processor_names_the_files_that_it_lacks(tmp_path):
    folder = save_clip(tmp_path / 'clip')
    processor_of(folder).unlink()
    with pytest.raises(ValueError) as refused:
        load_clip(folder)
    assert str(refused.value) == (f'--clip {folder} has no preprocessor_config.json or processor_config.json; save its '
                                  'CLIPProcessor there too')


@pytest.mark.parametrize('weights, reason', [
    ({'a.weight': torch.ones(2, device='meta')}, 'a.weight has no values'),
    ({'a.bias': torch.ones(2), 'a.weight': torch.eye(2).to_sparse()}, 'a.weight is sparse_coo'),
    ({'a.weight': torch.ones(2, dtype=torch.complex64)}, 'a.weight is of complex64'),
    ({'a.weight': torch.ones(2, dtype=torch.int8)}, 'a.weight is of int8'),
    ({'a.num_batches_tracked': torch.ones((), dtype=torch.long), 'a.weight': torch.tensor(True)}, 'a.weight is of bool')
])
def test_weights_of_inception_that_are_no_plain_numbers_are_refused_in_one_line(tmp_path, weights, reason):
    path = str(tmp_path / 'inception.pth')
    torch.save(weights, path)
    with pytest.raises(ValueError) as refused:
        load_inception(path)
    assert str(refused.value).startswith(f'--inception {path} holds no weights of InceptionV3 ({reason}')
    assert '\n' not in str(refused.value)
