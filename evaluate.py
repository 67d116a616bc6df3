"""What a training is worth: draw thousands of captions, and score the pictures by FID and CLIP score.

    python evaluate.py checkpoints photos-mds-held-out --out pictures --inception WEIGHTS.pth --clip CLIP
    composer evaluate.py my-model coco-mds --guidance 1.5 3 5 8 --out pictures-too --inception WEIGHTS.pth --clip CLIP
    python evaluate.py checkpoints photos-mds-held-out --out trial --samples 8      # draws, and scores nothing

MODEL is a checkpoint of benchmark.py, the newest of a folder or an object store, or a pipeline folder of diffusers, as
export.py writes them; DATA is shards of images with captions, as convert.py writes them. Launched as benchmark.py is,
it draws on one GPU (python) or on several (composer, torchrun). The same command draws the same pictures; one that was
stopped, when started again, draws only what is missing. Nothing is downloaded: WEIGHTS.pth and CLIP are yours, and an
error says where to get them. Without them nothing is scored.
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
from collections.abc import Iterable
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
from sdbench.datasets.output import Output
from sdbench.errors import BadSample, DataError, UserError, plural, redacted
from sdbench.files import atomic_write
from sdbench.inputs.captions import CAPTIONS, require_names
from sdbench.inputs.images import resize
from sdbench.inputs.shards import index_hash, number_of_samples, read_image_index
from sdbench.inputs.tokenizer import hash_of_ids
from sdbench.models.feature_extractors import NETWORK, PUBLISHED_SHA256, RESIZE, load_clip, load_inception
from sdbench.models.generation import SAMPLER, decode, load_pipeline, seeded
from sdbench.models.loading import AUTOCAST_DTYPES, hash_of_weights
from sdbench.process import progress_bar
from sdbench.records.record import append_record, make_record
from sdbench.records.status import COMPLETE, FEWEST_FOR_FID
from sdbench.records.summary import evaluation_summary
from sdbench.training.compatibility import was_trained_on
from sdbench.training.ranks import destroy_nccl_group, join_ranks, on_rank_0
from sdbench.training.weights import about_training, read_exported, read_trained_model, trained_pipeline

PIPELINE_INDEX = 'model_index.json'  # of a pipeline folder of diffusers
SEEDS_APART = 1_000_000  # so many samples share no noise with those of another --seed
SECONDS_FOR_THE_SLOWEST = 6 * 60 * 60  # a process waits so long for another that draws


def load_metrics(settings: Evaluate, device: torch.device) -> tuple[dict[str, Metric], dict]:
    """Load the metrics that are asked for, by the names of their scores; also return what the record says of them.

    Raises UserError if --inception or --clip is something else.
    """
    # what a record says of each network, so that scores by different ones are never compared
    metrics = {}
    about = {'inception_sha256': None, 'clip_sha256': None, 'clip': None}
    if settings.inception:
        inception = load_inception(settings.inception)
        metrics['fid'] = FrechetInceptionDistance(inception, reset_real_features=False).to(device)
        about['inception_sha256'] = hashlib.sha256(Path(settings.inception).read_bytes()).hexdigest()
        about['network'] = NETWORK
        about['fid_of_published_weights'] = about['inception_sha256'].startswith(PUBLISHED_SHA256)
    if settings.clip:
        metrics['clip_score'] = load_clip(settings.clip).to(device)
        about['clip_sha256'] = hash_of_weights(metrics['clip_score'].model)
        about['clip'] = os.path.basename(os.path.abspath(settings.clip))
    return metrics, about


def open_data(settings: Evaluate) -> dict:
    """Return the index.json of DATA. Raises UserError if DATA does not have what is to be drawn."""
    index = on_rank_0(partial(read_image_index, settings.data, 'DATA'))
    number = number_of_samples(index)
    if number < settings.samples:
        raise UserError(f'DATA {settings.data} holds {plural(number, "sample")}, fewer than --samples '
                        f'{settings.samples:,}; use --samples {number}, or give more')
    if settings.caption is not None:
        require_names([settings.caption], index, '--caption', f'DATA {settings.data}')
    return index


def check_only(settings: Evaluate) -> None:
    """Raise UserError if what --check_only names would end the evaluation, so that a recipe knows before it trains."""
    if settings.check_only == 'networks':
        load_metrics(settings, torch.device('cpu'))
        print(f'checked: {" ".join(filter(None, (settings.inception, settings.clip))) or "nothing is to be scored"}')
    else:
        print(f'checked: DATA {settings.data} holds {number_of_samples(open_data(settings)):,} samples')


def load_model(path: str) -> tuple[StableDiffusionPipeline, dict]:
    """Load the pipeline of MODEL, on the CPU in float32; also return what the record says of it.

    Raises UserError if there is none, or it cannot draw.
    """
    about = {'weights': None, 'trained_batches': None, 'images_seen': None, 'training': None}

    # a pipeline folder of diffusers
    if os.path.isfile(os.path.join(path, PIPELINE_INDEX)):
        pipeline = load_pipeline(path, f'MODEL {path}')
        about['model_name'] = redacted(path)
    # or a checkpoint
    else:
        trained = read_trained_model(path, 'MODEL')
        pipeline = trained_pipeline(trained, f'MODEL {path}')
        about |= about_training(trained) | {'model_name': trained.facts.get('model_name')}
    about['model_sha256'] = hash_of_weights(pipeline.unet, pipeline.vae, pipeline.text_encoder)

    # of a pipeline of export.py, what it was made of, as long as its weights are those
    made_of = read_exported(path)
    if made_of.get('model_sha256') == about['model_sha256']:
        about |= {key: made_of[key] for key in about.keys() & made_of.keys()}
    return pipeline, about


def sources_of_pictures(pipeline: StableDiffusionPipeline) -> dict:
    """Return what pictures depend on, apart from weights: the tokenizer's hash, and what the scheduler is set to."""
    def encode(captions: list[str]) -> list[list[int]]:
        return pipeline.tokenizer(captions, padding='max_length', truncation=True).input_ids  # as diffusers calls it

    facts = pipeline.scheduler.config.items()
    scheduler = {key: value for key, value in facts if not key.startswith('_')}  # as the version of diffusers does
    return {'tokenizer_sha256': hash_of_ids(pipeline.tokenizer.get_vocab(), encode), 'scheduler': scheduler}


def with_progress(steps: Iterable, doing: str, total: int) -> Iterable:
    """Yield the steps, while the first rank shows a bar."""
    with progress_bar(total, ' steps', doing=doing, hidden=dist.get_global_rank() > 0) as bar:
        for step in steps:
            yield step
            bar.update()


def read_references(settings: Evaluate, index: dict, image_size: int, fid: FrechetInceptionDistance | None
                    ) -> list[str]:
    """Read the captions of DATA, and show its images to `fid`, unless that is None. Each rank reads an equal share.

    Raises DataError if an image does not decode, or a caption is empty.
    """
    rank, ranks = dist.get_global_rank(), dist.get_world_size()
    first = settings.samples * rank // ranks
    stop = settings.samples * (rank + 1) // ranks

    # captions, and images in batches
    captions = []
    images = []  # of the next batch of `fid`
    dataset = StreamingLAIONDataset(settings.data, image_size=image_size, index=index, batch_size=1)
    for number in with_progress(range(first, stop), 'reading DATA', stop - first):
        try:
            sample = dataset.sample(number)
        except BadSample as error:
            raise DataError(f'sample {number} of DATA {settings.data}: {error}; leave that sample out') from None
        captions.append(sample[CAPTIONS].get(settings.caption, [sample['caption']])[0])
        if fid is None:
            continue
        images.append(resize(sample['image'], image_size))  # uint8 (3, H, H), the centre square
        if len(images) == settings.batch_size or number == stop - 1:
            fid.update(torch.stack(images).to(fid.device), real=True)
            images.clear()

    # the captions of all ranks
    return list(itertools.chain.from_iterable(dist.all_gather_object(captions)))


def picture_path(settings: Evaluate, guidance: float, number: int) -> Path:
    return Path(settings.out, f'guidance-{guidance}', f'{number:06}.png')


def samples_of_rank(settings: Evaluate) -> range:
    """Return the numbers of the samples that this rank draws and scores."""
    return range(dist.get_global_rank(), settings.samples, dist.get_world_size())


def draw_missing(settings: Evaluate, pipeline: StableDiffusionPipeline, captions: list[str], image_size: int
                 ) -> dict[str, float | None]:
    """Draw the pictures that are not there yet; return how many, and the speed of that, its first batches included."""
    # What this rank has still to draw, in batches: a guidance scale, and the numbers of samples.
    batches = []
    for guidance in settings.guidance:
        numbers = [number for number in samples_of_rank(settings)
                   if not picture_path(settings, guidance, number).exists()]
        for start in range(0, len(numbers), settings.batch_size):
            batches.append((guidance, numbers[start:start + settings.batch_size]))

    # Each picture from the noise of its number.
    start = time.perf_counter()
    for guidance, numbers in with_progress(batches, 'drawing', len(batches)):
        drawing = pipeline([captions[number] for number in numbers], guidance_scale=guidance, height=image_size,
                           width=image_size, num_inference_steps=settings.steps, output_type='latent',
                           generator=seeded(settings.seed * SEEDS_APART + number for number in numbers))
        for number, picture in zip(numbers, decode(pipeline, drawing.images), strict=True):
            save_picture(picture, picture_path(settings, guidance, number))

    # The speed of all ranks together is that of the slowest.
    number_drawn = sum(len(numbers) for _, numbers in batches)
    drawn, seconds = zip(*dist.all_gather_object((number_drawn, time.perf_counter() - start)), strict=True)
    rate = None
    if sum(drawn) > 0:
        rate = sum(drawn) / max(seconds)
    return {'images_generated': sum(drawn), 'images_per_sec': rate}


def to_device(pipeline: StableDiffusionPipeline, precision: str, device: torch.device) -> None:
    """Move a pipeline to a device, and let its UNet compute in `precision`, all else in float32."""
    pipeline.to(device)
    dtype = AUTOCAST_DTYPES.get(precision)
    autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
    pipeline.unet.forward = autocast(pipeline.unet.forward)


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a PNG, which appears whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        picture.save(file, 'PNG', compress_level=1)


def scores_at(settings: Evaluate, guidance: float, captions: list[str], metrics: dict[str, Metric]) -> dict:
    """Return the scores of all pictures of a guidance scale; None where one is not asked for.

    Raises UserError if one is not finite.
    """
    scores = {'guidance': guidance, 'fid': None, 'clip_score': None}
    if not metrics:
        return scores

    # this rank's pictures, batch by batch
    numbers = samples_of_rank(settings)
    starts = range(0, len(numbers), settings.batch_size)
    for start in with_progress(starts, f'scoring at guidance {guidance:g}', len(starts)):
        batch = numbers[start:start + settings.batch_size]
        pictures = [pil_to_tensor(Image.open(picture_path(settings, guidance, number))) for number in batch]
        for name, metric in metrics.items():
            images = torch.stack(pictures).to(metric.device)  # uint8 (B, 3, H, W)
            if name == 'fid':
                metric.update(images, real=False)
            else:
                metric.update(list(images), [captions[number] for number in batch])

    # the scores, of all ranks
    for name, metric in metrics.items():
        score = metric.compute().item()
        if not math.isfinite(score):
            raise UserError(f'the {name} at guidance {guidance:g} is {score}: the weights of its network are damaged')
        scores[name] = max(0.0, score)  # FID of equal sets is a little off 0, on either side
        metric.reset()
    return scores


def evaluate(settings: Evaluate) -> dict:
    """Draw the pictures that are missing, score all of them, and keep the record; return it."""
    # The ranks, each of which draws and scores some of the samples.
    if settings.samples < dist.get_world_size():
        raise UserError(f'--samples {settings.samples} is fewer than the {dist.get_world_size()} ranks, each of which '
                        'draws and scores some; give more samples, or use fewer ranks')
    join_ranks(SECONDS_FOR_THE_SLOWEST)
    device = torch.device('cuda', dist.get_local_rank()) if torch.cuda.is_available() else torch.device('cpu')

    # The networks that score, the model that draws, and what it draws.
    metrics, about_metrics = load_metrics(settings, device)
    pipeline, about_model = load_model(settings.model)
    image_size = settings.image_size or pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    index = open_data(settings)

    # The pictures and their scores, while no other run works in --out.
    made_of = {'program': PROGRAM, 'model_sha256': about_model['model_sha256'], 'data_sha256': index_hash(index),
               'image_size': image_size, 'steps': settings.steps, 'seed': settings.seed,
               'precision': settings.precision, 'caption': settings.caption, **sources_of_pictures(pipeline)}
    with contextlib.ExitStack() as stack:
        begun = Output(settings.out, '--out').begun(made_of)
        on_rank_0(lambda: stack.enter_context(begun))
        captions = read_references(settings, index, image_size, metrics.get('fid'))
        to_device(pipeline, settings.precision, device)
        drawn = draw_missing(settings, pipeline, captions, image_size)
        scores = [scores_at(settings, guidance, captions, metrics) for guidance in settings.guidance]

    # The record.
    found = {'status': COMPLETE, 'image_size': image_size, 'sampler': SAMPLER, 'scores': scores, **about_model,
             **about_metrics, **drawn, 'trained_on_data': was_trained_on(about_model['training'] or {}, index)}
    if settings.inception:
        found['resize'] = f'centre square, to {image_size} pixels bilinear with antialias, {RESIZE}'
        found['fid_is_biased'] = settings.samples < FEWEST_FOR_FID
    record = make_record('evaluate', settings, found)
    return append_record(record, evaluation_summary(record), settings.results_file)


def main(argv: list[str] | None = None) -> dict | None:
    """Read the flags, and evaluate; return the record, or None with --check_only."""
    begin()
    settings = parse(Evaluate, __doc__, argv, PROGRAM)
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()  # they have words for each caption that is cut
        library.utils.logging.disable_progress_bar()
    stays = f'what is drawn stays in --out {settings.out}, and the same command, started again, goes on from there'
    with one_line_errors(PROGRAM, '' if settings.check_only else stays):
        if settings.check_only:
            return check_only(settings)
        precision = settings.precision or best_precision(torch.cuda.is_available())
        return evaluate(dataclasses.replace(settings, precision=precision))


if __name__ == '__main__':
    main()
    destroy_nccl_group()
