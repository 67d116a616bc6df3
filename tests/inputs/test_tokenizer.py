"""Token ids equal the ids of open_clip's tokenizer."""
import pickle
from pathlib import Path

from transformers import CLIPTokenizer

from data import StreamingLAIONDataset
from sdbench.datasets.converter import clean_caption
from sdbench.inputs.tokenizer import build_tokenizer, clip_tokenizer, token_ids
from tests.samples import good, write_shards


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
    folder = write_tokenizer(tmp_path, '!')
    for tokenizer in (build_tokenizer(folder), pickle.loads(pickle.dumps(build_tokenizer(folder)))):
        assert token_ids(tokenizer, captions) == of_clip
    samples = [good(0) | {'caption': caption} for caption in captions]
    dataset = StreamingLAIONDataset(write_shards(tmp_path / 'shards', samples), tokenizer_name_or_path=folder,
                                    image_size=8, batch_size=1)
    dataset.tokenizer = pickle.loads(pickle.dumps(dataset.tokenizer))  # as a spawned worker of torch's loader gets it
    assert [dataset[number]['caption'].tolist() for number in range(3)] == of_clip
