"""Model folders whose configuration makes no sense: one line says which file, or the model trains."""
import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies

from benchmark import StableDiffusion
from models.loading import BUILT_IN, CONFIG_FILES, find_model

CONFIGS = {part: json.loads((BUILT_IN['tiny'] / part / file).read_text()) for part, file in CONFIG_FILES.items()}
VALUES = ('abc', '', None, True, 0, 1, -1, 3, 5, 64, 1.5, math.nan, 10**9, 10**400, [], {}, [0], [32], [32, 64, 128],
          ['x'], [[4]], {'a': 1}, 'nope', 'DownBlock2D', 'gelu')


def refused(folder: Path, part: str, content) -> str:
    """The one line about a folder whose `part` has this configuration; '' where it is taken, and trains."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(BUILT_IN['tiny'], folder)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / part / CONFIG_FILES[part]).write_text(text)
    try:
        find_model(str(folder))
        model = StableDiffusion(str(folder), 64)
    except ValueError as error:
        assert str(error).startswith(f'--model_name {folder} ') or str(error).startswith(f'--model_name {folder}: ')
        return str(error)
    batch = {'image': torch.zeros(1, 3, 64, 64), 'caption': torch.zeros(1, 77, dtype=torch.long)}
    loss = model.loss(model(batch), batch)
    loss.backward()
    return ''


@pytest.mark.parametrize('part, changes, words', [
    ('unet', {'in_channels': 3, 'out_channels': 3}, 'it takes 3 channels and gives 3, where latents have 4'),
    ('unet', {'cross_attention_dim': 'abc'}, 'unet/config.json describes no unet'),
    ('unet', {'cross_attention_dim': 32}, 'cross_attention_dim is 32, and the text encoder gives states of 64'),
    ('unet', {'block_out_channels': 5}, 'unet/config.json describes no unet'),
    ('unet', {'layers_per_block': 10**9}, 'unet/config.json has layers_per_block 1000000000, more than 1000'),
    ('vae', {'block_out_channels': 5}, 'vae/config.json describes no vae'),
    ('vae', {'latent_channels': 16}, 'its latents have 16 channels, not 4'),
    ('vae', {'scaling_factor': 'x'}, "scaling_factor 'x' is not a number above 0"),
    ('text_encoder', {'hidden_size': 0}, 'text_encoder/config.json describes no text_encoder'),
    ('text_encoder', {'max_position_embeddings': 10}, 'text_encoder/config.json describes no text_encoder'),
    ('text_encoder', {'vocab_size': 0}, 'vocab_size 0 is not above 0'),
    ('scheduler', {'num_train_timesteps': -1}, 'scheduler/scheduler_config.json describes no scheduler'),
    ('scheduler', {'beta_schedule': 'nope'}, 'scheduler/scheduler_config.json describes no scheduler'),
    ('scheduler', {'beta_start': 2.0, 'beta_end': 3.0}, 'its betas make no noise that grows'),
])
def test_a_wrong_value_is_one_line_that_names_the_file(tmp_path, part, changes, words):
    assert words in refused(tmp_path / 'model', part, CONFIGS[part] | changes)


@pytest.mark.parametrize('content', ['', '[]', 'null', '"x"', '[' * 100_000, '{"a": ' + '9' * 5000 + '}'])
def test_a_file_that_holds_no_configuration_is_one_line(tmp_path, content):
    assert 'is not a diffusers model' in refused(tmp_path / 'model', 'unet', content)


@pytest.mark.long
def test_any_value_is_refused_in_one_line_or_trains(tmp_path_factory):
    folder = tmp_path_factory.mktemp('fuzz') / 'model'
    outcomes = set()

    def check(seed: int):
        draw = random.Random(seed)
        part = draw.choice(sorted(CONFIGS))
        key = draw.choice(sorted(CONFIGS[part]))
        outcomes.add(refused(folder, part, CONFIGS[part] | {key: draw.choice(VALUES)}) == '')
    given(strategies.integers(0, 1 << 64))(settings(derandomize=True, deadline=None, max_examples=60)(check))()
    assert outcomes == {True, False}
