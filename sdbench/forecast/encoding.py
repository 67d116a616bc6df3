"""--dry_run of encode.py: how fast, for how much and into how many bytes GPUs would encode a dataset, without a GPU."""
import dataclasses
import math
import sys
import textwrap
from dataclasses import dataclass

import pandas as pd
import torch
from diffusers import AutoencoderKL
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdbench.costs import DATASET_IMAGES, gpu_hours, price_of, prices_in_words, storage_in_words
from sdbench.datasets.encoder import build_encoding_vae, encode_images
from sdbench.errors import plural
from sdbench.flags.commands import Encode
from sdbench.forecast.dry_run import (
    WIDTH,
    aligned,
    cards_to_forecast,
    forecast_figures,
    nothing_fits,
    show_forecasts,
    three_digits,
    time_in_words,
)
from sdbench.forecast.fake_step import memory_and_work, with_fake_tensors
from sdbench.forecast.memory import parameter_bytes
from sdbench.forecast.speed import BatchSplit, StepWork, can_forecast, images_per_sec, seconds_by_kind
from sdbench.forecast.step_counter import StepCounter, StepMemory
from sdbench.gpus import Card
from sdbench.inputs.shards import read_image_index
from sdbench.measuring.power import GIB
from sdbench.models.loading import find_model
from sdbench.paths import number_of_samples
from sdbench.records.record import make_record
from sdbench.training.microbatch import sizes_to_try

# GiB that a GPU takes for one that is counted: the most in diffusers' own table of an RTX 4090, which encoded one image
# at once (docs/planning.md)
TAKEN_FOR_COUNTED = 2.7
# Of a sample in its shard beside moments and caption: where it begins, and how long the caption is
MDS_BYTES = 8
NOT_IN_IT = """\
A forecast, from the arithmetic, bytes and kernels of the VAE's encoder. Not in it: reading and decoding the images,
which the processes of --num_workers do meanwhile, and writing the latents."""
EVIDENCE = f"""\
Images/s: one published encoding tests them, of 790 million images on A100s. It took 1.1 times the hours.
GiB taken: {TAKEN_FOR_COUNTED:g} times what is counted, the most that a published encoding took."""


@dataclass(frozen=True)
class EncodingEstimate:
    """Memory and work of a device that encodes with one set of flags.

    Attributes:
        settings: of the encoding.
        vae_bytes: of the weights.
        memory: of a batch.
        work: of a batch.
        latent_bytes: of an image in a shard, without its caption.
    """
    settings: Encode
    vae_bytes: int
    memory: StepMemory
    work: StepWork
    latent_bytes: int

    def taken(self, batch_size: int) -> float:
        """Return the GiB that are taken of a GPU, with what is not counted."""
        return self.counted(batch_size) * TAKEN_FOR_COUNTED / GIB

    def counted(self, batch_size: int) -> int:
        """Return the bytes of the weights and of a batch at its peak."""
        return self.vae_bytes + sum(self.memory.peak(batch_size, accumulated=False).values())

    def images_per_sec(self, card: Card) -> float:
        """Return the speed of all devices together, which share no work."""
        return self.settings.dry_run * images_per_sec(card, self.work, self.split)

    @property
    def split(self) -> BatchSplit:
        """Return the batch of a device, which shares nothing with the others."""
        return BatchSplit(self.settings.batch_size, self.settings.batch_size)


def forecast_encoding(settings: Encode) -> list[dict]:
    """Print what encoding a dataset would take and cost, and append a record for each GPU where --results is given.

    Returns the records of the forecasts, the cheapest first, one for each GPU of --gpu that holds a batch and can be
    forecast. Raises ValueError if the model or the remote is not known, or no GPU holds a batch.
    """
    # Memory and work of a batch.
    cards = cards_to_forecast(settings.gpu, settings.encoder_precision)
    settings = dataclasses.replace(settings, images=images_of_dataset(settings))
    if settings.compile:
        print('warning: --compile is not in the forecast of an encoding; this is that of an eager one', file=sys.stderr)
        settings = dataclasses.replace(settings, compile=False)
    print("counting memory and work of the VAE's encoder", file=sys.stderr, flush=True)
    estimate = estimate_encoding(settings)

    # The answer, and its records.
    fitting = [card for card in cards if estimate.taken(settings.batch_size) <= card.gib]
    if not fitting:
        raise no_batch_fits(estimate, cards)
    records = [encoding_forecast(estimate, card) for card in fitting]
    records.sort(key=lambda record: dollars_of(record, settings))
    text = encoding_answer(estimate, fitting, records)
    return show_forecasts(text, records, [card for card in cards if card not in fitting], settings.results)


def images_of_dataset(settings: Encode) -> int:
    """Return how many images would be encoded: those of --images, of --remote, or of the dataset that --help names."""
    if settings.images is not None:
        return settings.images
    if settings.remote:
        return number_of_samples(read_image_index(settings.remote))
    return DATASET_IMAGES


def estimate_encoding(settings: Encode) -> EncodingEstimate:
    """Count memory and work of a device."""
    files = find_model(settings.model_name)  # sizes need no weights
    with torch.device('meta'):
        vae = build_encoding_vae(settings, files, torch.device('meta'))
    vae_bytes = parameter_bytes(vae)
    memory, work = trace_encoding(vae, settings.image_size)
    latent_bytes = 2 * 8 * files.latent_size(settings.image_size) ** 2 + MDS_BYTES  # moments in float16
    return EncodingEstimate(settings, vae_bytes, memory, work, latent_bytes)


def trace_encoding(meta_model: AutoencoderKL, image_size: int) -> tuple[StepMemory, StepWork]:
    """Return memory and work of encoding a batch, as fake_step.py finds those of a step.

    Args:
        meta_model: the VAE on the meta device; its tensors become fake ones.
        image_size: height and width of the images in pixels. Resizing them on the GPU is not counted.
    """
    mode = FakeTensorMode()
    vae = with_fake_tensors(meta_model, mode).eval()
    counter = StepCounter(list(vae.parameters()))
    with mode, counter:
        encode_batch(vae, image_size, counter.images)
    return memory_and_work(vae, counter, {})


@torch.no_grad()
def encode_batch(vae: AutoencoderKL, image_size: int, images: int) -> None:
    """Encode blank images of this size, with attention by a kernel that keeps no matrix of all queries and keys."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        encode_images(vae, torch.zeros(images, 3, image_size, image_size, dtype=torch.uint8), image_size)


def no_batch_fits(estimate: EncodingEstimate, cards: list[Card]) -> ValueError:
    """Return the error of a batch that no card holds."""
    batch_size = estimate.settings.batch_size
    largest = max(card.gib for card in cards)
    fitting = [size for size in sizes_to_try(batch_size) if estimate.taken(size) <= largest]
    smaller = [f'--batch_size {size}' for size in fitting[-1:]]
    return nothing_fits(f'--batch_size {batch_size}', estimate.taken(batch_size), cards, smaller)


def encoding_forecast(estimate: EncodingEstimate, card: Card) -> dict:
    """Return the record of a forecast: the keys of an encoding's record, with `forecast_figures`.

    It has no range. Captions are not in `bytes_per_image`.
    """
    settings = estimate.settings
    speed = None
    if can_forecast(card, settings.encoder_precision):
        speed = estimate.images_per_sec(card)
    figures = forecast_figures(card, settings.dry_run, estimate.taken(settings.batch_size), speed)
    return make_record('encode', settings, {
        'dataset': 'streaming', 'stored_samples': settings.images, 'bytes_per_image': estimate.latent_bytes, **figures})


def hours_of(record: dict) -> float:
    """Return the hours that all images of a forecast take; infinite where no speed is known."""
    if record['images_per_sec'] is None:
        return math.inf
    return gpu_hours(record['images_per_sec'], 1, record['stored_samples'])


def dollars_of(record: dict, settings: Encode) -> float:
    """Return the price of the GPUs for these hours."""
    return hours_of(record) * record['num_devices'] * price_of(record['device'], settings.dollars_per_gpu_hour)


def encoding_answer(estimate: EncodingEstimate, cards: list[Card], records: list[dict]) -> str:
    """Return the text of a forecast.

    Args:
        estimate: of the encoding.
        cards: that hold a batch.
        records: of their forecasts, the cheapest first.
    """
    settings = estimate.settings
    images = plural(settings.images, 'image')
    title = (f'{settings.model_name}: encoding {images} at {settings.image_size} pixels in '
             f'{settings.encoder_precision}; {settings.batch_size} at once on each of '
             f'{plural(settings.dry_run, "GPU")}')

    # a row for each card
    rows = []
    for record in records:
        hours, dollars = hours_of(record), dollars_of(record, settings)
        is_known = record['images_per_sec'] is not None
        rows.append({plural(settings.dry_run, 'GPU'): record['device'].removeprefix('NVIDIA '),
                     'GiB taken': f'{record["peak_memory_gib"]:.1f}',
                     'images/s': three_digits(record['images_per_sec']) if is_known else 'not known',
                     'hours': three_digits(hours) if is_known else 'not known',
                     'dollars': three_digits(dollars) if is_known else 'not known'})
    notes = [f'Hours and dollars: {images}, {prices_in_words(settings.dollars_per_gpu_hour)} (--dollars_per_gpu_hour).',
             f'Latents to store: {estimate.latent_bytes:,} bytes an image beside its caption, '
             f'{storage_in_words(estimate.latent_bytes * settings.images)} in all.', EVIDENCE]

    # where the time of the first card goes
    [first] = [card for card in cards if card.name == records[0]['device']]
    blocks = [f'{textwrap.fill(title, WIDTH)}\n{NOT_IN_IT}', '\n'.join([aligned(pd.DataFrame(rows)), *notes])]
    if records[0]['images_per_sec'] is not None:
        seconds = seconds_by_kind(first, estimate.work, estimate.split)
        blocks.append(textwrap.fill(time_in_words(seconds), WIDTH))
    return '\n\n'.join(blocks)
