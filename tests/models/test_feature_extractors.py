"""What is wrong with a network that pictures are judged by is one line, which says where to get the right one."""
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdbench.models.feature_extractors import load_clip, load_inception
from tests.samples import Hostile
from tests.scoring_models import save_clip


@pytest.mark.parametrize('content', [None, b'', b'a cat\na dog\n', b'<!DOCTYPE html><html>not found</html>',
                                     {'conv.weight': torch.ones(3)}, Hostile])
def test_what_is_not_the_file_of_inception_is_refused_with_the_address_of_that_file(tmp_path, content):
    path = tmp_path / 'inception.pth'
    if content is Hostile:
        content = Hostile(tmp_path / 'ran')
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError) as refused:
        load_inception(str(path))
    line = str(refused.value)
    reason = "not there" if content is None else "not torch-fidelity's file with the weights of InceptionV3"
    assert line.startswith(f'--inception {path} is {reason}; fetch it')
    assert line.endswith('weights-inception-2015-12-05-6726825d.pth')
    assert '\n' not in line
    assert not (tmp_path / 'ran').exists()


def test_a_folder_without_a_whole_clip_model_and_its_processor_is_refused_with_a_command_that_fetches_one(tmp_path):
    def refusal(folder: Path) -> str:
        with pytest.raises(ValueError) as refused:
            load_clip(str(folder))
        line = str(refused.value)
        assert line.startswith(f'--clip {folder} is no folder')
        assert '\n' not in line
        assert line.endswith('fetch one: hf download openai/clip-vit-large-patch14 --local-dir clip')
        return line
    refusal(tmp_path / 'nowhere')
    clip = Path(save_clip(tmp_path / 'clip'))
    weights = load_file(clip / 'model.safetensors')
    del weights['visual_projection.weight']
    save_file(weights, clip / 'model.safetensors', {'format': 'pt'})
    assert '1 are missing or foreign, first visual_projection.weight' in refusal(clip)
    clip = Path(save_clip(tmp_path / 'unprocessed'))
    for file in clip.glob('*processor_config.json'):
        file.unlink()
    refusal(clip)
