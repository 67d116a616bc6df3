"""What is to be evaluated: the model that draws, its captions, and the real images to compare with."""
import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from inputs.errors import one_line
from inputs.places import number_of_samples
from inputs.shards import index_hash, read_index, require_columns
from inputs.text_files import read_captions, refuse_too_few
from inputs.verified_stream import open_shards
from models.feature_extractors import LAYER, NETWORK, RESIZE, hash_of_files, sha256_of
from parts.evaluation import FEATURES, Piece
from settings.commands import Evaluate

MOST_SAMPLES_OF_A_PART = 128
FEWEST_PARTS = 16  # of few samples, so that several GPUs have something to do
ABOUT = 'made_of'  # in the metadata of a --reference
HASH = 'features_sha256'  # in ABOUT


@dataclass(frozen=True)
class Model:
    """A model that draws.

    Attributes:
        folder: a pipeline of diffusers.
        name: as --model_name names it; of a pipeline, its folder.
        weights: averaged or live; None where that is not known.
        batch: that it was trained up to; None where that is not known.
        images_seen: in these batches.
        training: flags of the training that its checkpoint keeps.
    """
    folder: str
    name: str
    weights: str | None = None
    batch: int | None = None
    images_seen: int | None = None
    training: dict | None = None

    def config(self, part: str, file: str = 'config.json') -> dict:
        """The configuration of a part."""
        return json.loads(Path(self.folder, part, file).read_text())


@dataclass(frozen=True)
class Data:
    """What is drawn, and what it is compared with.

    Attributes:
        captions: of the samples, in their order.
        index: of the shards with their images; None where these are not images, or a text.
        copies: folder of this machine for copies of the shards; None where they are read in place.
    """
    captions: list[str]
    index: dict | None
    copies: str | None = None

    @property
    def captions_sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.captions).encode()).hexdigest()


@dataclass
class Evaluation:
    """What is to be done.

    Attributes:
        flags: of the command line.
        model: that draws.
        model_sha256: see `hash_of_pipeline`.
        data: what is drawn.
        image_size: of the pictures, in pixels.
        judges: hashes of the weights that pictures are judged by.
        reference: what the features of the real images are made of; None without FID.
        given: these features, (M, 2048), where --reference holds them already.
    """
    flags: Evaluate
    model: Model
    model_sha256: str
    data: Data
    image_size: int
    judges: dict[str, str | None]
    reference: dict | None
    given: torch.Tensor | None

    @property
    def part_samples(self) -> int:
        """The most that a part has."""
        return min(MOST_SAMPLES_OF_A_PART, math.ceil(self.flags.samples / FEWEST_PARTS))

    @property
    def num_ranges(self) -> int:
        """Parts of all samples at one scale."""
        return math.ceil(self.flags.samples / self.part_samples)

    def pieces(self) -> dict[int, Piece]:
        """What each part is made of, by its number. Those of the real images have the last numbers, and are made first.
        """
        drawn = {}
        real = {}
        samples = self.flags.samples
        for number, first in enumerate(range(0, samples, self.part_samples)):
            size = min(self.part_samples, samples - first)
            captions = tuple(self.data.captions[first:first + size])
            for row, guidance in enumerate(self.flags.guidance):
                drawn[row * self.num_ranges + number] = Piece(first, size, guidance, captions)
            if self.reference and self.given is None:
                real[len(self.flags.guidance) * self.num_ranges + number] = Piece(first, size)
        return real | dict(sorted(drawn.items()))

    def parts_at(self, row: int) -> range:
        """The numbers of the parts of a guidance scale, or after the last of these, of the real images."""
        return range(row * self.num_ranges, (row + 1) * self.num_ranges)

    def contents(self) -> dict:
        """What --out is made of."""
        flags = self.flags
        return {'program': 'evaluate.py', 'batch': self.model.batch, 'model_sha256': self.model_sha256,
                'samples': flags.samples, 'captions_sha256': self.data.captions_sha256, 'guidance': flags.guidance,
                'steps': flags.steps, 'seed': flags.seed, 'image_size': self.image_size, 'precision': flags.precision,
                'save_pictures': flags.save_pictures, **self.judges, 'reference': self.reference}


def read_data(flags: Evaluate, copies: str | None) -> Data:
    """The captions, and the shards of images where there are any, with their copies in a folder.

    Raises ValueError if there are too few, there is nothing to compare pictures with.
    """
    if os.path.isfile(flags.data):
        return Data(read_captions(flags.data, flags.samples), None)
    index = read_index(flags.data, 'DATA')
    require_columns(flags.data, index, 'DATA')
    has_images = 'latents' not in index
    has_reference = flags.reference and os.path.exists(flags.reference)
    if flags.inception and not has_images and not has_reference:
        raise ValueError(f'DATA {flags.data} holds latents, and FID compares with images; give the images that they '
                         'were made of, or --reference FILE')
    refuse_too_few(flags.data, number_of_samples(index), flags.samples, 'sample')
    captions = []
    shards = open_shards(flags.data, copies, index)
    for sample in shards.samples(0, flags.samples):
        captions.append(sample['caption'])
    return Data(captions, index if has_images else None, copies)


def hashes_of_judges(flags: Evaluate) -> dict[str, str | None]:
    """Of the weights that pictures are judged by. Raises ValueError if a folder has none."""
    judges = {'inception_sha256': None, 'clip_sha256': None}
    try:
        if flags.inception:
            judges['inception_sha256'] = sha256_of(Path(flags.inception))
        if flags.clip:
            judges['clip_sha256'] = hash_of_files(Path(flags.clip))
    except OSError as error:
        raise ValueError(f'{error.filename} cannot be read ({error.strerror}); give weights that can') from None
    return judges


def resize_in_words(image_size: int) -> str:
    """What happens to a real image on its way to the features; to a picture, the last of it."""
    return f'centre square, to {image_size} pixels bilinear with antialias, {RESIZE}'


def reference_file(about: dict, features: torch.Tensor) -> bytes:
    """The content of a --reference: features of real images, (M, 2048), and what they are made of."""
    return save({FEATURES: features}, {ABOUT: json.dumps(about | {HASH: hash_of_features(features)})})


def read_reference(path: str) -> tuple[dict, torch.Tensor]:
    """What the features in a --reference are made of, and these features. Raises ValueError if it holds none."""
    try:
        with safe_open(path, 'pt') as file:
            about = json.loads(file.metadata()[ABOUT])
            features = file.get_tensor(FEATURES)
        if about.pop(HASH) != hash_of_features(features) or about['images'] != len(features):
            raise ValueError('they have changed since they were made')
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'--reference {path} holds no features of evaluate.py ({one_line(error)[:200]}); name another '
                         'file, which is then made') from None
    return about, features


def hash_of_features(features: torch.Tensor) -> str:
    return hashlib.sha256(features.numpy().tobytes()).hexdigest()


def find_reference(flags: Evaluate, data: Data, image_size: int, inception_sha256: str | None
                   ) -> tuple[dict | None, torch.Tensor | None]:
    """What the features of the real images are made of, and where --reference holds them already, these features.

    Raises ValueError if it holds those of another network, resize, or dataset.
    """
    if not flags.inception:
        return None, None
    ours = {'network': f'{NETWORK} {LAYER}', 'inception_sha256': inception_sha256,
            'resize': resize_in_words(image_size)}
    if data.index:
        ours |= {'index_sha256': index_hash(data.index), 'images': flags.samples}
    if not flags.reference or not os.path.lexists(flags.reference):
        return ours, None
    theirs, features = read_reference(flags.reference)
    place = f'--reference {flags.reference}'
    for key in ours:
        if key != 'images' and theirs.get(key) != ours[key]:
            raise ValueError(f'{place} was made with {key} {theirs.get(key)}, and this run has {ours[key]}; their FID '
                             'could not be compared; name another file, which is then made')
    return theirs, features
