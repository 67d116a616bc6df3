"""The flags of the other commands, and what of them cannot be. Nothing here needs torch."""
import argparse
import os
import re
from dataclasses import dataclass
from typing import Literal

from sdbench.costs import TRAINING_IMAGES, Prices
from sdbench.errors import UserError
from sdbench.flags.parser import count, flag, fraction, number, positional, positive, seed
from sdbench.flags.train import PRICES_HELP, DataLoading, Encoders, Model, Results, Warmup, pixels, price
from sdbench.hub import CLIP_MODEL
from sdbench.paths import EXPORTED
from sdbench.process import launcher_variable

TIMESTEPS = 1000  # of Stable Diffusion's noise
PICTURES = ('.png', '.pdf', '.svg')
BYTES = {'kb': 1 << 10, 'mb': 1 << 20, 'gb': 1 << 30}
LARGEST_LIMIT = (1 << 32) - 1  # an MDS shard counts its bytes in 32 bits


def shard_size(text: str) -> int:
    """Convert a size such as 64mb, that shards can have, to bytes."""
    match = re.fullmatch('([0-9]{1,9})(kb|mb|gb)', text.lower())
    size = int(match[1]) * BYTES[match[2]] if match else 0
    if 0 < size <= LARGEST_LIMIT:
        return size
    raise argparse.ArgumentTypeError(f'{text} is not a size below 4gb, such as 64mb')


def images_at_size(text: str) -> tuple[int | None, str]:
    """Convert IMAGES@SIZE: a number of images, and the size of a side in pixels. SIZE alone has None for the images."""
    match = re.fullmatch('(?:([1-9][0-9]*)@)?([1-9][0-9]*)', text)
    if match is None:
        raise argparse.ArgumentTypeError(f'{text} is not IMAGES@SIZE, such as 1126400000@256')
    images = int(match[1]) if match[1] else None
    return images, match[2]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    heading = 'work'

    ray: str | None = flag(os.environ.get('RAY_ADDRESS'), 'address of the Ray cluster whose machines do the work, such '
                           'as auto (default: RAY_ADDRESS of the environment, or else this machine alone)',
                           metavar='ADDRESS')

    def check(self) -> None:
        if launcher_variable('LOCAL_RANK') is not None:
            raise UserError('this command starts processes of its own; start it with python, not with a launcher')


@dataclass(frozen=True, kw_only=True)
class Convert(Cluster):
    heading = 'conversion'

    source: tuple[str, ...] = positional('tars, Parquet files, folders of these or of images, or globs; in an object '
                                         'store (s3://bucket/tars/) tars or Parquet files')
    out: str = positional('new folder or object store (s3://, gs://, azure://) for the MDS shards')
    held_out: float | None = flag(None, 'share of the samples to hold out: they go to OUT-held-out, for --eval_remote '
                                  'of benchmark.py (default: none)', converter=fraction)
    seed: int = flag(17, 'seed by which --held_out chooses images; whether one is held out depends on its bytes and '
                     'the seed alone', converter=seed)
    captions: str | None = flag(None, 'table of captions: CSV, JSON lines (.jsonl) or Parquet, with paths relative to '
                                'its folder (default: captions.csv, and metadata.csv, .jsonl or .parquet, in the '
                                'folders of SOURCE)', metavar='FILE')
    image_column: str | None = flag(None, 'name of the column of images in Parquet files (default: image), and of the '
                                    'column of paths in tables (default: file_name or filename)', metavar='NAME')
    caption_column: tuple[str, ...] = flag(
        (), 'names of the columns of captions in Parquet files and tables, one or several such as short long; of files '
        'beside an image suffixes, such as .txt .caption (default: text or caption, in the table of --captions also '
        'its only other column; of files the first with a caption)', metavar='NAME')
    sample_per_caption: bool = flag(False, 'make a sample of each caption of an image (default: off, an image is one '
                                    'sample with all its captions, of which a training draws one at each visit)')
    clean_captions: bool = flag(False, 'mend garbled letters and HTML such as &amp; in captions, as open_clip does')
    num_workers: int | None = flag(None, 'processes that convert on this machine (default: one for each core)',
                                   converter=count)
    size_limit: int = flag(64 << 20, 'largest size of a shard (default: 64mb)', converter=shard_size, metavar='SIZE')


@dataclass(frozen=True, kw_only=True)
class Encode(DataLoading, Model, Encoders, Warmup, Results, Cluster):
    heading = 'latents'

    out: str | None = flag(None, 'new folder or object store for the MDS shards of latents (needed)')
    batch_size: int = flag(32, 'images that each device encodes at once', converter=count)
    cpu: bool = flag(False, 'encode on the CPUs of the Ray cluster (default: off: on its GPUs, which are waited for)',
                     needs='ray')

    def check(self) -> None:
        if not (self.remote or self.local) or not self.out:
            raise UserError('give both --remote and --out')


@dataclass(frozen=True, kw_only=True)
class Export:
    heading = 'export'

    checkpoint: str = positional('checkpoint of benchmark.py, or a folder or an object store for its newest')
    out: str = positional('new folder for the pipeline; the folder of an earlier export is first renamed to OUT-1')
    raw_weights: bool = flag(False, 'export the raw (non-EMA) weights of the UNet (default: off, which exports the EMA '
                             'weights if there are any)')
    model_name: str | None = flag(None, 'model that has the configuration of each part: tiny, a diffusers folder or a '
                                  'hub name (default: --model_name of the run)')
    tokenizer: str | None = flag(None, 'folder or hub name of the tokenizer, if it has moved since the run (default: '
                                 "the run's)")

    def check(self) -> None:
        if os.path.lexists(self.out) and not os.path.isfile(os.path.join(self.out, EXPORTED)):
            raise UserError(f'OUT {self.out} already exists; give a new folder')


@dataclass(frozen=True, kw_only=True)
class Evaluate(Results):
    heading = 'drawing and judging'

    model: str = positional('checkpoint of benchmark.py, a folder or an object store for its newest, or a pipeline '
                            'folder of diffusers, such as export.py writes')
    data: str = positional('folder or object store with MDS shards of images and captions')
    out: str | None = flag(None, 'new folder for the pictures; the same command goes on there (needed)')
    inception: str | None = flag(None, 'weights of the Inception network for FID: weights-inception-2015-12-05-'
                                 '6726825d.pth of torch-fidelity (default: no FID)', metavar='FILE')
    clip: str | None = flag(None, f'folder of a CLIP model as transformers has them, such as {CLIP_MODEL} (default: no '
                            'CLIP score)', metavar='FOLDER')
    samples: int = flag(30_000, 'number of captions to draw at each guidance scale, the first of DATA',
                        converter=number(int, 2, 10 ** 9, 'a whole number above 1'))
    caption: str | None = flag(None, 'name of the captions to draw, such as long; where an image has none of that '
                               'name, its first is drawn (default: the first of each image)', metavar='NAME')
    guidance: tuple[float, ...] = flag(
        (7.5,), 'scales of classifier-free guidance; all captions are drawn at each; 1 is no guidance (default: 7.5)',
        converter=number(float, 1, 1000, 'a scale from 1 on', 'SCALE'))
    steps: int = flag(50, 'steps of the sampler (DDIM) for a picture, a divisor of its 1000 timesteps', converter=count)
    seed: int = flag(17, 'seed of the noise; that of a picture depends on the seed and its number alone',
                     converter=seed)
    image_size: int | None = flag(None, 'height and width of the pictures in pixels (default: those that the model was '
                                  'trained at)', converter=pixels)
    batch_size: int = flag(16, 'pictures that each device draws at once; a large GPU is faster with more',
                           converter=count)
    precision: Literal['amp_bf16', 'amp_fp16', 'fp32'] | None = flag(
        None, "precision of the UNet's arithmetic; all else is in float32 (default: amp_bf16 on a GPU that has it, "
        'amp_fp16 on another GPU, fp32 on a CPU)')

    check_only: Literal['networks', 'data'] | None = flag(
        None, 'check that the networks of --inception and --clip can be loaded, or that DATA has --samples captions, '
        'and end; MODEL need not be there yet (default: draw and score)')

    def check(self) -> None:
        if not self.out or '://' in self.out:
            raise UserError('give --out, a folder of this machine for the pictures')
        if TIMESTEPS % self.steps or self.steps == TIMESTEPS:
            raise UserError(f'--steps {self.steps} is no divisor of the {TIMESTEPS} timesteps, so that the sampler '
                            'would not begin at pure noise; use one below them, such as 50')


@dataclass(frozen=True, kw_only=True)
class Report:
    heading = 'report'

    records: tuple[str, ...] = positional('files of records: JSON lines, or CSV where the name ends in .csv')
    training_images: int | None = flag(None, 'images of the training whose days and dollars are stated, with repeats '
                                       f'(default: {TRAINING_IMAGES:,}, as Stable Diffusion 2; for the model tiny none '
                                       'are stated)', converter=count)
    dollars_per_gpu_hour: Prices = flag((), PRICES_HELP, converter=price, metavar='PRICE')
    extrapolate: tuple[int, ...] = flag((), 'numbers of GPUs whose speed is predicted from the measured ones (default: '
                                        'none)', converter=count, metavar='GPUS')
    compare: bool = flag(False, 'show a row for each training, with its speed over that of the first one of the same '
                         'model and image size')
    phase: tuple[tuple[int | None, str], ...] = flag(
        (), 'show a plan instead, of phases at these image sizes in pixels; each trains on IMAGES, or on as many as '
        'its record says (default: no plan)', converter=images_at_size, metavar='[IMAGES@]SIZE')
    encode: tuple[tuple[int, str], ...] = flag(
        (), 'images, at a size in pixels, that the plan encodes once to train on their latents (default: none)',
        converter=images_at_size, metavar='IMAGES@SIZE', needs='phase')
    hours_between_preemptions: float | None = flag(
        None, 'hours between two losses of one machine that may be taken away, on average, so that of several machines '
        'one is lost more often; a plan then counts what each loss costs, half a save interval and a restart '
        '(default: no losses)', converter=positive, metavar='HOURS',
        needs='phase')
    max_dollars: float | None = flag(
        None, 'most dollars that a plan may cost: only plans within it are shown, or which comes nearest (default: no '
        'limit)', converter=positive, metavar='DOLLARS', needs='phase')
    max_days: float | None = flag(
        None, 'most days that a plan may take: only plans within it are shown, or which comes nearest (default: no '
        'limit)', converter=positive, metavar='DAYS', needs='phase')
    figure: str | None = flag(None, 'file for a picture of the days over the number of GPUs, or of the GPU-hours of '
                              'each plan (default: no picture)', metavar='FILE')
    learned: str | None = flag(None, 'file for a picture of the loss on --eval_remote over the images seen, and over '
                               'the dollars of runs on GPUs (default: no picture)', metavar='FILE')
    quality: str | None = flag(None, 'file for a picture of the scores of evaluate.py: FID against CLIP score, and '
                               'both against the images of the training (default: no picture)', metavar='FILE')
    csv: str | None = flag(None, 'CSV file for the rows of all tables, unrounded (default: none)', metavar='FILE')
    html: str | None = flag(None, 'HTML file for the whole report with its figures: a page to send, which needs no '
                            'network and whose tables can be sorted and filtered; needs itables (default: none)',
                            metavar='FILE')

    def check(self) -> None:
        if self.compare and self.extrapolate:
            raise UserError('--extrapolate predicts, and --compare shows what was measured; give one of them')
        for images, size in self.encode:
            if images is None:
                raise UserError(f'--encode {size} does not say how many images; give IMAGES@{size}')
        for name in ('compare', 'extrapolate', 'training_images', 'quality'):
            if self.phase and getattr(self, name):
                raise UserError(f'--phase shows plans alone, and --{name} is not of a plan; leave one of them out')
        if self.csv and os.path.realpath(self.csv) in map(os.path.realpath, self.records):
            raise UserError(f'--csv {self.csv} would overwrite the records; give another file')
        suffixes_of = {'csv': ('.csv',), 'html': ('.html',), 'figure': PICTURES, 'learned': PICTURES,
                       'quality': PICTURES}
        for name, suffixes in suffixes_of.items():
            path = getattr(self, name)
            if path and not path.lower().endswith(suffixes):
                raise UserError(f'--{name} {path} does not end in {" or ".join(suffixes)}; name such a file')
