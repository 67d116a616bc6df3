"""What is wrong with a network that pictures are judged by is one line."""
from pathlib import Path

import pytest

from models.feature_extractors import load_clip
from tests.judges import save_clip


def test_a_clip_model_that_was_saved_without_its_processor_names_the_file_that_it_lacks(tmp_path):
    folder = save_clip(tmp_path / 'clip')
    Path(folder, 'preprocessor_config.json').unlink()
    with pytest.raises(ValueError) as refused:
        load_clip(folder)
    assert str(refused.value) == (f'--clip {folder} has no preprocessor_config.json; save its CLIPProcessor there too')
