"""Pictures are drawn and judged: what a worker of evaluate.py does, a part for each range of samples at one guidance
scale, or of the real images that they are compared with.
"""
import hashlib
import io
import json
import os
import platform
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import diffusers.utils.logging
import numpy as np
import torch
import transformers.utils.logging
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load, save
from tqdm import tqdm

from inputs.errors import DataError, is_out_of_memory, one_line
from inputs.images import decode_image, resize
from inputs.shards import index_hash, read_index
from inputs.verified_stream import Shards, open_shards
from models.feature_extractors import (
    Clip,
    hash_of_files,
    inception_features,
    load_clip,
    load_inception,
    sha256_of,
)
from models.sampling import build_pipeline, decode, denoise, noise_of_samples
from parts.claims import part_index, part_name, read_part, require_same_place
from parts.devices import device_of_worker, name_of_gpu
from parts.engine import Part
from parts.output import Output

FEATURES = 'features'  # of InceptionV3, float32 (n, 2048)
COSINES = 'cosines'  # of CLIP's embeddings of picture and caption, float32 (n,)
AUTOCAST = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16, 'fp32': None}
PARTS_OF_A_PIPELINE = ('unet', 'vae', 'text_encoder', 'tokenizer', 'scheduler')


@dataclass(frozen=True)
class QualitySettings:
    """What is drawn and by what it is judged.

    Attributes:
        pipeline: folder of the model, in the layout of diffusers.
        pipeline_sha256: see `hash_of_pipeline`.
        data: shards of the real images; None: none are looked at.
        index_hash: of their index.json.
        inception: file of InceptionV3's weights; None: no FID.
        inception_sha256: of that file.
        clip: folder of a CLIP model; None: no CLIP score.
        clip_sha256: of its weights.
        image_size: in pixels, of what is drawn and of the real images.
        batch_size: pictures at once.
        steps: of the sampler.
        seed: of the noise.
        precision: of the UNet: amp_bf16, amp_fp16 or fp32.
        save_pictures: whether they are kept.
        copies: folder of this machine for copies of the shards; None: each worker has its own, if it needs one.
        on_gpu: see `device_of_worker`.
    """
    pipeline: str
    pipeline_sha256: str
    data: str | None
    index_hash: str | None
    inception: str | None
    inception_sha256: str | None
    clip: str | None
    clip_sha256: str | None
    image_size: int
    batch_size: int
    steps: int
    seed: int
    precision: str
    save_pictures: bool
    copies: str | None
    on_gpu: bool | None


@dataclass(frozen=True)
class Piece:
    """What a part is made of: a range of samples.

    Attributes:
        first: the number of the first sample.
        number: of samples.
        guidance: that they are drawn at; None: the real images.
        captions: of what is drawn; empty for real images.
    """
    first: int
    number: int
    guidance: float | None = None
    captions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As errors call it."""
        what = 'real images' if self.guidance is None else f'pictures at guidance {self.guidance:g}'
        return f'{what} {self.first} to {self.first + self.number - 1}'


def features_name(number: int) -> str:
    """The file of a part in OUT."""
    return f'{part_name(number)}/features.safetensors'


def read_features(output: Output, number: int) -> dict[str, torch.Tensor]:
    """What a part holds: FEATURES, COSINES, or both. Raises DataError if it is not whole."""
    remedy = f'remove {part_index(number)} of {output.place}, and run the same command again'
    part = read_part(output, number)
    content = output.read(features_name(number))
    if part is None or content is None:
        raise DataError(f'{features_name(number)} of {output.place} is gone; {remedy}')
    if not isinstance(part, dict) or hashlib.sha256(content).hexdigest() != part.get('sha256'):
        raise DataError(f'{features_name(number)} of {output.place} is damaged; {remedy}')
    return load(content)


def hash_of_pipeline(folder: str) -> str:
    """A SHA-256 of the files of a pipeline that bear on what it draws."""
    hashes = [hash_of_files(Path(folder, part)) for part in PARTS_OF_A_PIPELINE]
    return hashlib.sha256(' '.join(hashes).encode()).hexdigest()


def load_pipeline(folder: str) -> StableDiffusionPipeline:
    """The pipeline of a folder, on the CPU in float32, with the sampler of `build_pipeline`.

    Raises ValueError if there is none that loads.
    """
    try:
        loaded = StableDiffusionPipeline.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, safety_checker=None, requires_safety_checker=False,
            feature_extractor=None, image_encoder=None)
        # some versions load in the precision of the files
        unet, vae, text_encoder = (part.float().eval() for part in (loaded.unet, loaded.vae, loaded.text_encoder))
        return build_pipeline(unet, vae, loaded.scheduler.config, text_encoder, loaded.tokenizer)
    except Exception as error:  # diffusers raises nearly anything for files that are not there or make no sense
        raise ValueError(f'MODEL {folder} holds no pipeline of Stable Diffusion that loads ({one_line(error)[:200]}); '
                         'give a checkpoint, or a folder of export.py') from None


def show_nothing_while_loading() -> None:
    """No bars of diffusers and transformers beside our own.

    The lock of tqdm's bars, also of those that show nothing, is otherwise a semaphore, of which Python says that it
    leaked when a worker is ended.
    """
    tqdm.set_lock(threading.RLock())
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


class Evaluator:
    """A worker that makes parts of features of pictures. What it judges by it loads when it is first needed.

    Args:
        output: where to.
        settings: of the evaluation.
        place: of this worker among those of its machine: the number of its GPU.

    Raises DataError if this machine does not see the same OUT, model or data as the one that gives it parts.
    """

    def __init__(self, output: Output, settings: QualitySettings, place: int):
        self.output = output
        self.settings = settings
        self.name = uuid.uuid4().hex
        show_nothing_while_loading()
        self.device = device_of_worker(place, settings.on_gpu)
        require_same_place(output)
        if hash_of_pipeline(settings.pipeline) != settings.pipeline_sha256:
            raise DataError(f'MODEL {settings.pipeline} is not the same on every machine, or has changed; use a shared '
                            'folder')
        self.copies: tempfile.TemporaryDirectory | None = None  # of the shards, which go with each part
        self.clock = [(0, 0.0)]  # pictures drawn so far and their seconds, at the start and after each part

    def __call__(self, parts: list[Part]) -> list[dict]:
        """Make a part after the other; returns what there is to say of each."""
        return [self.made(part) for part in parts]

    def made(self, part: Part) -> dict:
        """Make a part; returns its number, its samples, and what is known of this worker's speed.

        Raises DataError if it does not fit into memory.
        """
        [piece] = part.files
        try:
            if piece.guidance is None:
                features = {FEATURES: self.features_of_images(piece)}
            else:
                features = self.features_of_drawn(piece)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise DataError(f'out of memory at --batch_size {self.settings.batch_size} on {platform.node()}; use a '
                            'smaller one, or end what else runs on that GPU') from None
        self.keep(part, save(features))
        return {'number': part.number, 'samples': piece.number, 'is_drawn': piece.guidance is not None,
                'worker': self.figures()}

    def keep(self, part: Part, content: bytes) -> None:
        """Bring a part to OUT, and then say that it is whole."""
        name = features_name(part.number)
        self.output.write(name, content, part.attempt)
        self.output.remove_unfinished(name, part.attempt)
        index = json.dumps({'sha256': hashlib.sha256(content).hexdigest()})
        self.output.write_first(part_index(part.number), index.encode(), part.attempt)
        self.output.remove_unfinished(part_index(part.number), part.attempt)

    def figures(self) -> dict:
        """What is known of this worker's speed so far: `measured` pictures in `seconds`, without its first part."""
        start = min(1, max(0, len(self.clock) - 2))
        return {'name': self.name, 'machine': platform.node(), 'device': name_of_gpu(self.device),
                'measured': self.clock[-1][0] - self.clock[start][0],
                'seconds': self.clock[-1][1] - self.clock[start][1]}

    def features_of_drawn(self, piece: Piece) -> dict[str, torch.Tensor]:
        """What the judges find in the pictures of a range."""
        self.load_networks()
        start_time = time.perf_counter()
        found = []
        saved = []
        with ThreadPoolExecutor() as saver:  # compressing a picture takes as long as drawing it
            for start in range(0, piece.number, self.settings.batch_size):
                captions = list(piece.captions[start:start + self.settings.batch_size])
                pictures = self.draw(piece.first + start, captions, piece.guidance)
                found.append(self.judged(pictures, captions))
                if self.settings.save_pictures:
                    saved += [saver.submit(self.save_picture, number, picture, piece.guidance)
                              for number, picture in enumerate(pictures, start=piece.first + start)]
        for picture in saved:
            picture.result()  # raises what went wrong
        drawn, seconds = self.clock[-1]
        self.clock.append((drawn + piece.number, seconds + time.perf_counter() - start_time))
        return {name: torch.cat([batch[name] for batch in found]) for name in found[0]}

    def load_networks(self) -> None:
        """What draws and what judges, before the clock runs."""
        loaded = [self.pipeline, self.empty_text]
        if self.settings.inception:
            loaded.append(self.inception)
        if self.settings.clip:
            loaded.append(self.clip)

    def draw(self, first: int, captions: list[str], guidance: float) -> list[Image.Image]:
        """A picture of each caption, of the samples from number `first` on."""
        settings = self.settings
        numbers = range(first, first + len(captions))
        noise = noise_of_samples(numbers, settings.seed, settings.image_size // 8).to(self.device)
        text, empty_text = self.text_states(captions), self.empty_text
        dtype = AUTOCAST[settings.precision]
        # autocast casts each weight once a batch, and anew in each step where they need no gradients
        with torch.no_grad(), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            latents = denoise(self.pipeline, noise, text, empty_text, settings.steps, guidance)
        if not latents.isfinite().all():
            raise DataError(f'a picture of the samples {first} to {numbers[-1]} at guidance {guidance:g} is not finite '
                            f'in --precision {settings.precision}; try another')
        return decode(self.pipeline, latents.float())

    @torch.no_grad()
    def text_states(self, captions: list[str]) -> torch.Tensor:
        """States of the text encoder, float32 (B, 77, D)."""
        tokenizer = self.pipeline.tokenizer
        tokens = tokenizer(captions, padding='max_length', max_length=tokenizer.model_max_length, truncation=True,
                           return_tensors='pt').input_ids
        return self.pipeline.text_encoder(tokens.to(self.device))[0].float()

    def judged(self, pictures: list[Image.Image], captions: list[str]) -> dict[str, torch.Tensor]:
        """FEATURES and COSINES of pictures, as far as they are asked for."""
        found = {}
        if self.settings.inception:
            pixels = torch.stack([torch.from_numpy(np.array(picture)) for picture in pictures])  # (B, H, W, 3)
            found[FEATURES] = inception_features(self.inception, pixels.permute(0, 3, 1, 2).to(self.device))
        if self.settings.clip:
            found[COSINES] = self.clip.cosines(pictures, captions)
        return found

    def features_of_images(self, piece: Piece) -> torch.Tensor:
        """Features float32 (n, 2048) of real images: the centre square, brought to the size of what is drawn.

        Raises DataError if one does not decode.
        """
        size = self.settings.image_size
        images = []
        for number, sample in enumerate(self.shards.samples(piece.first, piece.first + piece.number),
                                        start=piece.first):
            try:
                image = decode_image(sample['jpg'], size)  # uint8 (3, H, H)
            except ValueError as error:
                raise DataError(f'sample {number} of DATA {self.settings.data}: {error}; leave that sample out'
                                ) from None
            images.append(image if image.shape[-1] == size else resize(image, size))
        if self.copies:
            for shard in range(len(self.shards)):
                self.shards.drop(shard)
        batches = torch.stack(images).split(self.settings.batch_size)
        return torch.cat([inception_features(self.inception, batch.to(self.device)) for batch in batches])

    def save_picture(self, number: int, picture: Image.Image, guidance: float) -> None:
        """Keep it in OUT, in a folder for each guidance scale."""
        png = io.BytesIO()
        picture.save(png, 'PNG')
        self.output.write(f'pictures/guidance-{guidance:g}/{number:06}.png', png.getvalue())

    @cached_property
    def pipeline(self) -> StableDiffusionPipeline:
        """That draws, on the device; a GPU's convolutions are faster in channels_last."""
        pipeline = load_pipeline(self.settings.pipeline).to(self.device)
        if self.device.type == 'cuda':
            pipeline.unet.to(memory_format=torch.channels_last)
            pipeline.vae.to(memory_format=torch.channels_last)
        return pipeline

    @cached_property
    def empty_text(self) -> torch.Tensor:
        """States of the empty caption, float32 (1, 77, D)."""
        return self.text_states([''])

    @cached_property
    def inception(self) -> torch.nn.Module:
        """Raises DataError if its weights are not those of the machine that gives parts."""
        self.require_same(self.settings.inception, sha256_of, self.settings.inception_sha256)
        return load_inception(self.settings.inception).to(self.device)

    @cached_property
    def clip(self) -> Clip:
        """Raises DataError if its weights are not those of the machine that gives parts."""
        self.require_same(self.settings.clip, hash_of_files, self.settings.clip_sha256)
        clip = load_clip(self.settings.clip)
        clip.model.to(self.device)
        return clip

    def require_same(self, weights: str, hash_of: Callable[[Path], str], sha256: str) -> None:
        """Raises DataError if weights are not there, or others than on the machine that gives parts."""
        try:
            is_same = hash_of(Path(weights)) == sha256
        except OSError:
            is_same = False
        if not is_same:
            raise DataError(f'{weights} on {platform.node()} is not that of the machine that gives it work; use a '
                            'shared folder')

    @cached_property
    def shards(self) -> Shards:
        """Of the real images. Raises DataError if they are not those of the machine that gives parts."""
        data = self.settings.data
        index = read_index(data, 'DATA')
        if index_hash(index) != self.settings.index_hash:
            raise DataError(f'DATA {data} is not the same on every machine; use a shared one or a store')
        folder = self.settings.copies
        if folder is None and not os.path.isdir(data):
            self.copies = tempfile.TemporaryDirectory(prefix='shards-')  # as long as this lives
            folder = self.copies.name
        return open_shards(data, folder, index)
