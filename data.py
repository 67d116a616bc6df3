"""Image-caption batches for the benchmark, synthetic or streamed from MDS shards.

A batch is `image` uint8 (B, 3, H, H), or `moments` float16 (B, 8, H/8, H/8) as encode.py stores them, and `caption`
int64 (B, 77). Images travel as bytes at the size they were stored in; `normalize` brings a microbatch to the training
size and to [-1, 1] once it is on the device.
"""
import contextlib
import fcntl
import gzip
import hashlib
import importlib.util
import io
import json
import math
import os
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path, PurePosixPath
from time import sleep

import torch
import torch.nn.functional as F
import torchvision
from composer.core import DataSpec
from composer.utils import dist
from PIL import ExifTags, Image, UnidentifiedImageError
from streaming import StreamingDataLoader, StreamingDataset
from streaming.base.constant import TICK
from streaming.base.dataset import _ShardState
from streaming.base.format.mds.encodings import is_mds_encoding_safe
from streaming.base.hashing import get_hash
from streaming.base.storage import CloudDownloader
from streaming.base.util import clean_stale_shared_memory
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.utils.data import DataLoader, Dataset

LATENTS = 'moments'  # the column of encode.py's shards, and the name in a batch: ndarray float16 (8, H/8, W/8)
MDS_COLUMNS = {'jpg': 'bytes', 'caption': 'str'}  # an image of any of FORMATS; other columns are ignored
LATENT_COLUMNS = {'caption': 'str'}  # and LATENTS, whose type has the size in it
CAPTION_LENGTH = 77  # tokens: the text encoder's positions
CLIP_VOCABULARY = 49408


class SyntheticImageCaptionDataset(Dataset):
    """Random images or latents with captions, drawn once: every batch is the same tensors, so a sample costs nothing.

    Args:
        image_size: height and width of the images, in pixels.
        num_samples: length of an epoch, over all ranks.
        vocab_size: token ids are drawn from 0 to vocab_size - 1.
        seed: of the draw; give each rank its own.
        latents: give the VAE's `moments` float16 (B, 8, H/8, H/8) in the place of images.
    """

    def __init__(self, image_size: int = 512, num_samples: int = 100_000, vocab_size: int = CLIP_VOCABULARY,
                 seed: int = 17, latents: bool = False):
        self.image_size, self.num_samples, self.vocab_size = image_size, num_samples, vocab_size
        self.seed, self.latents, self.batch = seed, latents, {'caption': ()}

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """The batch for any `indices`: `image` uint8 (B, 3, H, H) or `moments`, and `caption` int64 (B, 77)."""
        if len(self.batch['caption']) != len(indices):
            number, side, generator = len(indices), self.image_size, torch.Generator().manual_seed(self.seed)
            if self.latents:
                self.batch = {LATENTS: torch.randn(number, 8, side // 8, side // 8, generator=generator).half()}
            else:
                image = torch.randint(256, (number, 3, side, side), dtype=torch.uint8, generator=generator)
                self.batch = {'image': image}
            self.batch['caption'] = torch.randint(self.vocab_size, (number, CAPTION_LENGTH), generator=generator)
        return self.batch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}


class DataError(Exception):
    """A run cannot go on with this data."""


def one_line(error: BaseException) -> str:
    """What an error says, in one line; of a worker's traceback, what the DataError says that it ends with."""
    return ' '.join(str(error).split()).rpartition('DataError: ')[2]


class StreamingLAIONDataset(StreamingDataset):
    """Samples of MDS shards with the columns `jpg` (bytes) and `caption` (str), or encode.py's `moments` for `jpg`.

    Args:
        remote: folder or object store with the shards. A local folder is read where it is, unless `local` is given.
        local: folder that caches the shards; default: one for each remote, see `cache_folder`.
        image_size: larger images are reduced to this many pixels a side.
        kwargs: for `streaming.StreamingDataset`; `batch_size` is per device.
    """

    def __init__(self, remote: str, local: str | None = None, image_size: int = 512, **kwargs):
        self.image_size = image_size
        self._verified: set[int] = set()  # shards that this process has checked
        clean_shared_memory()
        if local is None and os.path.isdir(remote):
            local, remote = remote, None
        else:
            claim_cache(local := local or cache_folder(remote), remote)
        with starting_alone():
            super().__init__(remote=remote, local=local, **kwargs)

    def __iter__(self):
        """Samples of this worker's part of an epoch. DataError where Streaming would end it early, and quietly."""
        yield from super().__iter__()
        if self._event.is_set():
            raise DataError(self.failure)

    def on_exception(self, future) -> None:
        """Streaming's own for its background threads, without the traceback in the log."""
        if error := future.exception():
            self.failure = str(unreadable(error))
            self._event.set()
            self._iterator.on_exit()  # for the thread that failed: where both do, Streaming waits for one for ever

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Streaming's own, but for a shard that it cannot fetch: other workers would wait for that one for ever."""
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception:
            self._shard_states[shard_id] = _ShardState.LOCAL  # so that they look, and fail as well
            self._cache_filelock.release(force=True)
            raise

    def _ready_thread(self, it) -> None:
        """Streaming's own, which waits for ever for a shard that a small cache has dropped again; this fetches it."""
        while not it.should_exit() and it.ready_index < it.total and not self._event.is_set():
            if self.predownload is not None and it.ready_index - it.yield_index > self.predownload:
                sleep(TICK)
                continue
            sample_id = it.sample_ids[it.ready_index]
            if sample_id != -1:  # else it is padding
                shard_id = self.spanner[sample_id][0]
                if self._shard_states[shard_id] != _ShardState.LOCAL:
                    self.prepare_shard(shard_id)
            it.ready_index += 1
        it.on_exit()

    @property
    def latents(self) -> bool:
        """Whether the samples are the VAE's moments, not images."""
        return LATENTS in self.shards[0].column_names

    def __getitem__(self, index: int) -> dict:
        """Sample `index`, or where it is bad the next good one; in `bad`, (index, reason) of each that was passed."""
        bad = []
        for candidate in range(index, index + 1000):
            candidate = int(candidate % self.num_samples)
            try:
                return self.sample(candidate) | {'bad': bad}
            except ValueError as error:
                bad.append((candidate, str(error)))
        raise DataError(f'{len(bad):,} samples in a row are bad, the first, {bad[0][0]}: {bad[0][1]}')

    def sample(self, index: int) -> dict:
        """`image` uint8 (3, H, H) or `moments` float16 (8, H/8, H/8), and `caption`.

        ValueError: the sample is bad; DataError: its shard cannot be had, or is not what index.json says.
        """
        try:
            self._verify(index)
            columns = super().__getitem__(index)
        except UnicodeDecodeError:
            raise ValueError('the caption is not UTF-8') from None
        except Exception as error:  # every storage client has its own
            raise error if isinstance(error, DataError) else unreadable(error) from None
        if not columns['caption'].strip():
            raise ValueError('no caption')
        if self.latents:
            return {LATENTS: torch.from_numpy(columns[LATENTS].copy()), 'caption': columns['caption']}
        return {'image': decode_image(columns['jpg'], self.image_size), 'caption': columns['caption']}

    def _verify(self, index: int) -> None:
        """Check the shard of a sample against index.json, once in each process."""
        shard_id = self.spanner[index][0]
        shard = self.shards[shard_id]
        path = os.path.join(shard.dirname, shard.split, shard.raw_data.basename)
        for _ in range(8):  # a small cache may drop it again before it is read
            if shard_id in self._verified:
                return
            try:
                if fault := shard_fault(path, shard.raw_data, shard.samples):
                    raise DataError(f'shard {path} {fault}; put a good copy in its place')
                self._verified.add(shard_id)
            except FileNotFoundError:
                self.prepare_shard(shard_id)


def unreadable(error: BaseException) -> DataError:
    """A storage client's error as ours, with the remedy where it is known."""
    full = '; free some of the disk, or bound the cache with --cache_limit' * ('No space left' in str(error))
    return DataError(f'a shard could not be read ({type(error).__name__}: {one_line(error)}){full}')


def shard_fault(path: str, expected, samples: int) -> str | None:
    """What is wrong with the file of an MDS shard, by the `bytes`, `hashes` and number of samples of index.json."""
    with open(path, 'rb') as file:
        size, count = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(4), 'little')
        file.seek(4 + 4 * count)
        end = int.from_bytes(file.read(4), 'little')  # where the last sample ends, by the file itself
        if size not in (expected.bytes, end):
            return f'is cut short or damaged: {size:,} bytes, not the {expected.bytes:,} of index.json'
        file.seek(0)
        content = file.read() if size == expected.bytes and expected.hashes else b''
    for algorithm, digest in expected.hashes.items():
        if content and get_hash(algorithm, content) != digest:
            return f'fails its {algorithm} hash: its bytes have changed'
    if (size, count) != (expected.bytes, samples):
        return (f'is not the one of index.json: {count:,} samples in {size:,} bytes, not {samples:,} in '
                f'{expected.bytes:,}')
    return None


class BadSamples:
    """Names each bad sample once; ends the run where more than the share `limit` is bad (early on, 3 sigma more)."""

    def __init__(self, limit: float):
        self.limit, self.read, self.found = limit, 0, set()

    def __call__(self, batch: dict) -> dict:
        """The batch without its `bad_samples`. DataError: too many are bad."""
        self.read += batch.pop('read', len(batch['caption']))
        for index, reason in batch.pop('bad_samples', ()):
            if index not in self.found:
                self.found.add(index)
                print(f'bad sample {index} is left out: {reason}', file=sys.stderr)
        expected = self.limit * self.read
        if len(self.found) > math.ceil(expected + 3 * math.sqrt(expected)):
            raise DataError(f'{len(self.found):,} of {self.read:,} samples are bad, more than --max_bad_samples '
                            f'{self.limit:g} of them; mend the data or raise it')
        return batch


def clean_shared_memory() -> None:
    """Remove the shared memory that killed runs left, unless another run streams on this host now.

    Streaming's own cleaning takes it from live runs too. A POSIX lock ends with its process, and its workers have none.
    """
    try:
        if dist.get_local_rank() == 0:
            lock = os.open(os.path.join(tempfile.gettempdir(), f'streaming-{os.getuid()}.lock'), os.O_RDWR | os.O_CREAT)
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        clean_stale_shared_memory()  # ends in a barrier of all ranks
    except BlockingIOError:
        dist.barrier()
    if dist.get_local_rank() == 0:
        fcntl.lockf(lock, fcntl.LOCK_SH)  # never closed: held for as long as this process lives


@contextlib.contextmanager
def starting_alone():
    """Two runs that start on one host at once would give their shared memory the same names: one after the other."""
    if dist.get_local_rank() != 0:
        yield
        return
    with open(os.path.join(tempfile.gettempdir(), f'streaming-{os.getuid()}.start'), 'a') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield


def cache_folder(remote: str) -> str:
    """The default cache of a remote: its own folder, so that two remotes never mix."""
    return os.path.join(tempfile.gettempdir(), 'mds-cache', hashlib.sha256(remote.encode()).hexdigest()[:16])


def claim_cache(folder: str, remote: str) -> None:
    """Mark `folder` as the cache of `remote`: Streaming would mix two. ValueError: it is another's, or not writable."""
    marker = Path(folder, 'remote.txt')
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            own = Path(folder, f'remote.{os.getpid()}.tmp')
            own.write_text(remote)
            own.rename(marker)  # appears whole: other ranks read it now
        if marker.read_text() != remote:
            raise ValueError(f'--local {folder} caches {marker.read_text()}; give {remote} another folder')
    except OSError as error:
        raise ValueError(f'--local {folder} cannot be written: {error.strerror}') from None


def read_index(remote: str) -> dict:
    """The index.json of a dataset of MDS shards. ValueError: there is none, or none that can be read and trusted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(remote if os.path.isdir(remote) else folder, 'index.json')
        try:
            if not os.path.isdir(remote):
                CloudDownloader.direct_download(os.path.join(remote, 'index.json'), str(path))
            text = path.read_bytes()
        except FileNotFoundError:
            raise ValueError(f'--remote {remote} holds no index.json, so no MDS dataset; make one with convert.py') \
                from None
        except Exception as error:  # every storage client has its own exceptions
            why = f'{type(error).__name__}: {one_line(error)}'
            raise ValueError(f'--remote {remote} could not be read ({why})') from None
    try:
        index = json.loads(text)
        faults = [fault for fault in map(danger, index['shards']) if fault]
        dict(index.get('latents', {}))
    except (ValueError, KeyError, TypeError, AttributeError):  # of JSON, of Unicode, of what is in it
        faults = ['has an index.json that is not one of MDS shards; convert the data anew']
    if faults:
        raise ValueError(f'--remote {remote} {faults[0]}')
    return index


def danger(shard: dict) -> str | None:
    """What in the entry of a shard Streaming would write outside its folder, or run as code; raises if it is none."""
    for info in filter(None, (shard['raw_data'], shard['zip_data'])):
        name = PurePosixPath(info['basename'])
        if name.is_absolute() or '..' in name.parts:
            return f'has a shard named {name}, outside its folder; do not use it'
    for name, encoding in zip(shard['column_names'], shard['column_encodings'], strict=True):
        if not is_mds_encoding_safe(encoding):
            return f'has a column {name} of type {encoding}, which can run code; do not use it'
    shard['samples'] + shard['raw_data']['bytes']  # numbers


# Some others are decoded in Python, minutes for a few hundred bytes (DDS), or run a program (EPS: Ghostscript).
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'AVIF', 'TIFF', 'JPEG2000', 'PPM')
# What turns each EXIF orientation upright. ImageOps.exif_transpose also writes the EXIF anew: odd ones make it fail.
UPRIGHT = dict(enumerate((Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM,
                          Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE,
                          Image.Transpose.ROTATE_90), start=2))
MAX_SCANS = 200  # of a progressive JPEG: a scan of 31 bytes takes as long as one of the whole picture


def decode_image(data: bytes, image_size: int | None = None) -> torch.Tensor:
    """The centre square of an image of any of FORMATS, uint8 (3, H, H), upright and in RGB.

    Args:
        data: the encoded image. ValueError: it does not decode, or has more pixels than Pillow's limit.
        image_size: a larger square is reduced to this many pixels a side (antialiased); None leaves the size.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # Pillow's on bombs and palettes: the first is an error below
            with Image.open(io.BytesIO(data), formats=FORMATS) as header:
                image = _decode(header, data, image_size)
    except UnidentifiedImageError:
        raise ValueError('image does not decode: not a known format') from None
    except Exception as error:  # damaged bytes make Pillow raise nearly anything
        raise ValueError(f'image does not decode: {error or type(error).__name__}'.splitlines()[0]) from None
    height, width = image.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = image[:, top:top + side, left:left + side]  # (3, side, side)
    return resize(image, image_size) if image_size and side > image_size else image


def _decode(header: Image.Image, data: bytes, image_size: int | None) -> torch.Tensor:
    """Pixels of an opened image, uint8 (3, H, W): torchvision's decoder for plain JPEGs, Pillow for the rest."""
    if header.width * header.height > Image.MAX_IMAGE_PIXELS:
        raise ValueError(f'{header.width} x {header.height} pixels are more than {Image.MAX_IMAGE_PIXELS:,}')
    if header.info.get('progressive') and data.count(b'\xff\xda') > MAX_SCANS:
        raise ValueError(f'more than {MAX_SCANS} scans')
    much_larger = image_size is not None and min(header.size) >= 2 * image_size
    if header.format == 'JPEG' and header.mode in ('L', 'RGB') and not much_larger:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return torchvision.io.decode_jpeg(encoded, torchvision.io.ImageReadMode.RGB, apply_exif_orientation=True)
    if much_larger:
        header.draft(None, (image_size, image_size))  # JPEG decodes straight to 1/2, 1/4 or 1/8; others ignore it
    if header.mode.startswith('I'):  # 16 bits: Pillow's conversion to RGB would clip at 255
        header = header.point(lambda value: value / 256).convert('L')
    image = header.convert('RGB')
    try:
        orientation = header.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # unreadable in one of many ways: torchvision, too, takes it for upright then
        orientation = None
    image = image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image
    return torchvision.transforms.functional.pil_to_tensor(image)


def resize(image: torch.Tensor, image_size: int) -> torch.Tensor:
    """uint8 (3, H, H) to (3, image_size, image_size), bilinear and antialiased."""
    return F.interpolate(image[None], size=(image_size, image_size), mode='bilinear', antialias=True)[0]


def local_folder(flag: str, name: str, patterns: list[str]) -> Path:
    """The folder `name`, or what matches `patterns` of the hub's repository, downloaded once. ValueError: neither."""
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # wrong names, missing repositories, no network, no access
        raise ValueError(f'{flag} {name} is not a folder, and the hub gave nothing ({type(error).__name__}): check the '
                         'name and the network, or give a local folder') from None


def build_tokenizer(name: str | None = None) -> Tokenizer:
    """A tokenizer that pads and cuts captions to 77 tokens: `encode_batch(captions)`.

    Args:
        name: folder or hub name of a tokenizer or of a diffusers model (ValueError: there is none); None is CLIP's own
            vocabulary as open_clip packages it, padded with id 0 like Stable Diffusion 2.
    """
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # the workers are the parallelism
    if name is None:
        tokenizer, pad_id, pad_token = clip_tokenizer(), 0, '!'
    else:
        from transformers import AutoTokenizer
        folder = local_folder('--tokenizer', name, ['*.json', '*.txt', 'tokenizer/*'])
        try:
            place = folder / 'tokenizer' if (folder / 'tokenizer').is_dir() else folder
            loaded = AutoTokenizer.from_pretrained(place, trust_remote_code=False)  # else it may ask on the terminal
            tokenizer, pad_id, pad_token = loaded.backend_tokenizer, loaded.pad_token_id, loaded.pad_token
        except Exception as error:  # transformers raises many kinds for files that are not there or make no sense
            raise ValueError(f'--tokenizer {name} holds no tokenizer that loads ({type(error).__name__}); '
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
        raise ValueError('--tokenizer needs the package open_clip_torch for its vocabulary; install it or name one')
    path = os.path.join(package.submodule_search_locations[0], 'bpe_simple_vocab_16e6.txt.gz')
    with gzip.open(path, 'rt', encoding='utf-8') as file:
        merges = [tuple(line.split()) for line in file.read().split('\n')[1:48895]]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())  # one for each byte
    special = ['<|startoftext|>', '<|endoftext|>']
    words = symbols + [symbol + '</w>' for symbol in symbols] + [''.join(pair) for pair in merges] + special
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, continuing_subword_prefix='', end_of_word_suffix='</w>',
                                     unk_token=special[1]))
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r'\s+'), ' '), normalizers.Lowercase()])
    words_and_marks = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words_and_marks, 'removed', invert=True), pre_tokenizers.ByteLevel(False)])
    start, end = ((token, vocabulary[token]) for token in special)
    tokenizer.post_processor = processors.RobertaProcessing(end, start, add_prefix_space=False, trim_offsets=False)
    return tokenizer


def collate(samples: list[dict], tokenizer: Tokenizer, image_size: int) -> dict[str, torch.Tensor]:
    """One batch: `image` uint8 (B, 3, H, H) or `moments`, `caption` int64 (B, 77), and any `bad_samples`."""
    if LATENTS in samples[0]:
        batch = {LATENTS: torch.stack([sample[LATENTS] for sample in samples])}
    else:
        batch = {'image': stack_images([sample['image'] for sample in samples], image_size)}
    # 77 tokens are over long before: a caption of a MB would take a second and 200 MB
    captions = tokenizer.encode_batch([sample['caption'][:10_000] for sample in samples])
    batch['caption'] = torch.tensor([caption.ids for caption in captions])
    bad = [entry for sample in samples for entry in sample.get('bad', ())]
    return batch | {'bad_samples': bad} if bad else batch


def stack_images(images: list[torch.Tensor], image_size: int) -> torch.Tensor:
    """uint8 (B, 3, H, H): H is the stored size where all agree; mixed sizes are brought to `image_size`."""
    if len({image.shape for image in images}) > 1:
        images = [resize(image, image_size) for image in images]
    # decoders lay pixels out as (H, W, 3): copying them in that order is 6 times as fast as turning them here
    return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)


def normalize(batch: dict[str, torch.Tensor], image_size: int) -> dict[str, torch.Tensor]:
    """uint8 (B, 3, H, H) as stored to float32 (B, 3, image_size, image_size) in [-1, 1], on the batch's device."""
    if LATENTS in batch:
        return batch
    image = batch['image'].to(torch.float32, memory_format=torch.contiguous_format)
    if image.shape[-1] != image_size:
        image = F.interpolate(image, size=(image_size, image_size), mode='bilinear')
    return {**batch, 'image': image / 127.5 - 1}


def build_loader(dataset: Dataset, batch_size: int, num_workers: int, tokenizer: Tokenizer | None = None,
                 max_bad_samples: float = 0.01) -> DataSpec:
    """The loader of either dataset for Composer's Trainer; every batch is whole.

    Args:
        dataset: a SyntheticImageCaptionDataset or a StreamingLAIONDataset.
        batch_size: samples a device.
        num_workers: processes that decode, for each device; the synthetic dataset takes none.
        tokenizer: for the streamed dataset's captions.
        max_bad_samples: the share that may be bad before the run ends.
    """
    if isinstance(dataset, SyntheticImageCaptionDataset):
        sampler = dist.get_sampler(dataset, drop_last=True)
        loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=True, collate_fn=dict)
    else:
        loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers, drop_last=True,
                                     collate_fn=partial(collate, tokenizer=tokenizer, image_size=dataset.image_size),
                                     pin_memory=torch.cuda.is_available(), persistent_workers=num_workers > 0)
    return DataSpec(loader, batch_transforms=BadSamples(max_bad_samples),
                    microbatch_transforms=partial(normalize, image_size=dataset.image_size))
