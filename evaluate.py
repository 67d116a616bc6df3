"""What a training is worth: draw thousands of captions, and score the pictures by FID and CLIP score.

    python evaluate.py checkpoints photos-mds-held-out --out judged --inception WEIGHTS.pth --clip CLIP
    python evaluate.py my-model captions.txt --reference coco.safetensors --guidance 1.5 3 5 8 --out judged \\
        --inception WEIGHTS.pth --clip CLIP

MODEL is a checkpoint, the newest of a folder or an object store, or a pipeline folder of diffusers; DATA is shards of
images with captions, or a text with a caption on each line and the features of real images in --reference. Every GPU of
this machine draws, or with --ray every GPU of a Ray cluster. The same command draws the same pictures; one that was
stopped, when started again, draws only what is missing. Nothing is downloaded: WEIGHTS.pth and CLIP are yours, and an
error says where to get them.
"""
from settings.commands import EVALUATE_FLAGS, Evaluate
from settings.ends import leave_to_first_process, one_line_errors
from settings.flags import parse

PROGRAM = 'evaluate.py'

if __name__ == '__main__':
    leave_to_first_process()
    parse(Evaluate, __doc__)  # a mistake is answered before the imports, which take seconds

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from safetensors import SafetensorError
from transformers import CLIPTextConfig

from inputs.errors import DataError, one_line
from inputs.shards import index_hash
from inputs.words import counted
from measuring.quality import FEWEST_SAMPLES, clip_score, frechet_distance
from measuring.record import circumstances, keep, redacted
from models.feature_extractors import PUBLISHED_SHA256, load_clip, load_inception
from models.flops import flops_of_a_picture, utilization
from parts.claims import claim, finished_parts
from parts.devices import is_to_be_on_gpu, workers_on_devices
from parts.engine import Part, make_parts
from parts.evaluation import (
    COSINES,
    FEATURES,
    QualitySettings,
    hash_of_pipeline,
    load_pipeline,
    read_features,
    show_nothing_while_loading,
)
from parts.evaluation_plan import (
    Evaluation,
    Model,
    find_reference,
    hashes_of_judges,
    read_data,
    reference_file,
)
from parts.local_workers import LocalWorkers
from parts.output import FolderOutput, Output, open_output
from parts.progress import progress_bar
from parts.ray_workers import RayWorkers
from parts.workers import make_evaluator
from settings.here import best_precision
from training import read_trained, trained_pipeline
from training.weights import PIXELS_PER_LATENT, Trained

PIPELINE_INDEX = 'model_index.json'  # of a pipeline folder of diffusers
SAMPLER = 'DDIM'  # of models.sampling.build_pipeline


def is_pipeline(model: str) -> bool:
    """Whether a folder holds a pipeline of diffusers."""
    return os.path.isfile(os.path.join(model, PIPELINE_INDEX))


@contextlib.contextmanager
def open_model(flags: Evaluate) -> Iterator[Model]:
    """The model; of a checkpoint, a pipeline that goes with the context. Raises ValueError if there is none."""
    if is_pipeline(flags.model):
        yield Model(flags.model, flags.model)
        return
    place = f'MODEL {flags.model}'
    trained = read_trained(flags.model, 'MODEL')
    if trained.vae is None and not flags.pretrained:
        raise ValueError(f'{place} has no VAE to decode with, because it was trained on latents; give --model_name '
                         'FOLDER --pretrained for the one that encoded')
    pipeline = trained_pipeline(trained, place, flags.model_name, flags.tokenizer, flags.pretrained, flags.live)
    with tempfile.TemporaryDirectory() as folder:
        try:
            pipeline.save_pretrained(folder)
        except SafetensorError as error:  # as it says of a full disk
            raise OSError(one_line(error)) from None
        del pipeline
        yield Model(folder, flags.model_name or trained.flags['model_name'], kind_of_weights(trained, flags.live),
                    trained.batch, trained.samples, trained.flags)


def kind_of_weights(trained: Trained, live: bool) -> str:
    return 'live' if live or trained.averaged is None else 'averaged'


def require_judges(flags: Evaluate) -> None:
    """Raises ValueError if the weights that pictures are judged by are not those of their networks."""
    if flags.inception:
        load_inception(flags.inception)
    if flags.clip:
        load_clip(flags.clip)


@contextlib.contextmanager
def folder_for_copies(data: str) -> Iterator[str | None]:
    """A folder for copies of the shards of DATA, which goes with the context; None where they are read in place."""
    if os.path.exists(data):
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def require_whole_noise(steps: int, timesteps: int) -> None:
    """Raises ValueError if the sampler would begin at a timestep that is far from pure noise, or beyond the last: where
    it cannot divide the timesteps by its steps, it leaves out the noisiest.
    """
    first = (steps - 1) * (timesteps // steps) + 1  # of diffusers' schedulers, of this spacing and offset
    if not 0.9 * (timesteps - timesteps / steps) <= first < timesteps:
        better = next(number for number in range(min(steps, timesteps // 2), 0, -1) if timesteps % number == 0)
        raise ValueError(f'--steps {steps}: the sampler would begin at timestep {first} of {timesteps}, and so draw '
                         f'from the wrong noise; use {better}')


def image_size_of(model: Model) -> int:
    """The size in pixels that a model was trained at. Raises ValueError if it does not say."""
    sample_size = model.config('unet').get('sample_size')
    if not isinstance(sample_size, int) or sample_size < 1:
        raise ValueError(f'MODEL {model.name} does not say in unet/config.json at which size it was trained; give '
                         '--image_size')
    return sample_size * PIXELS_PER_LATENT


def plan(flags: Evaluate, model: Model, copies: str | None) -> Evaluation:
    """What is to be done. Raises ValueError for what cannot be."""
    image_size = flags.image_size or image_size_of(model)
    require_whole_noise(flags.steps, model.config('scheduler', 'scheduler_config.json')['num_train_timesteps'])
    data = read_data(flags, copies)
    judges = hashes_of_judges(flags)
    reference, given = find_reference(flags, data, image_size, judges['inception_sha256'])
    require_judges(flags)
    if is_pipeline(flags.model):
        load_pipeline(model.folder)  # before --out is begun for one that cannot be
    return Evaluation(flags, model, hash_of_pipeline(model.folder), data, image_size, judges, reference, given)


def settings_of(evaluation: Evaluation) -> QualitySettings:
    """What the workers need to know."""
    flags = evaluation.flags
    index = evaluation.data.index
    return QualitySettings(
        pipeline=evaluation.model.folder,
        pipeline_sha256=evaluation.model_sha256,
        data=flags.data if index else None,
        index_hash=index_hash(index) if index else None,
        inception=flags.inception,
        clip=flags.clip,
        **evaluation.judges,
        image_size=evaluation.image_size,
        batch_size=flags.batch_size,
        steps=flags.steps,
        seed=flags.seed,
        precision=flags.precision,
        save_pictures=flags.save_pictures,
        copies=None if flags.ray else evaluation.data.copies,
        on_gpu=is_to_be_on_gpu(flags.ray),
    )


def open_workers(evaluation: Evaluation, output: Output, num_parts: int) -> LocalWorkers | RayWorkers:
    """The processes that draw: one for each GPU."""
    make = partial(make_evaluator, output, settings_of(evaluation))
    return workers_on_devices(make, 'parts.evaluation', evaluation.flags.ray, num_parts)


def draw_missing(evaluation: Evaluation, output: Output) -> tuple[int, dict[str, dict]]:
    """Make the parts that no earlier run has made; returns the pictures drawn, and the figures of each worker."""
    pieces = evaluation.pieces()
    done = set()
    if claim(output, evaluation.contents()):
        done = finished_parts(output, max(pieces) + 1)
    missing = [Part(number, [piece]) for number, piece in pieces.items() if number not in done]
    total = sum(piece.number for piece in pieces.values())
    to_do = sum(pieces[part.number].number for part in missing)
    drawn = 0
    workers_figures = {}
    if missing:
        print(work_in_words(evaluation), file=sys.stderr)
        with (open_workers(evaluation, output, len(missing)) as workers,
              progress_bar(total, ' images', total - to_do) as bar):
            for made in make_parts(workers, missing):
                drawn += made['samples'] if made['is_drawn'] else 0
                workers_figures[made['worker']['name']] = made['worker']
                bar.update(made['samples'])
    return drawn, workers_figures


def work_in_words(evaluation: Evaluation) -> str:
    """What the bar counts."""
    flags = evaluation.flags
    words = f'drawing {counted(flags.samples * len(flags.guidance), "picture")}'
    if evaluation.reference and evaluation.given is None:
        words += f', and looking at {counted(flags.samples, "image")} to compare with'
    return words


def gathered(output: Output, numbers: range, name: str) -> torch.Tensor:
    """What parts hold under a name, in the order of the samples. Raises DataError if a part is not whole."""
    return torch.cat([read_features(output, number)[name] for number in numbers])


def real_features(evaluation: Evaluation, output: Output) -> torch.Tensor:
    """The features of the real images (M, 2048), which --reference holds from now on, where it did not."""
    if evaluation.given is not None:
        return evaluation.given
    flags = evaluation.flags
    features = gathered(output, evaluation.parts_at(len(flags.guidance)), FEATURES)
    if flags.reference:
        place, name = os.path.split(os.path.abspath(flags.reference))
        content = reference_file(evaluation.reference, features)
        if not FolderOutput(place, '--reference').create(name, content):
            raise DataError(f'--reference {flags.reference} was made by another meanwhile; run the same command again')
    return features


def scores_of(evaluation: Evaluation, output: Output) -> list[dict]:
    """The scores at each guidance scale; None where a score was not asked for."""
    flags = evaluation.flags
    real = None
    if flags.inception:
        real = real_features(evaluation, output)
    scores = []
    for row, guidance in enumerate(flags.guidance):
        score = {'guidance': guidance, 'fid': None, 'clip_score': None}
        if flags.inception:
            score['fid'] = frechet_distance(gathered(output, evaluation.parts_at(row), FEATURES), real)
        if flags.clip:
            score['clip_score'] = clip_score(gathered(output, evaluation.parts_at(row), COSINES))
        scores.append(score)
    return scores


def evaluation_record(evaluation: Evaluation, scores: list[dict], drawn: int, workers: list[dict]) -> dict:
    """The record of an evaluation: what was judged, by what, and the scores. `samples_drawn` are those of this run."""
    flags, model = evaluation.flags, evaluation.model
    values = dataclasses.asdict(flags) | {'model_name': model.name, 'image_size': evaluation.image_size}
    record = circumstances('evaluate', values, EVALUATE_FLAGS) | {
        'status': 'complete', 'model': redacted(flags.model), 'data': redacted(flags.data), 'weights': model.weights,
        'trained_batches': model.batch, 'images_seen': model.images_seen, 'training': model.training,
        'sampler': SAMPLER, 'scores': scores, 'model_sha256': evaluation.model_sha256, **evaluation.judges,
        'clip': flags.clip and os.path.basename(os.path.abspath(flags.clip)), 'samples_drawn': drawn,
        'images_per_sec': None, 'images_per_sec_per_device': None,
    }
    if flags.inception:
        real_images = evaluation.reference['images']
        record |= {'network': evaluation.reference['network'], 'resize': evaluation.reference['resize'],
                   'real_images': real_images,
                   'fid_is_biased': min(flags.samples, real_images) < FEWEST_SAMPLES,
                   'fid_of_published_weights': evaluation.judges['inception_sha256'].startswith(PUBLISHED_SHA256)}
    return record | speed_of(evaluation, workers, record['device'])


def speed_of(evaluation: Evaluation, workers: list[dict], device: str) -> dict:
    """Pictures per second over all workers, and on GPUs what that is of their peak; nothing where none was drawn."""
    measured = [worker for worker in workers if worker['seconds']]
    if not measured:
        return {}
    figures = {'num_devices': len(workers), 'num_nodes': len({worker['machine'] for worker in workers})}
    if workers[0]['device']:
        device = workers[0]['device']
        figures |= {'device': device, 'device_type': 'cuda'}
    images_per_sec = sum(worker['measured'] / worker['seconds'] for worker in measured)
    figures |= {'images_per_sec': images_per_sec, 'images_per_sec_per_device': images_per_sec / len(measured)}
    flops = mean_flops(evaluation)
    return figures | utilization(images_per_sec / len(measured), flops, evaluation.flags.precision, device)


def mean_flops(evaluation: Evaluation) -> float:
    """FLOPs of drawing a picture, on average over the guidance scales; those of its judges are not in it."""
    model, flags = evaluation.model, evaluation.flags
    text_config = CLIPTextConfig(**model.config('text_encoder'))
    flops = flops_of_a_picture(model.config('unet'), text_config, model.config('vae'), evaluation.image_size)
    return passes_of_unet(flags.steps, flags.guidance) * flops['unet'] + flops['text_encoder'] + flops['vae']


def passes_of_unet(steps: int, guidance: Sequence[float]) -> float:
    """How often the UNet runs for a picture, on average over guidance scales: twice a step where it is guided."""
    return steps * sum(2 if scale > 1 else 1 for scale in guidance) / len(guidance)


def summary(record: dict) -> str:
    """The record for people: a row for each guidance scale."""
    lines = []
    if record['images_per_sec']:
        lines.append(f'{"drawn":<15} {record["samples_drawn"]:,} pictures, {record["images_per_sec"]:.4g} images/s')
    age = ''
    if record['trained_batches'] is not None:
        age = f', {record["weights"]} weights after {record["trained_batches"]:,} batches'
    lines.append(f'{"model":<15} {record["model"]}{age}')
    lines.append(f'{"guidance":<15} {"FID":>10} {"CLIP score":>12}')
    for score in record['scores']:
        lines.append(f'{score["guidance"]:<15g} {in_words(score["fid"]):>10} {in_words(score["clip_score"]):>12}')
    if record.get('fid_is_biased'):
        lines.append(f'{"caution":<15} FID of {record["samples"]:,} pictures and {record["real_images"]:,} images is '
                     f'too high: below {FEWEST_SAMPLES:,} it is biased, and compares only with the same number')
    if record.get('fid_of_published_weights') is False:
        lines.append(f'{"caution":<15} the weights of --inception are not those of published FIDs')
    return '\n'.join(lines)


def in_words(score: float | None) -> str:
    return '' if score is None else f'{score:,.2f}'


def evaluate(flags: Evaluate) -> dict:
    """Draw what is missing, and judge it; returns the record."""
    show_nothing_while_loading()
    with open_model(flags) as model, folder_for_copies(flags.data) as copies:
        evaluation = plan(flags, model, copies)
        output = open_output(flags.out, '--out')
        with output.in_use():
            drawn, workers = draw_missing(evaluation, output)
            scores = scores_of(evaluation, output)
        record = evaluation_record(evaluation, scores, drawn, list(workers.values()))
    return keep(record, summary(record), flags.results)


def main(argv: list[str] | None = None) -> dict:
    """Evaluate; returns the record."""
    leave_to_first_process()
    flags = parse(Evaluate, __doc__, argv, PROGRAM)
    stays = f'what is drawn stays in --out {flags.out}, and the same command, started again, goes on from there'
    with one_line_errors(PROGRAM, stays):
        precision = flags.precision or best_precision(torch.cuda.is_available())
        return evaluate(dataclasses.replace(flags, precision=precision, guidance=list(dict.fromkeys(flags.guidance))))


if __name__ == '__main__':
    main()
