"""Image-caption batches for the benchmark, synthetic or streamed from MDS shards.

A batch is `image` uint8 (B, 3, H, H) and `caption` int64 (B, 77). Images travel as bytes at the size they were stored
in; `normalize` brings a microbatch to the training size and to [-1, 1] once it is on the device.
"""
import gzip
import hashlib
import importlib.util
import io
import json
import os
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from composer.core import DataSpec
from composer.utils import dist
from PIL import Image, ImageOps, UnidentifiedImageError
from streaming import StreamingDataLoader, StreamingDataset
from streaming.base.storage import CloudDownloader
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch.utils.data import DataLoader, Dataset

MDS_COLUMNS = {'jpg': 'bytes', 'caption': 'str'}  # any format that Pillow reads; other columns are ignored
CAPTION_LENGTH = 77  # tokens: the text encoder's positions
CLIP_VOCABULARY = 49408


class SyntheticImageCaptionDataset(Dataset):
    """Random images and captions, drawn once: every batch is the same tensors, so a sample costs nothing.

    Args:
        image_size: height and width of the images, in pixels.
        num_samples: length of an epoch, over all ranks.
        vocab_size: token ids are drawn from 0 to vocab_size - 1.
        seed: of the draw; give each rank its own.
    """

    def __init__(self, image_size: int = 512, num_samples: int = 100_000, vocab_size: int = CLIP_VOCABULARY,
                 seed: int = 17):
        self.image_size, self.num_samples, self.vocab_size, self.seed = image_size, num_samples, vocab_size, seed
        self.batch = {'image': torch.empty(0), 'caption': torch.empty(0)}

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """The batch for any `indices`: `image` uint8 (B, 3, H, H), `caption` int64 (B, 77)."""
        if len(self.batch['image']) != len(indices):
            generator = torch.Generator().manual_seed(self.seed)
            image_shape = (len(indices), 3, self.image_size, self.image_size)
            self.batch = {
                'image': torch.randint(256, image_shape, dtype=torch.uint8, generator=generator),
                'caption': torch.randint(self.vocab_size, (len(indices), CAPTION_LENGTH), generator=generator),
            }
        return dict(self.batch)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}


class ShardError(Exception):
    """A shard could not be had, after Streaming's retries; the last line says why."""


class StreamingLAIONDataset(StreamingDataset):
    """Image-caption pairs from MDS shards with the columns `jpg` (bytes) and `caption` (str).

    Args:
        remote: folder or object store with the shards. A local folder is read where it is, unless `local` is given.
        local: folder that caches the shards; default: one for each remote, see `cache_folder`.
        image_size: larger images are reduced to this many pixels a side.
        kwargs: for `streaming.StreamingDataset`; `batch_size` is per device.

    Raises:
        ValueError: `local` caches another remote.
    """

    def __init__(self, remote: str, local: str | None = None, image_size: int = 512, **kwargs):
        self.image_size = image_size
        if os.path.isdir(remote) and local is None:
            super().__init__(local=remote, **kwargs)
        else:
            local = local or cache_folder(remote)
            claim_cache(local, remote)
            super().__init__(remote=remote, local=local, **kwargs)

    def __iter__(self):
        """Samples of this worker's part of an epoch. Streaming would end the epoch early, and quietly.

        Raises:
            ShardError: a shard could not be had.
        """
        yield from super().__iter__()
        if self._event.is_set():
            raise ShardError(self.failure)

    def on_exception(self, future) -> None:
        """Streaming's own for its background threads, without the traceback in the log."""
        if error := future.exception():
            self.failure = f'a shard could not be read ({type(error).__name__}: {" ".join(str(error).split())})'
            self._event.set()
            self._iterator.on_exit()  # for the thread that failed: where both do, Streaming waits for one for ever

    def __getitem__(self, index: int) -> dict:
        sample = super().__getitem__(index)
        return {'image': decode_image(sample['jpg'], self.image_size), 'caption': sample['caption']}


def cache_folder(remote: str) -> str:
    """The default cache of a remote: its own folder, so that two remotes never mix."""
    return os.path.join(tempfile.gettempdir(), 'mds-cache', hashlib.sha256(remote.encode()).hexdigest()[:16])


def claim_cache(folder: str, remote: str) -> None:
    """Mark `folder` as the cache of `remote`. Streaming would take the shards of one remote for another's.

    Raises:
        ValueError: it is the cache of another remote, or cannot be written.
    """
    marker = Path(folder, 'remote.txt')
    try:
        if marker.exists() and marker.read_text() != remote:
            raise ValueError(f'{folder} caches {marker.read_text()}; give {remote} another folder')
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(remote)
    except OSError as error:
        raise ValueError(f'{folder} cannot be written: {error.strerror}') from None


def read_index(remote: str) -> tuple[int, list[str]]:
    """Number of samples and names of the columns, from the dataset's index.json.

    Raises:
        ValueError: there is no index, it cannot be fetched, or it is not one of MDS shards.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(remote if os.path.isdir(remote) else folder, 'index.json')
        try:
            if not os.path.isdir(remote):
                CloudDownloader.direct_download(os.path.join(remote, 'index.json'), path)
            with open(path) as file:
                shards = json.load(file)['shards']
            return sum(shard['samples'] for shard in shards), shards[0]['column_names'] if shards else []
        except FileNotFoundError:
            raise ValueError('holds no index.json, so no MDS dataset; make one with convert.py') from None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            raise ValueError('has an index.json that is not one of MDS shards; convert the data anew') from None
        except Exception as error:  # every storage client has its own exceptions
            reason = ' '.join(str(error).split())
            raise ValueError(f'could not be read ({type(error).__name__}: {reason})') from None


def decode_image(data: bytes, image_size: int | None = None) -> torch.Tensor:
    """Decode an image of any format that Pillow reads and cut out its centre square.

    Args:
        data: the encoded image; EXIF orientation is applied, any colour mode becomes RGB.
        image_size: a larger square is reduced to this many pixels a side (antialiased); None leaves the size.

    Returns:
        uint8 (3, H, H).

    Raises:
        ValueError: the bytes do not decode, or would decode to more pixels than Pillow's limit.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # Pillow's on bombs and palettes: the first is an error below
            with Image.open(io.BytesIO(data)) as header:
                image = _decode(header, data, image_size)
    except UnidentifiedImageError:
        raise ValueError('image does not decode: not a known format') from None
    except (OSError, RuntimeError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f'image does not decode: {error}'.splitlines()[0]) from None
    height, width = image.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = image[:, top:top + side, left:left + side]  # (3, side, side)
    return resize(image, image_size) if image_size and side > image_size else image


def _decode(header: Image.Image, data: bytes, image_size: int | None) -> torch.Tensor:
    """Pixels of an opened image, uint8 (3, H, W): torchvision's decoder for plain JPEGs, Pillow for the rest."""
    if header.width * header.height > Image.MAX_IMAGE_PIXELS:
        raise ValueError(f'{header.width} x {header.height} pixels are more than {Image.MAX_IMAGE_PIXELS:,}')
    much_larger = image_size is not None and min(header.size) >= 2 * image_size
    if header.format == 'JPEG' and header.mode in ('L', 'RGB') and not much_larger:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return torchvision.io.decode_jpeg(encoded, torchvision.io.ImageReadMode.RGB, apply_exif_orientation=True)
    if much_larger:
        header.draft(None, (image_size, image_size))  # JPEG decodes straight to 1/2, 1/4 or 1/8; others ignore it
    if header.mode.startswith('I'):  # 16 bits: Pillow's conversion to RGB would clip at 255
        header = header.point(lambda value: value / 256).convert('L')
    image = ImageOps.exif_transpose(header).convert('RGB')
    return torchvision.transforms.functional.pil_to_tensor(image)


def resize(image: torch.Tensor, image_size: int) -> torch.Tensor:
    """uint8 (3, H, H) to (3, image_size, image_size), bilinear and antialiased."""
    return F.interpolate(image[None], size=(image_size, image_size), mode='bilinear', antialias=True)[0]


def local_folder(name: str, patterns: list[str]) -> Path:
    """The folder `name`, or the files of the hub's repository `name` that match `patterns`, downloaded once.

    Raises:
        ValueError: it is neither, or the hub is out of reach.
    """
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # wrong names, missing repositories, no network, no access
        raise ValueError(f'{name} is not a folder, and the hub gave nothing ({type(error).__name__}): check the name '
                         'and the network, or give a local folder') from None


def build_tokenizer(name: str | None = None) -> Tokenizer:
    """A tokenizer that pads and cuts captions to 77 tokens: `encode_batch(captions)`.

    Args:
        name: folder or hub name of a tokenizer or of a diffusers model; None is CLIP's own vocabulary as open_clip
            packages it, padded with id 0 like Stable Diffusion 2.

    Raises:
        ValueError: there is no such tokenizer.
    """
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # the workers are the parallelism
    if name is None:
        tokenizer, pad_id, pad_token = clip_tokenizer(), 0, '!'
    else:
        from transformers import AutoTokenizer
        folder = local_folder(name, ['*.json', '*.txt', 'tokenizer/*'])
        try:
            loaded = AutoTokenizer.from_pretrained(folder / 'tokenizer' if (folder / 'tokenizer').is_dir() else folder)
            tokenizer, pad_id, pad_token = loaded.backend_tokenizer, loaded.pad_token_id, loaded.pad_token
        except Exception as error:  # transformers raises many kinds for files that are not there or make no sense
            raise ValueError(f'{name} holds no tokenizer that loads ({type(error).__name__}); '
                             'give a folder with tokenizer.json or vocab.json and merges.txt') from None
    tokenizer.enable_truncation(CAPTION_LENGTH)
    tokenizer.enable_padding(length=CAPTION_LENGTH, pad_id=pad_id, pad_token=pad_token)
    return tokenizer


def clip_tokenizer() -> Tokenizer:
    """CLIP's byte-pair encoding (Radford et al. 2021) from the vocabulary in the open_clip_torch package.

    "!" pads but is not a special token: in a caption it is the word 256, as the text encoder was trained.
    """
    package = importlib.util.find_spec('open_clip')  # finds the file without the 3 s of importing open_clip
    if package is None:
        raise ValueError('needs the package open_clip_torch for its vocabulary; install it or give a folder')
    path = os.path.join(package.submodule_search_locations[0], 'bpe_simple_vocab_16e6.txt.gz')
    with gzip.open(path, 'rt', encoding='utf-8') as file:
        merges = [tuple(line.split()) for line in file.read().split('\n')[1:48895]]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())  # one for each byte
    words = symbols + [symbol + '</w>' for symbol in symbols] + [''.join(pair) for pair in merges]
    words += ['<|startoftext|>', '<|endoftext|>']
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, continuing_subword_prefix='', end_of_word_suffix='</w>',
                                     unk_token='<|endoftext|>'))
    tokenizer.add_special_tokens(['<|startoftext|>', '<|endoftext|>'])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r'\s+'), ' '), normalizers.Lowercase()])
    words_and_marks = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words_and_marks, 'removed', invert=True), pre_tokenizers.ByteLevel(False)])
    tokenizer.decoder = decoders.ByteLevel()
    start, end = (('<|startoftext|>', vocabulary['<|startoftext|>']), ('<|endoftext|>', vocabulary['<|endoftext|>']))
    tokenizer.post_processor = processors.RobertaProcessing(end, start, add_prefix_space=False, trim_offsets=False)
    return tokenizer


def collate(samples: list[dict], tokenizer: Tokenizer, image_size: int) -> dict[str, torch.Tensor]:
    """One batch of decoded samples: `image` uint8 (B, 3, H, H), `caption` int64 (B, 77).

    H is the stored size where all agree; a batch of mixed sizes is brought to `image_size`.
    """
    images = [sample['image'] for sample in samples]
    if len({image.shape for image in images}) > 1:
        images = [resize(image, image_size) for image in images]
    captions = tokenizer.encode_batch([sample['caption'] for sample in samples])
    # decoders lay pixels out as (H, W, 3): copying them in that order is 6 times as fast as turning them here
    image = torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)  # (B, 3, H, H)
    return {'image': image, 'caption': torch.tensor([caption.ids for caption in captions])}


def normalize(batch: dict[str, torch.Tensor], image_size: int) -> dict[str, torch.Tensor]:
    """uint8 (B, 3, H, H) as stored to float32 (B, 3, image_size, image_size) in [-1, 1], on the batch's device."""
    image = batch['image'].to(torch.float32, memory_format=torch.contiguous_format)
    if image.shape[-1] != image_size:
        image = F.interpolate(image, size=(image_size, image_size), mode='bilinear')
    return {**batch, 'image': image / 127.5 - 1}


def build_loader(dataset: Dataset, batch_size: int, num_workers: int, tokenizer: Tokenizer | None = None) -> DataSpec:
    """The loader of either dataset for Composer's Trainer; every batch is whole.

    Args:
        dataset: a SyntheticImageCaptionDataset or a StreamingLAIONDataset.
        batch_size: samples a device.
        num_workers: processes that decode, for each device; the synthetic dataset needs none.
        tokenizer: for the streamed dataset's captions.
    """
    to_device_form = partial(normalize, image_size=dataset.image_size)
    if isinstance(dataset, SyntheticImageCaptionDataset):
        sampler = dist.get_sampler(dataset, drop_last=True)
        loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=True, collate_fn=_as_it_is)
    else:
        loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers, drop_last=True,
                                     collate_fn=partial(collate, tokenizer=tokenizer, image_size=dataset.image_size),
                                     pin_memory=torch.cuda.is_available(), persistent_workers=num_workers > 0)
    return DataSpec(loader, microbatch_transforms=to_device_form)


def _as_it_is(batch: dict) -> dict:
    return batch
