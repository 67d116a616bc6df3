"""Tokens, against known ids and open_clip's tokenizer."""
import pytest

from inputs.captions import build_tokenizer


@pytest.mark.parametrize('caption, words', [
    ('a photo of a cat', [320, 1125, 539, 320, 2368]),
    ("Wow! it's 2024", [2781, 256, 585, 568, 273, 271, 273, 275]),  # "!" is a word, though its id 0 pads
    ('', []),
])
def test_token_ids_are_clips(caption, words):
    expected = [49406, *words, 49407]
    assert build_tokenizer().encode(caption).ids == expected + [0] * (77 - len(expected))


def test_token_ids_agree_with_open_clips_tokenizer_on_odd_captions():
    import open_clip
    reference, tokenizer = open_clip.get_tokenizer('ViT-H-14'), build_tokenizer()
    captions = ["don't UPPER lower", 'naïve café 中文 🎉', '!!! ???', 'word ' * 100, 'x' * 500, ' two  blanks', '½ ≠ 1']
    for caption, encoding in zip(captions, tokenizer.encode_batch(captions), strict=True):
        assert encoding.ids == reference(caption)[0].tolist(), caption


def test_a_tokenizer_folder_pads_with_its_own_token(model_folder):
    ids = build_tokenizer(model_folder).encode('a cat').ids
    assert ids == [49406, 320, 2368] + [49407] * 74
