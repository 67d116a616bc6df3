"""Does it learn? Train by the real program in two phases, export, draw, and count the pictures that are right.

    python -m benchmarks.learn pictures/learned.png    # about three minutes on two cores

Each of 16 captions, such as "red top left", is a coloured patch in a place. A random VAE cannot decode, so the
pictures are stored as latents whose first three channels are the colours, in shards as encode.py writes them. Two ranks
train a small UNet on latents of 4 by 4, are stopped, resume, and go on at 8 by 8 from the weights of the first phase.
diffusers' own pipeline draws each caption from new noise. A picture is right if of all 16 it is nearest to the one that
its caption names, and near to it as well. Three captions are kept out of the training: a colour in a place that it saw
only apart. They are counted apart from the others, and have a black frame in the figure. The last line is the result as
JSON; the argument is the file for the pictures.

docs/training.md has the result of two cores of an AMD EPYC.
"""
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils.logging import disable_progress_bar
from PIL import Image

from benchmark import StableDiffusion
from benchmarks.captioned import save_captioned
from export import main as export
from sdbench.datasets.output import Output, PartWriter, join_parts, write_index
from sdbench.inputs.shards import IMAGES_HASH, LATENT_COLUMNS, MOMENTS, index_hash
from sdbench.models.loading import BUILT_IN, find_model
from sdbench.training.checkpoints import checkpoints_in

ROOT = Path(__file__).parent.parent
COLOURS = {'red': (1, -1, -1), 'green': (-1, 1, -1), 'blue': (-1, -1, 1), 'yellow': (1, 1, -1)}  # -1 to 1
PLACES = {'top left': (0, 0), 'bottom right': (1, 1), 'top right': (0, 1), 'bottom left': (1, 0)}  # row, column
UNSEEN = ('red bottom right', 'green bottom left', 'blue top left')  # captions that are kept out of the training
SCALE = 0.18215  # that of Stable Diffusion's VAE: latents are 1 / SCALE times what the UNet sees
JITTER = 0.05  # standard deviation of each colour of a pixel, from sample to sample
NEAR = 0.35  # root mean square of the difference to the right picture, in units of the colours
GUIDANCE = 2.0
STEPS = 25
UNET = {'sample_size': 4, 'layers_per_block': 1, 'block_out_channels': [32], 'norm_num_groups': 8,
        'down_block_types': ['CrossAttnDownBlock2D'], 'up_block_types': ['CrossAttnUpBlock2D'],
        'mid_block_type': 'UNetMidBlock2DCrossAttn', 'cross_attention_dim': 32, 'attention_head_dim': 1}
TEXT_ENCODER = {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 1}
PHASES = {1: (32, 1200), 2: (64, 400)}  # of each the size of an image, in pixels, and the batches
CHECKPOINTS = 8  # of each phase


def captions_of(colours: int = 4, places: int = 4) -> list[str]:
    """Return a caption for each of so many colours in each of so many places."""
    return [f'{colour} {place}' for colour in [*COLOURS][:colours] for place in [*PLACES][:places]]


def picture_of(caption: str, size: int) -> np.ndarray:
    """Draw a caption's picture, float32 (3, size, size) from -1 to 1: a patch of its colour on grey."""
    colour, place = caption.split(' ', 1)
    row, column = PLACES[place]
    half = size // 2
    picture = np.zeros((3, size, size), np.float32)
    patch = picture[:, row * half:(row + 1) * half, column * half:(column + 1) * half]
    patch[:] = np.reshape(COLOURS[colour], (3, 1, 1))
    return picture


def write_model(folder: Path, unet: dict) -> None:
    """Write a diffusers folder of the tiny model with a smaller text encoder and with the UNet `unet`.

    The weights of its VAE and its text encoder, which --pretrained takes, are random.
    """
    shutil.copytree(BUILT_IN['tiny'], folder)
    for part, changes in (('unet', unet), ('text_encoder', TEXT_ENCODER)):
        path = folder / part / 'config.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    torch.manual_seed(17)
    model = StableDiffusion(str(folder))
    model.vae.save_pretrained(folder / 'vae')
    model.text_encoder.save_pretrained(folder / 'text_encoder')


def write_latents(folder: Path, model: Path, captions: list[str], image_size: int, samples: int,
                  jitter: float = JITTER) -> None:
    """Write shards with the moments of the captions' pictures, as encode.py does, so many samples of all."""
    files = find_model(str(model), pretrained=True)
    size = files.latent_size(image_size)
    columns = LATENT_COLUMNS | {MOMENTS: f'ndarray:float16:8,{size},{size}'}
    folder.mkdir(parents=True, exist_ok=True)
    output = Output(str(folder), 'OUT')
    part = PartWriter(output, 'all', columns)
    for index in range(samples):
        caption = captions[index % len(captions)]
        moments = np.zeros((8, size, size), np.float16)  # mean and log variance
        moments[:3] = picture_of(caption, size) / SCALE
        moments[4:] = 2 * math.log(jitter / SCALE)
        part.write({MOMENTS: moments, 'caption': caption})
    part.finish()
    origin = files.origin_of_latents(image_size) | {IMAGES_HASH: index_hash({'captions': captions})}
    write_index(output, join_parts(output, ['all']), latents=origin)


def draw(pipeline_folder: Path, captions: list[str], each: int, guidance: float = GUIDANCE) -> np.ndarray:
    """Draw each caption so many times; return colours, float32 (captions, each, 3, H/8, W/8), about -1 to 1."""
    pipeline = StableDiffusionPipeline.from_pretrained(str(pipeline_folder))
    pipeline.set_progress_bar_config(disable=True)
    latents = pipeline(captions, num_images_per_prompt=each, num_inference_steps=STEPS, guidance_scale=guidance,
                       generator=torch.Generator().manual_seed(7), output_type='latent').images
    decoded = latents / pipeline.vae.config.scaling_factor  # what a VAE would decode
    colours = decoded[:, :3] * SCALE
    return colours.reshape(len(captions), each, *colours.shape[1:]).numpy()


def share_of_right_pictures(drawn: np.ndarray, captions: list[str], near: float = NEAR, unseen: Sequence[str] = ()
                            ) -> dict[str, float]:
    """Count which of the pictures `drawn` (captions, each, 3, H, W) are what their captions say.

    `right` is the share with the right colour in the right place, and near to it, of the captions that were trained.
    `right_unseen` is that of those that were not, `unseen`, where there are any. `distance` is the median over all, of
    the root mean square of the difference to the right picture.
    """
    # how far each picture is from that of each caption
    pictures = np.stack([picture_of(caption, drawn.shape[-1]) for caption in captions])  # (captions, 3, H, W)
    differences = drawn[:, :, None] - pictures  # (captions, each, captions, 3, H, W)
    distances = np.sqrt(np.square(differences).mean(axis=(3, 4, 5)))  # (captions, each, captions)

    # whether it is nearest to its own
    own = np.arange(len(captions))  # (captions,)
    is_nearest = distances.argmin(axis=2) == own[:, None]
    is_near = distances.min(axis=2) < near
    right = is_nearest & is_near  # (captions, each)

    # the shares of all
    is_unseen = np.isin(captions, unseen)  # (captions,)
    verdict = {'right': float(right[~is_unseen].mean()), 'distance': float(np.median(distances[own, :, own]))}
    if is_unseen.any():
        verdict['right_unseen'] = float(right[is_unseen].mean())
    return verdict


def train(folder: Path, phase: int, *flags: str) -> None:
    """Train one phase by the real program, which is stopped halfway by a signal and started again."""
    image_size, batches = PHASES[phase]
    kept = folder / f'phase-{phase}'
    command = [str(Path(sys.executable).with_name('composer')), '-n', '2', 'benchmark.py', '--remote',
               str(folder / f'latents-{image_size}'), '--model_name', str(folder / 'model'), '--pretrained',
               '--image_size', str(image_size), '--batch_size', '64', '--max_duration', f'{batches}ba',
               '--learning_rate', '2e-3', '--lr_warmup', '50ba', '--caption_drop', '0.1', '--use_ema',
               '--ema_half_life', '100ba', '--num_workers', '1', '--save_folder', str(kept), '--save_interval',
               f'{batches // CHECKPOINTS}ba', '--autoresume', '--results', str(folder / 'results.jsonl'), *flags]

    # a run that is stopped when half of its checkpoints are there, and the one that resumes it
    with open(folder / 'log', 'ab') as log:
        first = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        while first.poll() is None and len(checkpoints_in(str(kept))) < CHECKPOINTS // 2:
            time.sleep(0.1)
        first.send_signal(signal.SIGTERM)
        first.wait()
        ended = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode

    # what their records say of it
    statuses = [json.loads(line)['status'] for line in (folder / 'results.jsonl').read_text().splitlines()]
    if ended or statuses[-2:] != ['interrupted', 'complete']:
        raise SystemExit(f'learn.py: phase {phase} did not stop and resume; its output ends with\n'
                         + (folder / 'log').read_text()[-3000:])


def drawn_after(folder: Path, phase: int, captions: list[str]) -> tuple[dict, np.ndarray]:
    """Draw with each kind of weights, and count the pictures that are right.

    Returns the counts of each kind, and the pictures of the average, (captions, 8, 3, H, W).
    """
    verdicts = {}
    for kind, flags in (('live', ['--raw_weights']), ('averaged', [])):
        out = folder / f'{kind}-{phase}'
        export([str(folder / f'phase-{phase}'), str(out), *flags])
        drawn = draw(out, captions, each=8)
        verdicts[kind] = share_of_right_pictures(drawn, captions, unseen=UNSEEN)
    return verdicts, drawn


def draw_figure(figure: Path, drawn: np.ndarray, captions: list[str]) -> None:
    """Draw the first picture of each caption: a row a colour, a column a place, UNSEEN in a black frame."""
    pictures = []
    for colours in drawn[:, 0]:  # (3, H, W)
        pixels = np.clip((colours + 1) * 127.5, 0, 255).round().astype(np.uint8).transpose(1, 2, 0)
        pictures.append(Image.fromarray(pixels))
    save_captioned(figure, pictures, captions, columns=len(PLACES), framed=UNSEEN)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit('usage: python -m benchmarks.learn FIGURE')
    disable_progress_bar()  # of loading a pipeline
    start = time.perf_counter()
    captions = captions_of()
    seen = [caption for caption in captions if caption not in UNSEEN]
    result = {'chance': 1 / len(captions)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # the data of both phases
        write_model(folder / 'model', UNET)
        for image_size, _ in PHASES.values():
            write_latents(folder / f'latents-{image_size}', folder / 'model', seen, image_size, samples=4096)

        # the two phases, and what is drawn after each
        train(folder, 1)
        result['phase_1'], _ = drawn_after(folder, 1, captions)
        train(folder, 2, '--load_weights', str(folder / 'phase-1'))
        result['phase_2'], drawn = drawn_after(folder, 2, captions)

        # the figure
        figure = Path(sys.argv[1])
        figure.parent.mkdir(parents=True, exist_ok=True)
        draw_figure(figure, drawn, captions)

    # what is printed
    for phase in ('phase_1', 'phase_2'):
        for kind, verdict in result[phase].items():
            print(f'{phase}, {kind:<8} weights: {verdict["right"]:.1%} of the pictures are right, of the captions that '
                  f'were kept out {verdict["right_unseen"]:.1%}; by chance {result["chance"]:.1%}')
    result['seconds'] = round(time.perf_counter() - start)
    print(json.dumps(result))


if __name__ == '__main__':
    main()
