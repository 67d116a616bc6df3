"""Token ids equal the ids of open_clip's tokenizer."""
import pickle
from pathlib import Path

import torch
from transformers import CLIPTokenizer

from sdbench.datasets.converter import clean_caption
from sdbench.inputs.batches import collate
from sdbench.inputs.tokenizer import build_tokenizer, clip_tokenizer


def write_tokenizer(folder: Path, pad_token: str) -> str:
    """Write CLIP's tokenizer in the format of transformers, with vocab.json and merges.txt."""
    (folder / 'vocabulary').mkdir(exist_ok=True)
    files = clip_tokenizer().model.save(str(folder / 'vocabulary'))
    CLIPTokenizer(*files, pad_token=pad_token).save_pretrained(folder)
    return str(folder)


def test_token_ids_and_fixed_letters_equal_open_clips_for_unusual_captions():
    import open_clip
    reference, tokenizer = open_clip.get_tokenizer('ViT-H-14'), build_tokenizer()
    captions = ['a photo of a cat', "Wow! it's 2024", '', "don't UPPER lower", 'naïve café 中文 🎉', '!!! ???',
                'word ' * 100, 'x' * 500, ' two  spaces', '½ ≠ 1']
    for caption, encoding in zip(captions, tokenizer.encode_batch(captions), strict=True):
        assert encoding.ids == reference(caption)[0].tolist(), caption
    for caption in (*captions, 'cafÃ©', '<b> &amp;amp; “c” '):
        assert clean_caption(caption) == open_clip.tokenizer.basic_clean(caption), caption


def test_the_padding_token_in_a_caption_is_a_word_even_after_the_tokenizer_is_pickled(tmp_path):
    captions = ['wow! a cat', 'stop !!', 'a <|endoftext|> b']
    of_clip = [encoding.ids for encoding in build_tokenizer().encode_batch(captions)]
    of_folder = build_tokenizer(write_tokenizer(tmp_path, '!'))
    assert [encoding.ids for encoding in of_folder.encode_batch(captions)] == of_clip
    samples = [{'image': torch.zeros(3, 8, 8, dtype=torch.uint8), 'caption': caption} for caption in captions]
    assert collate(samples, pickle.loads(pickle.dumps(of_folder)), 8)['caption'].tolist() == of_clip
