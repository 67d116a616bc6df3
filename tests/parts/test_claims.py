"""How an OUT was begun otherwise is said in the words of flags."""
import pytest

from parts.claims import difference


@pytest.mark.parametrize('key, name', [
    ('batch', 'MODEL'), ('model_sha256', 'MODEL'), ('captions_sha256', 'DATA'), ('source_sha256', '--remote'),
    ('vae_sha256', 'VAE of --model_name'), ('scaling_factor', 'VAE of --model_name')])
@pytest.mark.parametrize('begun, now', [(None, 3), (3, None), (3, 4)])
def test_what_every_run_is_given_was_another_and_never_missing(key, name, begun, now):
    assert difference(key, begun, now) == f'with another {name}; give the same, or a new folder'


def test_latents_of_random_weights_and_of_trained_ones_differ_by_pretrained():
    assert difference('vae_sha256', 'random', 'ab12') == (
        'without --pretrained, not with --pretrained; give the same, or a new folder')
    assert difference('vae_sha256', 'ab12', 'random') == (
        'with --pretrained, not without --pretrained; give the same, or a new folder')


def test_a_judge_that_one_run_has_and_the_other_lacks_is_named():
    assert difference('clip_sha256', None, 'ab12') == 'without --clip, not with --clip; give the same, or a new folder'
    assert difference('clip_sha256', 'cd34', 'ab12') == 'with another --clip; give the same, or a new folder'
