"""Tokens, against open_clip's tokenizer."""
import os

from transformers import CLIPTokenizer

from sdbench.inputs.tokenizer import build_tokenizer, clip_tokenizer, hash_of_tokenizer


def test_token_ids_agree_with_open_clips_tokenizer_on_odd_captions():
    import open_clip
    reference, tokenizer = open_clip.get_tokenizer('ViT-H-14'), build_tokenizer()
    captions = ['a photo of a cat', "Wow! it's 2024", '', "don't UPPER lower", 'naïve café 中文 🎉', '!!! ???',
                'word ' * 100, 'x' * 500, ' two  blanks', '½ ≠ 1']
    for caption, encoding in zip(captions, tokenizer.encode_batch(captions), strict=True):
        assert encoding.ids == reference(caption)[0].tolist(), caption


def test_what_pads_is_a_word_where_a_caption_has_it(tmp_path):
    vocabulary = str(tmp_path / 'vocabulary')
    os.mkdir(vocabulary)
    clip_tokenizer().model.save(vocabulary)  # vocab.json and merges.txt
    CLIPTokenizer(f'{vocabulary}/vocab.json', f'{vocabulary}/merges.txt', pad_token='!').save_pretrained(tmp_path)
    captions = ['wow! a cat', 'stop !!', 'a <|endoftext|> b']
    of_folder = build_tokenizer(str(tmp_path)).encode_batch(captions)
    of_clip = build_tokenizer().encode_batch(captions)
    assert [encoding.ids for encoding in of_folder] == [encoding.ids for encoding in of_clip]


def test_a_tokenizer_folder_pads_with_its_own_token(model_folder):
    ids = build_tokenizer(model_folder).encode('a cat').ids
    assert ids == [49406, 320, 2368] + [49407] * 74


def test_the_hash_is_of_what_a_folder_holds_now(tmp_path):
    vocabulary = str(tmp_path / 'vocabulary')
    os.mkdir(vocabulary)
    clip_tokenizer().model.save(vocabulary)  # vocab.json and merges.txt
    files = f'{vocabulary}/vocab.json', f'{vocabulary}/merges.txt'
    CLIPTokenizer(*files, pad_token='!').save_pretrained(tmp_path)
    assert hash_of_tokenizer(str(tmp_path)) == hash_of_tokenizer()
    CLIPTokenizer(*files, pad_token='?').save_pretrained(tmp_path)
    assert hash_of_tokenizer(str(tmp_path)) != hash_of_tokenizer()
