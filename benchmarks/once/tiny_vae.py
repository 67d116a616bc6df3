"""Train the VAE of the tiny model, whose weights are in sdbench/models/tiny/vae, on pictures of emojis.

    npm pack emoji-datasource-google@16.0.0
    tar -xzf emoji-datasource-google-16.0.0.tgz
    python -m benchmarks.once.tiny_vae package/img/google/64 docs/tiny_vae.png

One emoji in ten is held out with all its tones of skin. The rest train diffusers' own AutoencoderKL: half as they are,
on white, and half in other colours on drawn backgrounds, so that other pictures are reconstructed too. The mean and the
scale of each channel of the latents over the training pictures are then folded into the weights, so that the latents
which `scaling_factor` scales have mean 0 and variance 1. Then the decoder
trains alone, beside a discriminator, which learns to tell decoded pictures from real ones. Edges become sharper so, and
the latents stay what they are. The weights are saved in half precision. The last line says as JSON how well the saved
ones reconstruct the held-out pictures. The figure has eight of these, and below each what became of it.
"""
import argparse
import hashlib
import json
import re
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import save_file
from torch.nn.utils.parametrizations import spectral_norm
from torchvision.utils import make_grid, save_image

from sdbench.models.loading import BUILT_IN, build_vae, find_model

SIDE = 64  # pixels of a picture
CROP = 32  # pixels of what most of the training sees
HELD_OUT = 10  # one emoji in so many
TONES = re.compile('-1f3f[b-f]')  # of skin, in the name of a file
KL_WEIGHT = 1e-3  # of the divergence of a number of the latents; that of the errors of a number of a picture is 1
LEARNING_RATE = 3e-3
PHASES = ((CROP, 16, 0.7), (SIDE, 8, 0.3))  # pixels of a side, pictures of a batch, share of the batches
SHARPENING = {'lr': 1e-3, 'weight_decay': 0.0, 'betas': (0.5, 0.99)}  # AdamW of the decoder, and of the discriminator
SHARPENING_NUMBER = 16  # pictures of a batch
ADVERSARIAL_WEIGHT = 0.05  # of how real a decoded picture looks
FEATURES_WEIGHT = 2.0  # of the absolute errors of the discriminator's features
AS_THEY_ARE = 0.5  # share of the training pictures that are on white, in their own colours
SHOWN = 8


def read_emojis(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the emojis that train and those that are held out, uint8 (N, 4, 64, 64) with their transparency."""
    pictures = {True: [], False: []}
    for path in sorted(folder.glob('*.png')):
        pixels = np.asarray(Image.open(path).convert('RGBA').resize((SIDE, SIDE)))
        emoji = TONES.sub('', path.stem)
        is_held_out = int(hashlib.sha256(emoji.encode()).hexdigest(), 16) % HELD_OUT == 0
        pictures[is_held_out].append(torch.from_numpy(pixels.transpose(2, 0, 1).copy()))
    if not pictures[False] or not pictures[True]:
        raise SystemExit(f'tiny_vae.py: {folder} has too few PNGs')
    return torch.stack(pictures[False]), torch.stack(pictures[True])


def on_background(emojis: torch.Tensor, background: torch.Tensor | float) -> torch.Tensor:
    """Return pictures from 0 to 1, (B, 3, 64, 64), of emojis uint8 (B, 4, 64, 64) on a background."""
    emojis = emojis / 255
    colours, opacity = emojis[:, :3], emojis[:, 3:]
    return colours * opacity + background * (1 - opacity)


def drawn_backgrounds(number: int, generator: torch.Generator) -> torch.Tensor:
    """Return noise that is smooth at a scale of 2 to 16 points a side, from 0 to 1, (B, 3, 64, 64)."""
    points = 2 ** int(torch.randint(1, 5, (), generator=generator))
    noise = torch.rand(number, 3, points, points, generator=generator)
    return F.interpolate(noise, size=(SIDE, SIDE), mode='bilinear', align_corners=True)


def draw_batch(emojis: torch.Tensor, number: int, side: int, generator: torch.Generator) -> torch.Tensor:
    """Return pictures for the training, from -1 to 1, (B, 3, side, side)."""
    def choose(below: int, size: int = number) -> torch.Tensor:
        return torch.randint(below, (size,), generator=generator)

    plain = round(number * AS_THEY_ARE)
    pictures = on_background(emojis[choose(len(emojis))], 1.0)
    # The rest: two emojis, moved apart, on a drawn background, with their colours mixed up.
    scene = drawn_backgrounds(number - plain, generator)
    for _ in range(2):
        shift = [int(step) - SIDE // 2 for step in choose(SIDE, 2)]
        others = emojis[choose(len(emojis), number - plain)].roll(shift, dims=(2, 3))
        scene = on_background(others, scene)
    pictures[plain:] = scene[:, torch.randperm(3, generator=generator)]
    if torch.rand((), generator=generator) < 0.5:
        pictures = pictures.flip(3)
    # A crop in one place for the whole batch.
    top, left = [int(place) for place in choose(SIDE - side + 1, 2)]
    return pictures[:, :, top:top + side, left:left + side] * 2 - 1


def reconstruction_loss(output: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
    """Return the errors of numbers, absolute and squared, and of differences to their neighbours, which are edges."""
    loss = F.l1_loss(output, pictures) + F.mse_loss(output, pictures)
    for axis in (2, 3):
        loss = loss + 0.5 * F.l1_loss(output.diff(dim=axis), pictures.diff(dim=axis))
    return loss


def train(vae: AutoencoderKL, emojis: torch.Tensor, batches: int) -> None:
    """Train in two phases: most batches are crops, which cost less, and the last ones are whole pictures."""
    generator = torch.Generator().manual_seed(17)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=batches, pct_start=0.03)
    start = time.perf_counter()
    batch = 0
    for side, number, share in PHASES:
        last = batches if side == SIDE else round(batches * share)
        while batch < last:
            pictures = draw_batch(emojis, number, side, generator)
            posterior = vae.encode(pictures).latent_dist
            output = vae.decode(posterior.sample(generator)).sample
            divergence = posterior.kl().sum() / posterior.mean.numel()
            loss = reconstruction_loss(output, pictures) + KL_WEIGHT * divergence
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            batch += 1
            if batch % 100 == 0:
                print(f'batch {batch} of {batches}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s, '
                      f'{time.process_time():.0f} s of CPU', flush=True)


class Discriminator(torch.nn.Sequential):
    """Says of each place of pictures (B, 3, H, W) how real it looks, (B, 1, H/4, W/4)."""

    def __init__(self, channels: int = 24):
        super().__init__(
            spectral_norm(torch.nn.Conv2d(3, channels, 4, 2, 1)), torch.nn.LeakyReLU(0.2),
            spectral_norm(torch.nn.Conv2d(channels, 2 * channels, 4, 2, 1)), torch.nn.LeakyReLU(0.2),
            spectral_norm(torch.nn.Conv2d(2 * channels, 4 * channels, 3, 1, 1)), torch.nn.LeakyReLU(0.2),
            spectral_norm(torch.nn.Conv2d(4 * channels, 1, 3, 1, 1)))

    def features(self, pictures: torch.Tensor) -> list[torch.Tensor]:
        """Return what comes out of each layer; the last is how real each place looks."""
        outputs = [pictures]
        for layer in self:
            outputs.append(layer(outputs[-1]))
        return [*outputs[2:-1:2], outputs[-1]]  # behind each activation


def sharpen(vae: AutoencoderKL, emojis: torch.Tensor, batches: int) -> None:
    """Train the decoder alone, by the errors of pictures, how real a discriminator finds them, and its features."""
    generator = torch.Generator().manual_seed(18)
    weights = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    discriminator = Discriminator()
    optimizer = torch.optim.AdamW(weights, **SHARPENING)
    optimizer_of_discriminator = torch.optim.AdamW(discriminator.parameters(), **SHARPENING)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, SHARPENING['lr'], total_steps=batches, pct_start=0.05)
    for batch in range(1, batches + 1):
        # the decoder
        pictures = draw_batch(emojis, SHARPENING_NUMBER, SIDE, generator)
        discriminator.requires_grad_(False)
        with torch.no_grad():
            latents = vae.encode(pictures).latent_dist.sample(generator)
            *real, _ = discriminator.features(pictures)
        output = vae.decode(latents).sample
        *features, realness = discriminator.features(output)
        errors = sum(F.l1_loss(feature, wanted) for feature, wanted in zip(features, real, strict=True))
        loss = reconstruction_loss(output, pictures) - ADVERSARIAL_WEIGHT * realness.mean() + FEATURES_WEIGHT * errors
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()

        # the discriminator
        discriminator.requires_grad_(True)
        hinge = F.relu(1 - discriminator(pictures)).mean() + F.relu(1 + discriminator(output.detach())).mean()
        optimizer_of_discriminator.zero_grad()
        hinge.backward()
        optimizer_of_discriminator.step()
        if batch % 100 == 0:
            print(f'batch {batch} of {batches}, the decoder: loss {loss.item():.3f}, {hinge.item():.2f} of the '
                  f'discriminator, {time.process_time():.0f} s of CPU', flush=True)


@torch.no_grad()
def reconstruct(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Return pictures (N, 3, H, W) from 0 to 1 after the VAE, by the mean of each latent."""
    parts = []
    for part in pictures.split(32):
        latents = vae.encode(part * 2 - 1).latent_dist.mean
        parts.append((vae.decode(latents).sample / 2 + 0.5).clamp(0, 1))
    return torch.cat(parts)


@torch.no_grad()
def normalize_latents(vae: AutoencoderKL, emojis: torch.Tensor) -> None:
    """Change the weights so that over these emojis each channel of the scaled latents has mean 0 and variance 1.

    The two convolutions next to the latents have kernels of 1 x 1: a shift and a scale of the latents go into them, and
    what the VAE decodes stays as it was.
    """
    parts = []
    for part in emojis.split(32):
        posterior = vae.encode(on_background(part, 1.0) * 2 - 1).latent_dist
        parts.append(posterior.sample())
    latents = torch.cat(parts).transpose(0, 1).flatten(1)  # (4, N * H/8 * W/8)
    mean = latents.mean(1)
    scale = latents.std(1) * vae.config.scaling_factor  # the new latents are (old - mean) / scale
    channels = len(mean)
    encoder, decoder = vae.quant_conv, vae.post_quant_conv
    encoder.weight[:channels] /= scale[:, None, None, None]
    encoder.bias[:channels] = (encoder.bias[:channels] - mean) / scale
    encoder.bias[channels:] -= 2 * scale.log()  # of the log variance
    decoder.bias += decoder.weight[:, :, 0, 0] @ mean
    decoder.weight *= scale[None, :, None, None]


def psnr(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio of each picture in dB, (N,), of pictures from 0 to 1, (N, 3, H, W)."""
    return -10 * torch.log10((before - after).square().mean(dim=(1, 2, 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('emojis', type=Path, help='folder of PNGs')
    parser.add_argument('figure', type=Path, help='PNG of held-out pictures, before and after')
    parser.add_argument('--batches', type=int, default=3000)
    parser.add_argument('--sharpening_batches', type=int, default=4000)
    parser.add_argument('--out', type=Path, default=BUILT_IN['tiny'] / 'vae/diffusion_pytorch_model.safetensors',
                        help='file for the weights')
    args = parser.parse_args()

    # the weights
    emojis, held_out = read_emojis(args.emojis)
    torch.manual_seed(17)
    vae = build_vae(find_model('tiny'), 'fp32').requires_grad_(True)
    train(vae, emojis, args.batches)
    normalize_latents(vae, emojis)
    sharpen(vae, emojis, args.sharpening_batches)
    save_file(vae.half().state_dict(), args.out, {'format': 'pt'})

    # how well they reconstruct what they have not seen
    before = on_background(held_out, 1.0)
    after = reconstruct(vae.float(), before)
    each = psnr(before, after)
    step = len(before) // SHOWN
    shown = torch.cat([before[step // 2::step][:SHOWN], after[step // 2::step][:SHOWN]])
    save_image(make_grid(shown, SHOWN, padding=4, pad_value=1), args.figure)
    print(json.dumps({'training': len(emojis), 'held_out': len(held_out), 'psnr_mean_db': round(each.mean().item(), 2),
                      'psnr_10th_percentile_db': round(each.quantile(0.1).item(), 2),
                      'psnr_90th_percentile_db': round(each.quantile(0.9).item(), 2)}))


if __name__ == '__main__':
    main()
