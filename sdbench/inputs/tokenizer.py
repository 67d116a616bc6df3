"""Tokenize captions into 77 token ids, with CLIP's vocabulary or with another tokenizer."""
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
from sdbench.models.folders import find_or_download

CAPTION_LENGTH = 77  # tokens in a caption: the number of positions in the text encoder
CLIP_VOCABULARY = 49408  # number of token ids
WORDS_PER_CAPTION = 20  # in the captions that `hash_of_ids` makes from a vocabulary
# `hash_of_tokenizer` of CLIP's own vocabulary, which takes two seconds to compute
CLIP_HASH = '39e11d223720cd722d1d0ab6b6585986bf6ed3b695bd943ca49430a10f3e8d9b'


def pipeline_tokenizer(name: str | None = None):
    """Build a transformers tokenizer, as diffusers' pipelines use it.

    `name` is a folder or a hub name of a tokenizer or a diffusers model. None means CLIP's vocabulary, which the
    open_clip package contains, padded with "!" (id 0) like Stable Diffusion 2. In transformers this "!" is a special
    token. Without `split_special_tokens` each "!" in a caption would become padding.

    Raises UserError if there is no tokenizer with that name.
    """
    if name is None:
        from transformers import CLIPTokenizerFast
        return CLIPTokenizerFast(tokenizer_object=clip_tokenizer(), pad_token='!', split_special_tokens=True,
                                 model_max_length=CAPTION_LENGTH)
    from transformers import AutoTokenizer
    folder = find_or_download('--tokenizer', name, ['*.json', '*.txt', 'tokenizer/*'])
    if (folder / 'tokenizer').is_dir():
        folder = folder / 'tokenizer'  # in a diffusers model
    try:
        return AutoTokenizer.from_pretrained(folder, split_special_tokens=True, model_max_length=CAPTION_LENGTH,
                                             trust_remote_code=False)  # by default it may prompt on the terminal
    except Exception as error:  # many types, some with a message that lists all models of transformers
        raise UserError(f'--tokenizer {name} has no tokenizer that loads ({type(error).__name__}); give a folder '
                        'with tokenizer.json, or with vocab.json and merges.txt') from None


def build_tokenizer(name: str | None = None) -> Tokenizer:
    """Build a tokenizer for `token_ids`. It returns the same 77 ids as `pipeline_tokenizer(name)`."""
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # the loader's workers already run in parallel
    loaded = pipeline_tokenizer(name)
    tokenizer = loaded.backend_tokenizer
    tokenizer.enable_truncation(CAPTION_LENGTH)
    tokenizer.enable_padding(length=CAPTION_LENGTH, pad_id=loaded.pad_token_id, pad_token=loaded.pad_token)
    return tokenizer


def token_ids(tokenizer: Tokenizer, captions: list[str]) -> list[list[int]]:
    """Return the 77 token ids of each caption. All ids in batches come from here.

    "!" is a word, also for a tokenizer that pads with "!". Set this for each call, because a tokenizer that was pickled
    for a loader worker has lost it.
    """
    tokenizer.encode_special_tokens = True
    return [encoding.ids for encoding in tokenizer.encode_batch(captions)]


def hash_of_tokenizer(name: str | None = None) -> str:
    """Return a SHA-256, in hex, of the token ids that `build_tokenizer(name)` returns for its whole vocabulary.

    Tokenizers that return the same ids have the same hash, even if different libraries saved them in different files.
    """
    if name is None:
        return CLIP_HASH
    tokenizer = build_tokenizer(name)
    return hash_of_ids(tokenizer.get_vocab(), functools.partial(token_ids, tokenizer))


def hash_of_ids(vocabulary: Iterable[str], encode: Callable[[list[str]], list[list[int]]]) -> str:
    """Return a SHA-256, in hex, of the token ids of an empty caption and of captions with all words of a vocabulary.

    The empty caption makes the hash depend on the padding. `encode` returns the token ids of each caption in a list.
    """
    words = [symbol.removesuffix('</w>') for symbol in sorted(vocabulary)]  # without CLIP's mark of an end
    captions = ['']
    for first in range(0, len(words), WORDS_PER_CAPTION):
        captions.append(' '.join(words[first:first + WORDS_PER_CAPTION]))
    return hashlib.sha256(json.dumps([captions, encode(captions)]).encode()).hexdigest()


def clip_tokenizer() -> Tokenizer:
    """Build CLIP's byte-pair encoding (Radford et al. 2021) from the vocabulary in the open_clip_torch package.

    Padding is "!" (id 0), but "!" is not a special token: as a word in a caption it has id 256, as in the training of
    the text encoder. "<|endoftext|>" in a caption is not a special token either.
    """
    # Number the symbols as CLIP does: bytes, bytes at the end of a word, merged pairs in order, two special tokens.
    merges = clip_merges()
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())  # 256, one for each byte
    last_symbols = [symbol + '</w>' for symbol in symbols]
    merged = [''.join(pair) for pair in merges]
    special = ['<|startoftext|>', '<|endoftext|>']
    vocabulary = {word: index for index, word in enumerate(symbols + last_symbols + merged + special)}
    tokenizer = Tokenizer(BPE(vocabulary, list(merges), continuing_subword_prefix='', end_of_word_suffix='</w>',
                              unk_token=special[1]))  # CLIP uses the end token for unknown symbols

    # Normalize the text, split it into words and punctuation, and turn these into bytes.
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r'\s+'), ' '), normalizers.Lowercase()])
    words_and_punctuation = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words_and_punctuation, 'removed', invert=True), pre_tokenizers.ByteLevel(False)])

    # Put the start and end tokens around each caption. With these options RobertaProcessing does nothing else.
    start, end = ((token, vocabulary[token]) for token in special)
    tokenizer.post_processor = processors.RobertaProcessing(end, start, add_prefix_space=False, trim_offsets=False)
    return tokenizer


def is_too_long(caption: str) -> bool:
    """Return whether a caption has more than 77 tokens in CLIP's vocabulary, so training truncates it."""
    # Skip the tokenizer for most captions: two of the 77 tokens are start and end, and each of the other tokens has at
    # least one byte.
    if len(caption.encode()) < CAPTION_LENGTH - 1:
        return False
    return len(counting_tokenizer().encode(caption).ids) > CAPTION_LENGTH


counting_tokenizer = functools.cache(clip_tokenizer)  # built when the first long caption is counted


@functools.cache  # a run with an evaluation builds two tokenizers
def clip_merges() -> tuple[tuple[str, str], ...]:
    """Return the pairs of symbols that CLIP's byte-pair encoding merges, in order of priority."""
    package = importlib.util.find_spec('open_clip')  # finds the file without importing open_clip, which takes 3 s
    path = os.path.join(package.submodule_search_locations[0], 'bpe_simple_vocab_16e6.txt.gz')
    with gzip.open(path, 'rt', encoding='utf-8') as file:
        lines = file.read().split('\n')
    return tuple(tuple(line.split()) for line in lines[1:48895])  # between a heading and lines that CLIP ignores
