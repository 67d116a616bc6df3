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
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdbench.costs import DATASET_IMAGES, gpu_hours, price_of, prices_in_words, storage_in_words
from sdbench.datasets.encoder import build_encoding_vae, encode_images
from sdbench.errors import one_line, plural
from sdbench.flags.commands import ENCODING_FLAGS, Encode
from sdbench.forecast.answer import FORECAST, GPUS_A_NODE, WIDTH, aligned, three_digits, time_in_words
from sdbench.forecast.compiled_step import (
    TRACED_IMAGES,
    CompiledStepCounter,
    Compiler,
    NotCounted,
    norms_as_on_a_gpu,
)
from sdbench.forecast.dry_run import cards_to_forecast, keep_forecasts
from sdbench.forecast.estimate import constants_of
from sdbench.forecast.fake_step import counted, with_fake_tensors
from sdbench.forecast.memory import parameter_bytes
from sdbench.forecast.speed import Constants, Layout, StepWork, can_forecast, images_per_sec, seconds_by_kind
from sdbench.forecast.step_counter import StepCounter, StepMemory
from sdbench.gpus import Card
from sdbench.inputs.loader import default_workers
from sdbench.inputs.shards import read_image_index
from sdbench.measuring.power import GIB
from sdbench.measuring.record import run_metadata
from sdbench.models.loading import find_model
from sdbench.models.switches import compile_in_place
from sdbench.paths import number_of_samples
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
        constants: of the forecast.
        latent_bytes: of an image in a shard, without its caption.
    """
    settings: Encode
    vae_bytes: int
    memory: StepMemory
    work: StepWork
    constants: Constants
    latent_bytes: int

    def taken(self, batch_size: int) -> float:
        """Return the GiB that are taken of a GPU, with what is not counted."""
        return self.counted(batch_size) * TAKEN_FOR_COUNTED / GIB

    def counted(self, batch_size: int) -> int:
        """Return the bytes of the weights and of a batch at its peak."""
        return self.vae_bytes + sum(self.memory.peak(batch_size, accumulated=False).values())

    def images_per_sec(self, card: Card) -> float:
        """Return the speed of all devices together, which share no work."""
        return self.settings.dry_run * images_per_sec(card, self.work, self.layout, self.constants)

    @property
    def layout(self) -> Layout:
        """Return the batch of a device, which shares nothing with the others."""
        return Layout(self.settings.batch_size, self.settings.batch_size)


def dry_run(settings: Encode) -> list[dict]:
    """Print what encoding a dataset would take and cost, and append a record for each GPU where --results is given.

    Returns the records of the forecasts, the cheapest first, one for each GPU of --gpu that holds a batch and can be
    forecast. Raises ValueError if the model or the remote is not known, or no GPU holds a batch.
    """
    cards = cards_to_forecast(settings.gpu, settings.encoder_precision)
    settings = dataclasses.replace(settings, images=images_of_dataset(settings))
    print("counting memory and work of the VAE's encoder", file=sys.stderr, flush=True)
    try:
        estimate = estimate_encoding(settings)
    except NotCounted as error:
        print(f'warning: the compiled encoder could not be counted ({error}); this is the forecast of an eager one',
              file=sys.stderr, flush=True)
        estimate = estimate_encoding(dataclasses.replace(settings, compile=False))

    fitting = [card for card in cards if estimate.taken(settings.batch_size) <= card.gib]
    if not fitting:
        raise ValueError(why_nothing_fits(estimate, max(card.gib for card in cards)))
    records = [forecast_record(estimate, card) for card in fitting]
    records.sort(key=lambda record: dollars_of(record, settings))
    print(answer(estimate, fitting, records))
    left_out = [card.name for card in cards if card not in fitting]
    if left_out:
        print(f'\nNo room for {plural(settings.batch_size, "image")} at once on {", ".join(left_out)}.')
    return keep_forecasts(records, settings.results)


def images_of_dataset(settings: Encode) -> int:
    """Return how many images would be encoded: of --images, or of --remote, or of the dataset that is named in --help.
    """
    if settings.images is not None:
        return settings.images
    if settings.remote:
        return number_of_samples(read_image_index(settings.remote))
    return DATASET_IMAGES


def estimate_encoding(settings: Encode) -> EncodingEstimate:
    """Count memory and work of a device. Raises NotCounted if torch cannot say what a compiled encoder does."""
    files = find_model(settings.model_name)  # sizes need no weights
    with torch.device('meta'):
        vae = build_encoding_vae(settings, files, torch.device('meta'))
    vae_bytes = parameter_bytes(vae)
    if settings.compile:
        memory, work = trace_compiled_encoding(vae, settings)
    else:
        memory, work = trace_encoding(vae, settings.image_size)
    latent_bytes = 2 * 8 * files.latent_size(settings.image_size) ** 2 + MDS_BYTES  # moments in float16
    return EncodingEstimate(settings, vae_bytes, memory, work, constants_of(settings.compile), latent_bytes)


def trace_encoding(outline: AutoencoderKL, image_size: int) -> tuple[StepMemory, StepWork]:
    """Return memory and work of encoding a batch, as fake_step.py finds those of a step.

    Args:
        outline: the VAE on the meta device; its tensors become fake ones.
        image_size: height and width of the images in pixels. Resizing them on the GPU is not counted.
    """
    mode = FakeTensorMode()
    vae = with_fake_tensors(outline, mode).eval()
    counter = StepCounter(list(vae.parameters()))
    with mode, counter:
        encode_batch(vae, image_size, counter.images)
    return counted(vae, counter, {})


def trace_compiled_encoding(outline: AutoencoderKL, settings: Encode) -> tuple[StepMemory, StepWork]:
    """Return memory and work of encoding a batch with --compile, as compiled_step.py finds those of a step.

    Raises NotCounted with the reason.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    vae = with_fake_tensors(outline, mode).eval()
    compiler = Compiler(mode)
    torch._dynamo.reset()
    compile_in_place([vae.encoder], settings.compile, compiler)
    try:
        with norms_as_on_a_gpu(), mode:
            encode_batch(vae, settings.image_size, TRACED_IMAGES)  # compiles
            counter = compiler.counter = CompiledStepCounter(list(vae.parameters()), TRACED_IMAGES)
            with counter:
                encode_batch(vae, settings.image_size, TRACED_IMAGES)
    except Exception as error:  # of any kind: nothing of Inductor's inside is promised
        raise NotCounted(f'torch {torch.__version__}: {one_line(error, 200)}') from error
    return counted(vae, counter, {})


@torch.no_grad()
def encode_batch(vae: AutoencoderKL, image_size: int, images: int) -> None:
    """Encode blank images of this size, with attention by a kernel that keeps no matrix of all queries and keys."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        encode_images(vae, torch.zeros(images, 3, image_size, image_size, dtype=torch.uint8), image_size)


def why_nothing_fits(estimate: EncodingEstimate, gib: float) -> str:
    """Return the error of a batch that no GPU holds, of which the largest has so many GiB."""
    batch_size = estimate.settings.batch_size
    smaller = max((size for size in sizes_to_try(batch_size) if estimate.taken(size) <= gib), default=None)
    remedy = 'choose a GPU with more memory by --gpu'
    if smaller:
        remedy += f', or take --batch_size {smaller}'
    return (f'--batch_size {batch_size} takes {estimate.taken(batch_size):.1f} GiB, and the largest GPU asked for has '
            f'{gib:g}; {remedy}')


def forecast_record(estimate: EncodingEstimate, card: Card) -> dict:
    """Return the record of a forecast, with the keys that the record of an encoding has, and `status` forecast.

    Its speed is None where the GPU is not NVIDIA's, or the precision is float32. Captions are not in
    `bytes_per_image`.
    """
    settings = estimate.settings
    speed = None
    if can_forecast(card, settings.encoder_precision):
        speed = estimate.images_per_sec(card)
    return run_metadata('encode', dataclasses.asdict(settings), ENCODING_FLAGS) | {
        'num_workers_by_default': settings.num_workers == default_workers(settings),
        'dataset': 'streaming',
        'status': FORECAST,
        'device': card.name,
        'device_type': 'cuda',
        'num_devices': settings.dry_run,
        'num_nodes': math.ceil(settings.dry_run / GPUS_A_NODE),
        'stored_samples': settings.images,
        'bytes_per_image': estimate.latent_bytes,
        'images_per_sec': speed,
        'images_per_sec_per_device': speed and speed / settings.dry_run,
        'images_per_sec_least': None,
        'images_per_sec_most': None,
        'peak_memory_gib': estimate.taken(settings.batch_size),
    }


def hours_of(record: dict) -> float:
    """Return the hours that all images of a forecast take; infinite where no speed is known."""
    if record['images_per_sec'] is None:
        return math.inf
    return gpu_hours(record['images_per_sec'], 1, record['stored_samples'])


def dollars_of(record: dict, settings: Encode) -> float:
    """Return the price of the GPUs for these hours."""
    return hours_of(record) * record['num_devices'] * price_of(record['device'], settings.dollars_per_gpu_hour)


def answer(estimate: EncodingEstimate, cards: list[Card], records: list[dict]) -> str:
    """Return the text of a forecast.

    Args:
        estimate: of the encoding.
        cards: that hold a batch.
        records: of their forecasts, the cheapest first.
    """
    settings = estimate.settings
    compiled = ', compiled' if settings.compile else ''
    images = plural(settings.images, 'image')
    title = (f'{settings.model_name}: encoding {images} at {settings.image_size} pixels in '
             f'{settings.encoder_precision}{compiled}; {settings.batch_size} at once on each of '
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
        seconds = seconds_by_kind(first, estimate.work, estimate.layout, estimate.constants)
        blocks.append(textwrap.fill(time_in_words(seconds), WIDTH))
    return '\n\n'.join(blocks)
