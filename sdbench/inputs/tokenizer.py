"""Tokenize captions into 77 token ids each, with CLIP's vocabulary or another tokenizer's."""
import functools
import gzip
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from sdbench.errors import UserError
from sdbench.hub import find_or_download

CAPTION_LENGTH = 77  # tokens: the text encoder's positions
CLIP_VOCABULARY = 49408  # token ids
WORDS_IN_A_CAPTION = 20  # of those that `hash_of_ids` makes of a vocabulary
# `hash_of_ids` of CLIP's own vocabulary, which takes two seconds to compute
CLIP_HASH = '39e11d223720cd722d1d0ab6b6585986bf6ed3b695bd943ca49430a10f3e8d9b'


def build_tokenizer(name: str | None = None) -> Tokenizer:
    """Build a tokenizer that pads or cuts each caption to 77 tokens: `encode_batch(captions)`.

    Args:
        name: folder or hub name of a tokenizer or of a diffusers model; None is CLIP's own
            vocabulary as open_clip packages it, padded with id 0 like Stable Diffusion 2.

    Raises UserError if there is no tokenizer of that name.
    """
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # the workers are the parallelism
    if name is None:
        tokenizer = clip_tokenizer()
        padding = {'pad_id': 0, 'pad_token': '!'}
    else:
        loaded = load_transformers_tokenizer(name)
        tokenizer = loaded.backend_tokenizer
        padding = {'pad_id': loaded.pad_token_id, 'pad_token': loaded.pad_token}
    tokenizer.enable_truncation(CAPTION_LENGTH)
    tokenizer.enable_padding(length=CAPTION_LENGTH, **padding)
    return tokenizer


def load_transformers_tokenizer(name: str):
    """Load the transformers tokenizer of a folder or of a hub repository. Raises UserError if there is none."""
    from transformers import AutoTokenizer
    folder = find_or_download('--tokenizer', name, ['*.json', '*.txt', 'tokenizer/*'])
    if (folder / 'tokenizer').is_dir():
        folder = folder / 'tokenizer'  # of a diffusers model
    try:
        return AutoTokenizer.from_pretrained(folder, split_special_tokens=True,
                                             trust_remote_code=False)  # else it may ask on the terminal
    except Exception as error:  # of many kinds, some of which list all models that transformers knows
        raise UserError(f'--tokenizer {name} holds no tokenizer that loads ({type(error).__name__}); give a folder '
                        'with tokenizer.json or vocab.json and merges.txt') from None


def hash_of_tokenizer(name: str | None = None) -> str:
    """Return a SHA-256 of the token ids that `build_tokenizer(name)` gives, in hex.

    Tokenizers that give the same ids have the same hash, in whichever files and by whichever library they were saved.

    Raises UserError if there is no tokenizer of that name.
    """
    if name is None:
        return CLIP_HASH
    tokenizer = build_tokenizer(name)
    return hash_of_ids(tokenizer.get_vocab(),
                       lambda captions: [encoded.ids for encoded in tokenizer.encode_batch(captions)])


def hash_of_ids(vocabulary: Iterable[str], encode: Callable[[list[str]], list[list[int]]]) -> str:
    """Return a SHA-256 of the ids of the empty caption, which is padding, and of captions of all words of a vocabulary.

    Args:
        vocabulary: the symbols that a tokenizer knows.
        encode: gives the ids of captions.
    """
    words = []
    for symbol in sorted(vocabulary):
        words.append(symbol.removesuffix('</w>'))  # the mark of a word's end
    captions = ['']
    for first in range(0, len(words), WORDS_IN_A_CAPTION):
        captions.append(' '.join(words[first:first + WORDS_IN_A_CAPTION]))
    return hashlib.sha256(json.dumps([captions, encode(captions)]).encode()).hexdigest()


def pipeline_tokenizer(name: str | None = None):
    """Build a transformers tokenizer that gives a diffusers pipeline the ids of `build_tokenizer`.

    In transformers the padding token "!" of Stable Diffusion 2 is a special token. Without `split_special_tokens` each
    "!" in a caption would become padding.

    Raises UserError if there is no tokenizer of that name.
    """
    if name is not None:
        tokenizer = load_transformers_tokenizer(name)
        tokenizer.model_max_length = CAPTION_LENGTH
        return tokenizer
    from transformers import CLIPTokenizerFast
    return CLIPTokenizerFast(tokenizer_object=clip_tokenizer(), pad_token='!', split_special_tokens=True,
                             model_max_length=CAPTION_LENGTH)


def clip_tokenizer() -> Tokenizer:
    """Build CLIP's byte-pair encoding (Radford et al. 2021) from the vocabulary in the open_clip_torch package.

    "!" is the padding token, but no special token: in a caption it is the word 256, as the text encoder was trained.
    "<|endoftext|>" is no special token either where a caption contains it.
    """
    # the vocabulary: bytes, bytes that end a word, merged pairs in their order, and two special tokens
    merges = clip_merges()
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())  # one for each byte
    last_symbols = [symbol + '</w>' for symbol in symbols]
    merged = [''.join(pair) for pair in merges]
    special = ['<|startoftext|>', '<|endoftext|>']
    vocabulary = {word: index for index, word in enumerate(symbols + last_symbols + merged + special)}
    tokenizer = Tokenizer(BPE(vocabulary, list(merges), continuing_subword_prefix='', end_of_word_suffix='</w>',
                              unk_token=special[1]))

    # text to words, and words to bytes
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r'\s+'), ' '), normalizers.Lowercase()])
    words_and_marks = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words_and_marks, 'removed', invert=True), pre_tokenizers.ByteLevel(False)])

    # start and end tokens around each caption
    start, end = ((token, vocabulary[token]) for token in special)
    tokenizer.post_processor = processors.RobertaProcessing(end, start, add_prefix_space=False, trim_offsets=False)
    return tokenizer


def is_too_long(caption: str) -> bool:
    """Tell whether a caption has more than 77 tokens of CLIP's vocabulary, so that its end is cut."""
    if len(caption.encode()) < CAPTION_LENGTH - 1:  # beside the two tokens around it each has a byte at least
        return False
    return len(counting_tokenizer().encode(caption).ids) > CAPTION_LENGTH


counting_tokenizer = functools.cache(clip_tokenizer)  # built at the first long caption


@functools.cache  # a run that is evaluated makes two tokenizers
def clip_merges() -> tuple[tuple[str, str], ...]:
    """Read the pairs of symbols that CLIP's vocabulary merges, in order of priority."""
    package = importlib.util.find_spec('open_clip')  # finds the file without the 3 s of importing open_clip
    path = os.path.join(package.submodule_search_locations[0], 'bpe_simple_vocab_16e6.txt.gz')
    with gzip.open(path, 'rt', encoding='utf-8') as file:
        lines = file.read().split('\n')
    return tuple(tuple(line.split()) for line in lines[1:48895])  # after a heading; what follows was never used
