"""What is wrong with a network that scores pictures is one line, which says where to get the right one."""
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdbench.models.feature_extractors import load_clip, load_inception
from tests.samples import Hostile
from tests.scoring_models import save_clip


@pytest.mark.parametrize('content', [{'conv.weight': torch.ones(3)}, Hostile])
def test_what_is_not_the_file_of_inception_is_refused_with_the_address_of_that_file(tmp_path, content):
    path = tmp_path / 'inception.pth'
    torch.save(Hostile(tmp_path / 'ran') if content is Hostile else content, path)
    with pytest.raises(ValueError) as refused:
        load_inception(str(path))
    line = str(refused.value)
    assert line.startswith(f"--inception {path} is not torch-fidelity's file with the weights of InceptionV3; fetch it")
    assert line.endswith('weights-inception-2015-12-05-6726825d.pth')
    assert not (tmp_path / 'ran').exists()


def test_a_clip_model_without_all_its_weights_or_its_processor_is_refused(tmp_path):
    def refusal(folder: str) -> str:
        with pytest.raises(ValueError, match=f'--clip {folder} is no folder .*; fetch one: ') as refused:
            load_clip(folder)
        return str(refused.value)
    clip = save_clip(tmp_path / 'clip')
    weights = load_file(f'{clip}/model.safetensors')
    del weights['visual_projection.weight']
    save_file(weights, f'{clip}/model.safetensors', {'format': 'pt'})
    assert '1 are missing or foreign, first visual_projection.weight' in refusal(clip)
    unprocessed = save_clip(tmp_path / 'unprocessed')
    for file in Path(unprocessed).glob('*processor_config.json'):
        file.unlink()
    refusal(unprocessed)
