"""Evaluate a model: generate images from thousands of captions, and score them by FID and CLIP score.

    python evaluate.py checkpoints photos-mds-held-out --out images --inception WEIGHTS.pth --clip CLIP
    composer evaluate.py my-model coco-mds --guidance 1.5 3 5 8 --out coco-images --inception WEIGHTS.pth --clip CLIP
    python evaluate.py checkpoints photos-mds-held-out --out trial --samples 8      # generates images without scores

MODEL is a checkpoint of benchmark.py, a folder or an object store with checkpoints (the newest is used), or a pipeline
folder of diffusers, for example from export.py. DATA is a dataset of images with captions, as convert.py writes it.
Start evaluate.py with python for one GPU, or with composer or torchrun for several. The same command generates the same
images, and continues where an interrupted one has stopped. Nothing is downloaded: you provide the file WEIGHTS.pth and
the folder CLIP, and an error says where to get them. Without them the images are not scored.
"""
from sdbench.flags.commands import Evaluate
from sdbench.flags.parser import answer_early, parse
from sdbench.process import begin, one_line_errors

PROGRAM = 'evaluate.py'

if __name__ == '__main__':
    answer_early(Evaluate, __doc__)

import contextlib
import dataclasses
import hashlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import diffusers.utils.logging
import torch
import transformers.utils.logging
from composer.utils import dist
from diffusers import StableDiffusionPipeline
from PIL import Image
from torchmetrics import Metric
from torchmetrics.image.fid import FrechetInceptionDistance
from torchvision.transforms.functional import pil_to_tensor

from data import StreamingLAIONDataset
from sdbench.complete import best_precision
from sdbench.datasets.output import OutputFolder
from sdbench.errors import BadSample, DataError, UserError, plural, redacted
from sdbench.files import atomic_write
from sdbench.inputs.batches import CAPTIONS, require_names
from sdbench.inputs.shards import index_hash, number_of_samples, read_image_index, was_trained_on
from sdbench.inputs.tokenizer import hash_of_ids
from sdbench.models.feature_extractors import NETWORK, PUBLISHED_SHA256, RESIZE, load_clip, load_fid
from sdbench.models.generation import SAMPLER, generate, load_pipeline
from sdbench.models.loading import AUTOCAST_DTYPES, hash_of_weights
from sdbench.process import progress_bar
from sdbench.records.record import append_record, make_record
from sdbench.records.status import COMPLETE, FEWEST_FOR_FID
from sdbench.records.summary import evaluation_summary
from sdbench.training.ranks import destroy_nccl_group, join_ranks, on_rank_0
from sdbench.training.resuming import data_of
from sdbench.training.weights import about_training, read_exported, read_trained_model, trained_pipeline

PIPELINE_INDEX = 'model_index.json'  # in a pipeline folder of diffusers
SEED_STRIDE = 1_000_000  # between the noise of --seed 1 and 2; more samples would share noise with the next seed
DIST_TIMEOUT = 6 * 60 * 60  # seconds that a rank waits for the slowest rank


def load_metrics(settings: Evaluate, device: torch.device) -> tuple[dict[str, Metric], dict]:
    """Load the requested metrics, keyed by the names of their scores; also return their keys for the record.

    Raises UserError if --inception or --clip names another kind of file.
    """
    # The record identifies each network by hash, because scores from different networks must not be compared.
    metrics = {}
    about = {'inception_sha256': None, 'clip_sha256': None, 'clip': None}
    if settings.inception:
        metrics['fid'] = load_fid(settings.inception).to(device)
        about['inception_sha256'] = hashlib.sha256(Path(settings.inception).read_bytes()).hexdigest()
        about['network'] = NETWORK
        about['fid_of_published_weights'] = about['inception_sha256'].startswith(PUBLISHED_SHA256)
    if settings.clip:
        metrics['clip_score'] = load_clip(settings.clip).to(device)
        about['clip_sha256'] = hash_of_weights(metrics['clip_score'].model)
        about['clip'] = os.path.basename(os.path.abspath(settings.clip))
    return metrics, about


def open_data(settings: Evaluate) -> dict:
    """Return the index.json of DATA. Raises UserError if DATA has too few samples or not the captions of --caption."""
    index = on_rank_0(partial(read_image_index, settings.data, 'DATA'))
    number = number_of_samples(index)
    if number < settings.samples:
        raise UserError(f'DATA {settings.data} holds {plural(number, "sample")}, fewer than --samples '
                        f'{settings.samples:,}; use --samples {number}, or a larger dataset')
    if settings.caption is not None:
        require_names([settings.caption], index, '--caption', f'DATA {settings.data}')
    return index


def check_only(settings: Evaluate) -> None:
    """Check the networks or the data, as --check_only says: a recipe calls this before it trains.

    Raises UserError if an evaluation would fail.
    """
    if settings.check_only == 'networks':
        load_metrics(settings, torch.device('cpu'))
        print(f'checked: {" ".join(filter(None, (settings.inception, settings.clip))) or "nothing is to be scored"}')
    else:
        print(f'checked: DATA {settings.data} holds {number_of_samples(open_data(settings)):,} samples')


def load_model(path: str) -> tuple[StableDiffusionPipeline, dict]:
    """Load the pipeline of MODEL, on the CPU in float32; also return the record's keys about the model.

    Raises UserError if there is no model, or it cannot generate images.
    """
    about = {'weights': None, 'trained_batches': None, 'images_seen': None, 'training': None}

    # MODEL is a pipeline folder if it has a diffusers index, and otherwise a checkpoint.
    if os.path.isfile(os.path.join(path, PIPELINE_INDEX)):
        pipeline = load_pipeline(path, f'MODEL {path}')
        about['model_name'] = redacted(path)
    else:
        trained = read_trained_model(path, 'MODEL')
        pipeline = trained_pipeline(trained, f'MODEL {path}')
        about |= about_training(trained) | {'model_name': trained.facts.get('model_name')}
    about['model_sha256'] = hash_of_weights(pipeline.unet, pipeline.vae, pipeline.text_encoder)

    # A pipeline from export.py says how it was trained. Ignore that if its weights have been changed since.
    made_of = read_exported(path)
    if made_of.get('model_sha256') == about['model_sha256']:
        about |= {key: made_of[key] for key in about.keys() & made_of.keys()}
    return pipeline, about


def with_progress(steps: Sequence, doing: str) -> Iterator:
    with progress_bar(len(steps), ' steps', doing=doing, hidden=dist.get_global_rank() > 0) as bar:
        for step in steps:
            yield step
            bar.update()


def read_references(settings: Evaluate, index: dict, image_size: int, fid: FrechetInceptionDistance | None
                    ) -> list[str]:
    """Return the captions of DATA, and update `fid` with its images, unless `fid` is None.

    Each rank reads an equal part, and gets the captions of all ranks.

    Raises DataError if an image does not decode, or a caption is empty.
    """
    rank, ranks = dist.get_global_rank(), dist.get_world_size()
    first = settings.samples * rank // ranks
    stop = settings.samples * (rank + 1) // ranks

    # Read one sample after the other, and update `fid` in batches.
    captions = []
    images = []  # the next batch for `fid`
    dataset = StreamingLAIONDataset(settings.data, image_size=image_size, index=index, batch_size=1)
    for number in with_progress(range(first, stop), 'reading DATA'):
        try:
            sample = dataset.sample(number)
        except BadSample as error:
            raise DataError(f'sample {number} of DATA {settings.data}: {error}; convert the dataset without this '
                            'sample') from None
        captions.append(sample[CAPTIONS].get(settings.caption, [sample['caption']])[0])
        if fid is None:
            continue
        images.append(sample['image'])  # uint8 (3, H, H), the centre square
        if len(images) == settings.batch_size or number == stop - 1:
            fid.update(torch.stack(images).to(fid.device), real=True)
            images.clear()

    # Concatenate the captions of all ranks, in the order of the samples.
    return list(itertools.chain.from_iterable(dist.all_gather_object(captions)))


def image_path(settings: Evaluate, guidance: float, number: int) -> Path:
    return Path(settings.out, f'guidance-{guidance}', f'{number:06}.png')


def samples_of_rank(settings: Evaluate) -> range:
    return range(dist.get_global_rank(), settings.samples, dist.get_world_size())


def generate_missing(settings: Evaluate, pipeline: StableDiffusionPipeline, captions: list[str], image_size: int
                     ) -> dict[str, float | None]:
    """Generate the images that do not exist yet. Return their number and the speed, including the first batches."""
    # List the batches that this rank has still to generate: a guidance scale, and numbers of samples.
    batches = []
    for guidance in settings.guidance:
        numbers = [number for number in samples_of_rank(settings)
                   if not image_path(settings, guidance, number).exists()]
        for start in range(0, len(numbers), settings.batch_size):
            batches.append((guidance, numbers[start:start + settings.batch_size]))

    # Generate each image from noise that depends on its number only. It is then the same for every batch size.
    start = time.perf_counter()
    for guidance, numbers in with_progress(batches, 'generating'):
        seeds = [settings.seed * SEED_STRIDE + number for number in numbers]
        images = generate(pipeline, seeds, image_size, settings.steps, guidance,
                          prompt=[captions[number] for number in numbers])
        for number, image in zip(numbers, images, strict=True):
            save_image(image, image_path(settings, guidance, number))

    # The speed is the images of all ranks divided by the seconds of the slowest rank.
    number_here = sum(len(numbers) for _, numbers in batches)
    generated, seconds = zip(*dist.all_gather_object((number_here, time.perf_counter() - start)), strict=True)
    rate = None
    if sum(generated) > 0:
        rate = sum(generated) / max(seconds)
    return {'images_generated': sum(generated), 'images_per_sec': rate}


def save_image(image: Image.Image, path: Path) -> None:
    """Write a PNG atomically. An interrupted command leaves no part of it, which would count as done."""
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        image.save(file, 'PNG', compress_level=1)


def scores_at(settings: Evaluate, guidance: float, captions: list[str], metrics: dict[str, Metric]) -> dict:
    """Return the scores of all images at a guidance scale. A score that was not requested is None.

    Raises UserError if a score is not finite.
    """
    scores = {'guidance': guidance, 'fid': None, 'clip_score': None}
    if not metrics:
        return scores

    # Update the metrics with the images of this rank, batch by batch.
    numbers = samples_of_rank(settings)
    starts = range(0, len(numbers), settings.batch_size)
    for start in with_progress(starts, f'scoring at guidance {guidance:g}'):
        batch = numbers[start:start + settings.batch_size]
        tensors = [pil_to_tensor(Image.open(image_path(settings, guidance, number))) for number in batch]
        for name, metric in metrics.items():
            images = torch.stack(tensors).to(metric.device)  # uint8 (B, 3, H, W)
            if name == 'fid':
                metric.update(images, real=False)
            else:
                metric.update(list(images), [captions[number] for number in batch])

    # Compute the scores over the images of all ranks.
    for name, metric in metrics.items():
        score = metric.compute().item()
        if not math.isfinite(score):
            raise UserError(f'the {name} at guidance {guidance:g} is {score}, because the weights of its network are '
                            'damaged; download them again')
        scores[name] = max(0.0, score)  # rounding can make the FID of equal sets slightly negative
        metric.reset()
    return scores


def evaluate(settings: Evaluate) -> dict:
    """Generate the missing images, score all images, append the record to --results, and return it."""
    # Start the ranks. Each of them needs at least one sample, and all compute in the precision of rank 0.
    if settings.samples < dist.get_world_size():
        raise UserError(f'--samples {settings.samples} is fewer than the {dist.get_world_size()} ranks, but each '
                        'rank needs one; give more samples, or use fewer ranks')
    join_ranks(DIST_TIMEOUT)
    on_gpu = torch.cuda.is_available()
    device = torch.device('cuda', dist.get_local_rank()) if on_gpu else torch.device('cpu')
    precision = settings.precision or on_rank_0(partial(best_precision, on_gpu))
    settings = dataclasses.replace(settings, precision=precision)

    # Load everything that can be missing or wrong before the work begins.
    metrics, about_metrics = load_metrics(settings, device)
    pipeline, about_model = load_model(settings.model)
    image_size = settings.image_size or pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    index = open_data(settings)

    # Generate and score, while no other run works in --out. Images from other settings there are refused.
    def encode(captions: list[str]) -> list[list[int]]:
        return pipeline.tokenizer(captions, padding='max_length', truncation=True).input_ids  # as in diffusers

    config = pipeline.scheduler.config.items()
    scheduler = {key: value for key, value in config if not key.startswith('_')}  # without the version of diffusers
    made_of = {'program': PROGRAM, 'model_sha256': about_model['model_sha256'], 'data_sha256': index_hash(index),
               'image_size': image_size, 'steps': settings.steps, 'seed': settings.seed,
               'precision': settings.precision, 'caption': settings.caption, 'scheduler': scheduler,
               'tokenizer_sha256': hash_of_ids(pipeline.tokenizer.get_vocab(), encode)}
    with contextlib.ExitStack() as stack:
        begun = OutputFolder(settings.out, '--out').begun(made_of)
        on_rank_0(lambda: stack.enter_context(begun))
        captions = read_references(settings, index, image_size, metrics.get('fid'))

        # Only the UNet computes in --precision; everything else stays in float32.
        pipeline.to(device)
        dtype = AUTOCAST_DTYPES.get(settings.precision)
        autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
        pipeline.unet.forward = autocast(pipeline.unet.forward)

        generated = generate_missing(settings, pipeline, captions, image_size)
        scores = [scores_at(settings, guidance, captions, metrics) for guidance in settings.guidance]

    # Write down everything that a comparison with other scores depends on.
    found = {'status': COMPLETE, 'image_size': image_size, 'sampler': SAMPLER, 'scores': scores, **about_model,
             **about_metrics, **generated,
             'trained_on_data': was_trained_on(data_of(about_model['training'] or {}), index)}
    if settings.inception:
        found['resize'] = f'centre square, to {image_size} pixels bilinear with antialias, {RESIZE}'
        found['fid_is_biased'] = settings.samples < FEWEST_FOR_FID
    record = make_record('evaluate', settings, found)
    return append_record(record, evaluation_summary(record), settings.results)


def main(argv: list[str] | None = None) -> dict | None:
    """Evaluate, and return the record, or None with --check_only."""
    begin()
    settings = parse(Evaluate, __doc__, argv, PROGRAM)
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()  # they would warn about every truncated caption
        library.utils.logging.disable_progress_bar()
    stays = f'the generated images stay in --out {settings.out}, and the same command continues with the missing ones'
    with one_line_errors(PROGRAM, '' if settings.check_only else stays):
        if settings.check_only:
            return check_only(settings)
        return evaluate(settings)


if __name__ == '__main__':
    main()
    destroy_nccl_group()
