"""Define the flags of every command except benchmark.py. Nothing here needs torch."""
import argparse
import os
import re
from dataclasses import MISSING

from sdbench.costs import TRAINING_IMAGES, Prices
from sdbench.errors import UserError
from sdbench.files import EXPORTED, is_url
from sdbench.flags.parser import (
    count,
    file_ending,
    flag,
    flags,
    fraction,
    number_between,
    picture,
    positional,
    seed,
    whole_number,
)
from sdbench.flags.train import MOST_WORKERS, Encoders, Model, Results, pixels, price
from sdbench.models.folders import CLIP_MODEL
from sdbench.process import launcher_variable

REQUIRED = MISSING  # as the default of a flag
TIMESTEPS = 1000  # of Stable Diffusion's noise schedule
BYTES = {'kb': 1 << 10, 'mb': 1 << 20, 'gb': 1 << 30}
LARGEST_LIMIT = (1 << 32) - 1  # an MDS shard counts its bytes in 32 bits


def shard_size(text: str) -> int:
    """Convert the size of a shard, such as 64mb, to bytes."""
    match = re.fullmatch('([0-9]{1,9})(kb|mb|gb)', text.lower())
    size = int(match[1]) * BYTES[match[2]] if match else 0
    if 0 < size <= LARGEST_LIMIT:
        return size
    raise argparse.ArgumentTypeError(f'{text} is not a size below 4gb, such as 64mb')


@flags('cluster')
class Cluster:
    ray: str | None = flag(os.environ.get('RAY_ADDRESS'), 'address of a Ray cluster on which to run, such as auto '
                           '(default: the environment variable RAY_ADDRESS, or else this machine)', metavar='ADDRESS')

    def check(self) -> None:
        if launcher_variable('LOCAL_RANK') is not None:
            raise UserError('this command starts its own processes; start it with python instead of a launcher')


@flags('conversion')
class Convert(Cluster):
    source: tuple[str, ...] = positional('files, folders or globs: tars, Parquet files, or folders that contain these '
                                         'or images; in an object store (s3://bucket/tars/) only tars and Parquet '
                                         'files', nargs='+')
    out: str = positional('new folder or object store (s3://, gs://, azure://) for the MDS shards')
    held_out: float | None = flag(None, 'fraction of the samples to hold out, such as 0.01; they go to OUT-held-out, '
                                  'for --eval_remote of benchmark.py', type=fraction)
    seed: int = flag(17, 'seed for --held_out; whether an image is held out depends only on its bytes and this seed',
                     type=seed)
    captions: str | None = flag(None, 'table of captions as CSV, JSON lines (.jsonl) or Parquet, with image paths '
                                'relative to its folder, or the JSON of COCO; read in addition to captions.csv, '
                                'metadata.csv, metadata.jsonl and metadata.parquet in the folders of SOURCE (default: '
                                'only those)', metavar='FILE')
    image_column: str | None = flag(None, 'column with the images in Parquet files (default: image), or with the image '
                                    'paths in tables of captions (default: file_name or filename)', metavar='NAME')
    caption_column: tuple[str, ...] = flag((), 'caption columns in Parquet files and tables, such as short long, or '
                                           'suffixes of caption files, such as .txt .caption (default for columns: '
                                           'text or caption; for caption files: the first one of an image)', nargs='+',
                                           metavar='NAME')
    split: str | None = flag(None, 'split of SOURCE to convert, recognized by its name in files and folders, such as '
                             'train-0.parquet or val/; all converts all splits as one dataset (default: SOURCE must '
                             'have only one)', choices=('train', 'validation', 'test', 'all'))
    sample_per_caption: bool = flag(False, 'write one sample per caption (default: off, which writes one sample per '
                                    'image with all its captions; training then picks one at random each time)')
    clean_captions: bool = flag(False, 'fix mojibake and unescape HTML such as &amp; in captions, as open_clip does')
    num_workers: int | None = flag(None, 'conversion processes on this machine (default: one per CPU core)', type=count)
    size_limit: int = flag(64 << 20, 'maximum size of a shard (default: 64mb)', type=shard_size, metavar='SIZE')


@flags('latents')
class Encode(Model, Encoders, Results, Cluster):
    remote: str = flag(REQUIRED, 'folder or object store with MDS shards of images and captions from convert.py')
    out: str = flag(REQUIRED, 'new folder or object store for the MDS shards of latents')
    num_workers: int | None = flag(None, "processes per GPU that decode images (default: the machine's CPU cores "
                                   f'divided by its GPUs, at most {MOST_WORKERS})', type=whole_number)
    encoder_precision: str | None = flag(None, 'precision of the VAE (default: bf16 on GPUs that support it, fp16 on '
                                         'other GPUs, fp32 on CPUs)', choices=('bf16', 'fp16', 'fp32'))
    batch_size: int = flag(32, 'images per forward pass on each device', type=count)
    cpu: bool = flag(False, 'with --ray, encode on CPUs (default: off, which encodes on GPUs and waits until the '
                     'cluster has some)', needs='ray')


@flags('export')
class Export:
    checkpoint: str = positional('checkpoint written by benchmark.py, or a folder or object store with checkpoints '
                                 '(the newest is used)')
    out: str = positional('new folder for the pipeline, or with --single_file a new file; an earlier export of another '
                          'checkpoint in that folder is first renamed to OUT-1')
    single_file: bool = flag(False, 'write one .safetensors file with the original tensor names of Stable Diffusion '
                             '1.5 or 2, for AUTOMATIC1111 and ComfyUI (default: off, which writes a diffusers folder)')
    raw_weights: bool = flag(False, 'export the raw (non-EMA) weights of the UNet (default: off, which exports EMA '
                             'weights if there are any)')
    model_name: str | None = flag(None, 'model whose configuration files are used: tiny, a diffusers folder or a '
                                  'Hugging Face Hub ID (default: the --model_name of the training)')
    tokenizer: str | None = flag(None, 'folder or Hugging Face Hub ID of the tokenizer, if it has moved since the '
                                 'training (default: the tokenizer of the training)')

    def check(self) -> None:
        if self.single_file != self.out.endswith('.safetensors'):
            raise UserError(f'OUT {self.out}: with --single_file, and only then, OUT is a new file whose name ends in '
                            '.safetensors')
        is_export = os.path.isfile(os.path.join(self.out, EXPORTED))
        if os.path.lexists(self.out) and not is_export:
            raise UserError(f'OUT {self.out} already exists; give a new folder or file')


@flags('image generation and scores')
class Evaluate(Results):
    model: str = positional('checkpoint written by benchmark.py, a folder or object store with checkpoints (the '
                            'newest is used), or a diffusers pipeline folder such as export.py writes')
    data: str = positional('folder or object store with MDS shards of images and captions')
    out: str = flag(REQUIRED, 'new folder for the generated images; the same command, started again, continues there')
    inception: str | None = flag(None, 'Inception weights for FID: weights-inception-2015-12-05-6726825d.pth from '
                                 'torch-fidelity (default: no FID)', metavar='FILE')
    clip: str | None = flag(None, f'folder with a CLIP model in the format of transformers, such as {CLIP_MODEL} '
                            '(default: no CLIP score)', metavar='FOLDER')
    samples: int = flag(30_000, 'number of captions, taken from the start of DATA; one image per caption is generated '
                        'at each guidance scale', type=number_between(int, 2, 10 ** 9, 'a whole number above 1'))
    caption: str | None = flag(None, 'name of the captions to use, such as long; an image without a caption of that '
                               'name uses its first (default: the first caption of each image)', metavar='NAME')
    guidance: tuple[float, ...] = flag((7.5,), 'scales of classifier-free guidance, each applied to all captions; 1 is '
                                       'no guidance (default: 7.5)',
                                       type=number_between(float, 1, 1000, 'a scale of at least 1', 'SCALE'), nargs='+')
    steps: int = flag(50, 'sampling steps per image (DDIM); must divide 1000', type=count)
    seed: int = flag(17, 'seed for the noise; the noise of an image depends only on this seed and the number of its '
                     'caption', type=seed)
    image_size: int | None = flag(None, 'height and width of the generated images in pixels (default: the image size '
                                  'of the training)', type=pixels)
    batch_size: int = flag(16, 'images generated per batch on each device; larger is faster on large GPUs', type=count)
    precision: str | None = flag(None, 'precision of the UNet; everything else is float32 (default: amp_bf16 on GPUs '
                                 'that support it, amp_fp16 on other GPUs, fp32 on CPUs)',
                                 choices=('amp_bf16', 'amp_fp16', 'fp32'))

    check_only: str | None = flag(None, 'only check that the networks of --inception and --clip load, or that DATA has '
                                  '--samples captions; MODEL need not exist yet (default: generate and score)',
                                  choices=('networks', 'data'))

    def check(self) -> None:
        if is_url(self.out):
            raise UserError(f'--out {self.out} is not a folder on this machine')
        if TIMESTEPS % self.steps or self.steps == TIMESTEPS:
            raise UserError(f'--steps {self.steps} is not a divisor of {TIMESTEPS} below {TIMESTEPS}, so the sampler '
                            'would not start from pure noise; use a divisor such as 50')


@flags('files')
class Files:
    csv: str | None = flag(None, 'CSV file for all rows without rounding', type=file_ending('.csv'))
    html: str | None = flag(None, 'HTML page with the whole output, to send to others; it works without a network',
                            type=file_ending('.html'))

    def check(self) -> None:
        if self.csv and os.path.realpath(self.csv) in map(os.path.realpath, self.records):
            raise UserError(f'--csv {self.csv} would overwrite a file with records; give another file')


@flags('report')
class Report(Files):
    records: tuple[str, ...] = positional('files written with --results (JSON lines), or CSV files with the same keys',
                                          nargs='+')
    training_images: int | None = flag(None, 'images of a whole training, counted with repeats, for which days and '
                                       f'dollars are shown (default: {TRAINING_IMAGES:,}, as for Stable Diffusion 2; '
                                       'none for the model tiny)', type=count)
    dollars_per_gpu_hour: Prices = flag((), 'price per GPU-hour in dollars, for every GPU or by GPU name, such as '
                                        'H100=2.5 H200=3.2 (default: the prices in each record, or else 2.0)',
                                        type=price, nargs='+', metavar='PRICE')
    extrapolate: tuple[int, ...] = flag((), 'GPU counts whose speed is predicted from the measured GPU counts',
                                        type=count, nargs='+', metavar='GPUS')
    compare: bool = flag(False, 'show one row per training, with its speed relative to the first training of the same '
                         'model and image size')
    figure: str | None = flag(None, 'file for a plot of days against GPU count (default: no plot)', type=picture)
    learned: str | None = flag(None, 'file for a plot of the loss on --eval_remote against images seen, and against '
                               'dollars for runs on GPUs (default: no plot)', type=picture)
    quality: str | None = flag(None, 'file for a plot of the scores from evaluate.py: FID against CLIP score, and both '
                               'against images seen (default: no plot)', type=picture)
