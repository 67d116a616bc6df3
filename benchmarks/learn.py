"""Does the program learn? Train in two phases, export, generate images, and count the images that match their captions.

    python -m benchmarks.learn pictures/learned.png    # about three minutes on two cores

Each of 16 captions, such as "red top left", describes a coloured patch in a corner. The VAE is random and cannot
decode, so the images are stored as latents in shards, as encode.py writes them, and the first three latent channels are
the colours. Two ranks train a small UNet on latents of 4 by 4, end halfway, resume, and continue at 8 by 8 from the
weights of the first phase. Then diffusers' own pipeline generates images for each caption from new noise.

An image is right if it is near the target of its caption, and nearer to it than to the targets of the 15 other
captions. Three captions are kept out of the training: their colour and their corner each occur in it, but never
together. They are counted separately and have a black frame in the figure.

docs/troubleshooting.md has the result from two cores of an AMD EPYC.
"""
import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils.logging import disable_progress_bar

from benchmark import StableDiffusion
from export import main as export
from sdbench.datasets.output import OutputFolder, PartWriter, join_parts, write_index
from sdbench.inputs.shards import IMAGES_HASH, LATENT_COLUMNS, MOMENTS, index_hash
from sdbench.models.folders import BUILT_IN
from sdbench.models.loading import find_model

ROOT = Path(__file__).parent.parent
COLOURS = {'red': (1, -1, -1), 'green': (-1, 1, -1), 'blue': (-1, -1, 1), 'yellow': (1, 1, -1)}  # -1 to 1
PLACES = {'top left': (0, 0), 'bottom right': (1, 1), 'top right': (0, 1), 'bottom left': (1, 0)}  # row, column
UNSEEN = ('red bottom right', 'green bottom left', 'blue top left')  # kept out of the training
SCALE = 0.18215  # scaling factor of Stable Diffusion's VAE: the UNet sees latents times SCALE
JITTER = 0.05  # standard deviation of each colour value between samples
NEAR = 0.35  # largest RMS difference between a right image and its target, in units of the colours
GUIDANCE = 2.0
STEPS = 25
UNET = {'sample_size': 4, 'layers_per_block': 1, 'block_out_channels': [32], 'norm_num_groups': 8,
        'down_block_types': ['CrossAttnDownBlock2D'], 'up_block_types': ['CrossAttnUpBlock2D'],
        'mid_block_type': 'UNetMidBlock2DCrossAttn', 'cross_attention_dim': 32, 'attention_head_dim': 1}
TEXT_ENCODER = {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 1}
PHASES = {1: (32, 1200), 2: (64, 400)}  # image size in pixels, and number of batches


def captions_of(colours: int = 4, places: int = 4) -> list[str]:
    """Return a caption for each combination of the first colours and the first places."""
    return [f'{colour} {place}' for colour in [*COLOURS][:colours] for place in [*PLACES][:places]]


def target_image(caption: str, size: int) -> np.ndarray:
    """Return the target image of a caption, float32 (3, size, size) from -1 to 1: a patch of its colour on grey."""
    colour, place = caption.split(' ', 1)
    row, column = PLACES[place]
    half = size // 2
    image = np.zeros((3, size, size), np.float32)
    patch = image[:, row * half:(row + 1) * half, column * half:(column + 1) * half]
    patch[:] = np.reshape(COLOURS[colour], (3, 1, 1))
    return image


def write_model(folder: Path, unet: dict) -> None:
    """Write a diffusers folder with the tiny model, but with a smaller text encoder and a UNet with the config `unet`.

    The VAE and the text encoder have random weights, which --pretrained loads.
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
    """Write shards with `samples` samples, whose latents are the captions' target images, as encode.py writes them."""
    files = find_model(str(model), pretrained=True)
    size = files.latent_size(image_size)
    columns = LATENT_COLUMNS | {MOMENTS: f'ndarray:float16:8,{size},{size}'}
    folder.mkdir(parents=True, exist_ok=True)
    output = OutputFolder(str(folder), 'OUT')
    part = PartWriter(output, 'all', columns)
    for index in range(samples):
        caption = captions[index % len(captions)]
        moments = np.zeros((8, size, size), np.float16)  # mean and log variance
        moments[:3] = target_image(caption, size) / SCALE
        moments[4:] = 2 * math.log(jitter / SCALE)
        part.write({MOMENTS: moments, 'caption': caption})
    part.finish()
    origin = files.origin_of_latents(image_size) | {IMAGES_HASH: index_hash({'captions': captions})}
    write_index(output, join_parts(output, ['all']), latents=origin)


def generate(pipeline_folder: Path, captions: list[str], each: int, guidance: float = GUIDANCE) -> np.ndarray:
    """Generate `each` images per caption; return colours, float32 (captions, each, 3, H/8, W/8), about -1 to 1."""
    pipeline = StableDiffusionPipeline.from_pretrained(str(pipeline_folder))
    pipeline.set_progress_bar_config(disable=True)
    latents = pipeline(captions, num_images_per_prompt=each, num_inference_steps=STEPS, guidance_scale=guidance,
                       generator=torch.Generator().manual_seed(7), output_type='latent').images
    decoded = latents / pipeline.vae.config.scaling_factor  # the input of the VAE's decoder
    colours = decoded[:, :3] * SCALE
    return colours.reshape(len(captions), each, *colours.shape[1:]).numpy()


def fractions_right(generated: np.ndarray, captions: list[str], near: float = NEAR, unseen: Sequence[str] = ()
                    ) -> dict[str, float]:
    """Count which of the generated images (captions, each, 3, H, W) match their captions.

    Returns `right`, the fraction of right images among the captions that were trained; `right_unseen`, the fraction
    among the captions in `unseen`, if there are any; and `distance`, the median RMS difference between an image and its
    target over all captions.
    """
    # Compare each image with the targets of all captions.
    targets = np.stack([target_image(caption, generated.shape[-1]) for caption in captions])  # (captions, 3, H, W)
    differences = generated[:, :, None] - targets  # (captions, each, captions, 3, H, W)
    distances = np.sqrt(np.square(differences).mean(axis=(3, 4, 5)))  # (captions, each, captions)

    # An image is right if its own target is the nearest one, and near enough that the image is not just grey.
    own = np.arange(len(captions))  # (captions,)
    is_nearest = distances.argmin(axis=2) == own[:, None]
    is_near = distances.min(axis=2) < near
    right = is_nearest & is_near  # (captions, each)

    # Count trained and unseen captions separately.
    is_unseen = np.isin(captions, unseen)  # (captions,)
    fractions = {'right': float(right[~is_unseen].mean()), 'distance': float(np.median(distances[own, :, own]))}
    if is_unseen.any():
        fractions['right_unseen'] = float(right[is_unseen].mean())
    return fractions


def train(folder: Path, phase: int, *flags: str) -> None:
    """Train one phase with benchmark.py in two runs. The first one ends halfway, and the second one resumes."""
    image_size, batches = PHASES[phase]
    command = [str(Path(sys.executable).with_name('composer')), '-n', '2', 'benchmark.py', '--remote',
               str(folder / f'latents-{image_size}'), '--model_name', str(folder / 'model'), '--pretrained',
               '--image_size', str(image_size), '--batch_size', '64', '--learning_rate', '2e-3', '--lr_warmup', '50ba',
               '--caption_drop', '0.1', '--use_ema', '--ema_half_life', '100ba', '--num_workers', '1', '--save_folder',
               str(folder / f'phase-{phase}'), '--autoresume', '--results', str(folder / 'results.jsonl'), *flags]
    for length in (batches // 2, batches):
        subprocess.run([*command, '--max_duration', f'{length}ba'], cwd=ROOT, check=True)
    record = json.loads((folder / 'results.jsonl').read_text().splitlines()[-1])
    assert record['first_batch'] == batches // 2  # or this would not test resuming


def generate_after(folder: Path, phase: int, captions: list[str]) -> np.ndarray:
    """Generate images with the raw and then the EMA weights after a phase, and print the fractions of right images.

    Returns the images from the EMA weights, (captions, 8, 3, H, W).
    """
    for kind, flags in (('raw', ['--raw_weights']), ('EMA', [])):
        out = folder / f'{kind}-{phase}'
        export([str(folder / f'phase-{phase}'), str(out), *flags])
        generated = generate(out, captions, each=8)
        fractions = fractions_right(generated, captions, unseen=UNSEEN)
        print(f'phase {phase}, {kind:<3} weights: {fractions["right"]:.1%} of the images are right, and '
              f'{fractions["right_unseen"]:.1%} for captions that were kept out; {1 / len(captions):.1%} by chance')
    return generated


def write_figure(figure: Path, generated: np.ndarray, captions: list[str]) -> None:
    """Write the first image of each caption: rows are colours, columns are places, and UNSEEN has a black frame."""
    fig, axes = plt.subplots(len(COLOURS), len(PLACES), figsize=(1.1 * len(PLACES), 1.5 * len(COLOURS)))
    for ax, colours, caption in zip(axes.flat, generated[:, 0], captions, strict=True):  # colours (3, H, W)
        pixels = np.clip((colours + 1) * 127.5, 0, 255).round().astype(np.uint8).transpose(1, 2, 0)
        ax.imshow(pixels, interpolation='nearest')
        ax.set(xticks=[], yticks=[])
        ax.set_xlabel(textwrap.fill(caption, 18), fontsize=7)
        ax.spines[:].set(visible=caption in UNSEEN, linewidth=2)
    fig.tight_layout(pad=0.4)
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser('python -m benchmarks.learn', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('figure', type=Path, metavar='FIGURE', help='file for the figure, such as learned.png')
    figure = parser.parse_args().figure
    disable_progress_bar()  # for loading a pipeline
    captions = captions_of()
    seen = [caption for caption in captions if caption not in UNSEEN]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Write the model and the latents of both phases.
        write_model(folder / 'model', UNET)
        for image_size, _ in PHASES.values():
            write_latents(folder / f'latents-{image_size}', folder / 'model', seen, image_size, samples=4096)

        # Train both phases, and generate images after each.
        train(folder, 1)
        generate_after(folder, 1, captions)
        train(folder, 2, '--load_weights', str(folder / 'phase-1'))
        write_figure(figure, generate_after(folder, 2, captions), captions)


if __name__ == '__main__':
    main()
