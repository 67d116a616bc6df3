"""Measure how fast Stable Diffusion 2 trains here, and what training it from scratch would cost.

    composer benchmark.py --use_ema --use_synth_data --device_train_microbatch_size 4
    composer benchmark.py --use_ema --remote s3://my-bucket/laion/mds --device_train_microbatch_size 4
    composer -n 1 benchmark.py --use_ema --use_synth_data --model_name tiny --image_size 64 --batch_size 4
"""
import argparse
import contextlib
import datetime
import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import traceback
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from composer import Callback, ComposerModel, Time, Trainer
from composer.callbacks import CheckpointSaver, SpeedMonitor
from composer.core import DataSpec, TimeUnit
from composer.loggers import TensorboardLogger, WandBLogger
from composer.optim import ConstantScheduler
from composer.utils import dist, get_device
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from streaming.base.util import bytes_to_int
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import MeanSquaredError
from transformers import CLIPTextConfig, CLIPTextModel

from harness.costs import DOLLARS_PER_GPU_HOUR, TRAINING_IMAGES, days_to_train, gpu_hours
from data import (CLIP_VOCABULARY, LATENT_COLUMNS, LATENTS, MDS_COLUMNS, DataError, StreamingLAIONDataset,
                  SyntheticImageCaptionDataset, build_loader, build_tokenizer, local_folder, one_line, read_index)
from ema import EMA
from safeguard import (NonFiniteLoss, Safeguard, checkpoints, end_with_launcher, ignore_signals, newest_checkpoint,
                       save_interrupted)

SD2_BASE = 'stabilityai/stable-diffusion-2-base'
NOISE_SCHEDULE = dict(num_train_timesteps=1000, beta_schedule='scaled_linear', beta_start=0.00085, beta_end=0.012,
                      prediction_type='epsilon', clip_sample=False)
# Only what differs from the classes' own defaults.
ARCHITECTURES = {
    SD2_BASE: {
        'unet': dict(sample_size=64, block_out_channels=(320, 640, 1280, 1280), cross_attention_dim=1024,
                     # diffusers calls it attention_head_dim; for this UNet it is the number of heads per stage
                     attention_head_dim=(5, 10, 20, 20), use_linear_projection=True),
        'vae': dict(block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4, sample_size=768,
                    down_block_types=('DownEncoderBlock2D',) * 4, up_block_types=('UpDecoderBlock2D',) * 4),
        'text_encoder': dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16,
                             hidden_act='gelu'),
        'scheduler': NOISE_SCHEDULE,
    },
    'tiny': {
        'unet': dict(sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=64,
                     attention_head_dim=(2, 4), norm_num_groups=8, use_linear_projection=True,
                     down_block_types=('CrossAttnDownBlock2D', 'DownBlock2D'),
                     up_block_types=('UpBlock2D', 'CrossAttnUpBlock2D')),
        'vae': dict(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4, sample_size=64,
                    down_block_types=('DownEncoderBlock2D',) * 4, up_block_types=('UpDecoderBlock2D',) * 4),
        'text_encoder': dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2),
        'scheduler': NOISE_SCHEDULE,
    },
}
# Dense TFLOP/s in bf16 and fp16, by torch's exact device name: another card of the family has another peak.
PEAK_TFLOPS = {'NVIDIA A100-SXM4-40GB': 312, 'NVIDIA A100-SXM4-80GB': 312, 'NVIDIA A100-PCIE-40GB': 312,
               'NVIDIA A100 80GB PCIe': 312, 'NVIDIA H100 80GB HBM3': 989, 'NVIDIA H200': 989, 'NVIDIA B200': 2250}
HALF = {'amp_bf16': 'bf16', 'amp_fp16': 'fp16', 'fp32': 'fp32'}
DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
SAME_ON_RESUME = ('model_name', 'image_size', 'batch_size', 'remote', 'use_synth_data', 'use_synth_latents', 'use_ema',
                  'seed')
SCALING_FACTOR = 0.18215  # brings the latents to unit variance, where the VAE's configuration is silent
GIB = 2 ** 30


class StableDiffusion(ComposerModel):
    """Stable Diffusion for training: the UNet learns, the VAE and the CLIP text encoder are frozen.

    Args:
        model_name: one of ARCHITECTURES (random weights: they do not change the speed), a local diffusers folder, or a
            hub name.
        image_size: height and width in pixels, a multiple of 8.
        pretrained: load the weights of the VAE and the text encoder from `model_name`; the UNet always starts anew.
        encoder_precision: 'bf16' or 'fp16' holds the frozen encoders in it; 'fp32' leaves them to autocast.
        latents: train on the VAE's moments, as encode.py stores them; the VAE is not made at all.

    ValueError: the model is not there, or its scheduler predicts neither epsilon nor v_prediction.
    """

    def __init__(self, model_name: str = SD2_BASE, image_size: int = 512, pretrained: bool = False,
                 encoder_precision: str = 'fp32', latents: bool = False):
        super().__init__()
        self.image_size = image_size
        configs, folder = load_configs(model_name, pretrained)
        self.scaling_factor = configs['vae'].get('scaling_factor', SCALING_FACTOR)
        self.scheduler = DDPMScheduler.from_config(configs['scheduler'])
        self.prediction_type = self.scheduler.config.prediction_type
        if self.prediction_type not in ('epsilon', 'v_prediction'):
            raise ValueError(f'--model_name {model_name} has a scheduler with prediction_type {self.prediction_type}; '
                             'only epsilon and v_prediction can be trained here')
        self.unet = UNet2DConditionModel.from_config(configs['unet'])
        self.vae = None if latents else build_vae(configs, folder, encoder_precision)
        if folder:
            self.text_encoder = CLIPTextModel.from_pretrained(folder / 'text_encoder', use_safetensors=True)
        else:
            self.text_encoder = CLIPTextModel(CLIPTextConfig(**configs['text_encoder']))
        torch.nn.Module.to(self.text_encoder.requires_grad_(False).eval(), DTYPES[encoder_precision])

    def train(self, mode: bool = True) -> 'StableDiffusion':
        """Training mode for the UNet; the frozen encoders stay in eval mode."""
        super().train(mode)
        for encoder in filter(None, (self.vae, self.text_encoder)):
            encoder.eval()
        return self

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prediction and target, each float (B, 4, H/8, W/8), of a batch on the model's device: `caption` int64 (B, 77)
        and `image` float (B, 3, H, W) in [-1, 1], or the VAE's `moments` float16 (B, 8, H/8, W/8).
        """
        latents, text = self.encode(batch)  # (B, 4, H/8, W/8), (B, 77, D)
        noise = torch.randn_like(latents)
        timesteps = torch.randint(len(self.scheduler), (len(latents),), device=latents.device)
        noised = self.scheduler.add_noise(latents, noise, timesteps)
        target = noise if self.prediction_type == 'epsilon' else self.scheduler.get_velocity(latents, noise, timesteps)
        return self.unet(noised, timesteps, text).sample, target

    @torch.no_grad()
    def encode(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents float32 (B, 4, H/8, W/8), of unit variance, and text states float32 (B, 77, D)."""
        device = batch['caption'].device.type
        autocast = torch.is_autocast_enabled(device) and self.text_encoder.dtype == torch.float32
        with torch.autocast(device, enabled=autocast):
            moments = batch[LATENTS] if LATENTS in batch else vae_moments(self.vae, batch['image'])
            text = self.text_encoder(batch['caption'])[0]
        # the VAE's own layout, which stored moments have lost: random draws follow it
        moments = moments.to(torch.float32, memory_format=torch.channels_last)
        latents = DiagonalGaussianDistribution(moments).sample() * self.scaling_factor
        return latents, text.float()

    def loss(self, outputs: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Mean squared error, in float32."""
        prediction, target = outputs
        return F.mse_loss(prediction.float(), target)

    def get_metrics(self, is_train: bool) -> dict:
        return {} if is_train else {'MeanSquaredError': MeanSquaredError()}

    def update_metric(self, batch, outputs: tuple[torch.Tensor, torch.Tensor], metric) -> None:
        prediction, target = outputs
        metric.update(prediction.float().flatten(), target.flatten())

    @cached_property
    def flops_per_image(self) -> dict[str, int]:
        """FLOPs (1 multiply-add = 2) of an image: UNet forward and backward, VAE encode, text; counted on no data."""
        latent_side = self.image_size // 8
        with torch.device('meta'):
            unet = UNet2DConditionModel.from_config(self.unet.config)
            text_encoder = CLIPTextModel(self.text_encoder.config)
            latents = torch.empty(1, self.unet.config.in_channels, latent_side, latent_side)
            caption = torch.empty(1, self.text_encoder.config.max_position_embeddings, dtype=torch.long)
            timestep = torch.empty(1, dtype=torch.long)
        with torch.no_grad():
            text_flops, output = count_flops(lambda: text_encoder(caption))
        unet_flops, _ = count_flops(lambda: unet(latents, timestep, output[0]).sample.sum().backward())
        vae_flops = vae_flops_per_image(self.vae, self.image_size) if self.vae else 0
        return {'unet': unet_flops, 'vae': vae_flops, 'text_encoder': text_flops}

    def flops_per_batch(self, batch: dict[str, torch.Tensor]) -> int:
        """FLOPs of a training batch at `image_size`, whatever size it is stored at. Composer's MFU comes from this."""
        return len(batch['caption']) * sum(self.flops_per_image.values())


def build_vae(configs: dict[str, dict], folder: Path | None, precision: str) -> AutoencoderKL:
    """The frozen VAE, with the weights of `folder` or, without one, random ones."""
    vae = AutoencoderKL.from_pretrained(folder / 'vae', use_safetensors=True) if folder else \
        AutoencoderKL.from_config(configs['vae'])
    return torch.nn.Module.to(vae.requires_grad_(False).eval(), DTYPES[precision])


def vae_moments(vae: AutoencoderKL, image: torch.Tensor) -> torch.Tensor:
    """Mean and log variance of the posterior (B, 8, H/8, W/8) of images (B, 3, H, W) in [-1, 1]."""
    return vae.encode(image.to(vae.dtype)).latent_dist.parameters


def vae_flops_per_image(vae: AutoencoderKL, image_size: int) -> int:
    """FLOPs (1 multiply-add = 2) of the VAE's encoder, counted on no data."""
    with torch.device('meta'), torch.no_grad():
        meta_vae, image = AutoencoderKL.from_config(vae.config), torch.empty(1, 3, image_size, image_size)
        return count_flops(lambda: meta_vae.encode(image))[0]


def count_flops(run):
    """FLOPs of a call by torch's own counter, and what the call returned."""
    with FlopCounterMode(display=False) as counter:
        result = run()
    return counter.get_total_flops(), result


def load_configs(model_name: str, pretrained: bool = False) -> tuple[dict[str, dict], Path | None]:
    """The configurations of a model by part, and the folder of its weights. ValueError: there is no such model."""
    if model_name in ARCHITECTURES and not pretrained:
        return ARCHITECTURES[model_name], None
    weights = ['vae/diffusion_pytorch_model.safetensors', 'text_encoder/model.safetensors'] if pretrained else []
    files = {'unet': 'config.json', 'vae': 'config.json', 'text_encoder': 'config.json',
             'scheduler': 'scheduler_config.json'}
    folder = local_folder('--model_name', model_name, [*map('/'.join, files.items()), *weights])
    try:
        configs = {part: dict(json.loads((folder / part / name).read_text())) for part, name in files.items()}
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f'--model_name {model_name} is not a diffusers model ({error}); it needs the folders '
                         'unet, vae, text_encoder and scheduler') from None
    if missing := [name for name in weights if not (folder / name).is_file()]:
        raise ValueError(f'--model_name {model_name} lacks {missing[0]}; leave out --pretrained for random weights')
    return configs, folder if pretrained else None


def apply_switches(model: StableDiffusion, args: argparse.Namespace) -> None:
    """Train the same model faster or in less memory. ValueError: xformers is not built for this torch or this GPU."""
    convolutional = list(filter(None, (model.unet, model.vae)))  # no VAE where it trains on latents
    if args.channels_last:
        for part in convolutional:
            part.to(memory_format=torch.channels_last)
    if args.attention == 'xformers':
        try:
            for part in convolutional:
                part.enable_xformers_memory_efficient_attention()
        except Exception as error:  # diffusers tries it once on the GPU, and passes on whatever xformers raises
            raise ValueError(f'--attention xformers does not work here ({one_line(error)}); use sdpa') from None
    if args.gradient_checkpointing:
        model.unet.enable_gradient_checkpointing()
    if args.compile:  # in place, so that the names in checkpoints stay
        for part in convolutional:
            getattr(part, 'encoder', part).compile(dynamic=False)  # of the VAE only that


class Measurement(Callback):
    """Wall clock of up to `measure_batches` after the warm-up, and of the wait for their data, on this rank.

    Composer reads the loss on the CPU before BATCH_END, so that the device has finished the batch by then. The warm-up
    counts from where the run starts or resumes.
    """

    def __init__(self, warmup_batches: int, measure_batches: int):
        self.warmup_batches, self.last_batch = warmup_batches, warmup_batches + measure_batches
        self.batches = 0  # trained by this process
        self.batch_seconds: list[float] = []
        self.wait_seconds: list[float] = []
        self.samples = 0  # of all ranks
        self.loss: float | None = None
        self._asked: float | None = None

    def fit_start(self, state, logger) -> None:
        self._previous_end = time.perf_counter()

    def before_dataloader(self, state, logger) -> None:
        if self._asked is None:  # at an epoch's end the loader is asked twice
            self._asked = time.perf_counter()

    def after_dataloader(self, state, logger) -> None:
        self._waited, self._asked = time.perf_counter() - self._asked, None

    def batch_end(self, state, logger) -> None:
        now = time.perf_counter()
        self.batches += 1
        if self.warmup_batches < self.batches <= self.last_batch:
            self.batch_seconds.append(now - self._previous_end)
            self.wait_seconds.append(self._waited)
            self.samples += state.timestamp.sample.value - state.previous_timestamp.sample.value
            loss = state.total_loss_dict.get('loss/train/total', math.nan)  # Composer keeps none of a step it dropped
            self.loss = loss if math.isfinite(loss) else self.loss
        elif self.batches <= self.warmup_batches and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # the search for a microbatch size fills the memory
        self._previous_end = now


def figures(measurement: Measurement, all_ranks: bool = True, bad_samples: set[int] | frozenset = frozenset()) -> dict:
    """The record's figures; a batch takes as long as on its slowest rank. None where no batch was measured.

    Args:
        measurement: this rank's.
        all_ranks: ask the other ranks for theirs; False where the run broke off and they may be gone.
        bad_samples: those that this rank met.
    """
    own = (measurement.batch_seconds, measurement.wait_seconds, peak_memory_gib(), bad_samples)
    seconds, waits, memory, bad = zip(*(dist.all_gather_object(own) if all_ranks else [own]), strict=True)
    bad_samples = len(set().union(*bad))
    if not measurement.batch_seconds:
        return {'images_per_sec': None, 'measured_batches': 0, 'bad_samples': bad_samples}
    seconds, waits = np.array(seconds), np.array(waits)  # (ranks, batches)
    slowest = seconds.max(axis=0)
    third = len(slowest) // 3
    images_per_sec = measurement.samples / seconds.sum(axis=1).max()
    return {
        'images_per_sec': images_per_sec,
        'images_per_sec_per_device': images_per_sec / dist.get_world_size(),
        'batch_seconds_median': float(np.median(slowest)),
        'batch_seconds_p10': float(np.percentile(slowest, 10)),
        'batch_seconds_p90': float(np.percentile(slowest, 90)),
        'drift': float(slowest[:third].sum() / slowest[-third:].sum() - 1) if third else None,
        'data_wait_fraction': float((waits.sum(axis=1) / seconds.sum(axis=1)).max()),
        'peak_memory_gib': max(memory),
        'measured_batches': len(slowest),
        'bad_samples': bad_samples,
        'loss': measurement.loss,
    }


def loader_figures(data: DataSpec, args: argparse.Namespace) -> dict[str, float]:
    """Throughput of the loader alone, over all ranks: the batches after the warm-up, as fast as they come."""
    epochs = itertools.chain.from_iterable(itertools.repeat(data.dataloader))  # one after the other
    batches = map(data.batch_transforms, epochs)
    for _ in range(args.warmup_batches):
        next(batches)
    start = time.perf_counter()
    images = sum(len(next(batches)['caption']) for _ in range(args.measure_batches))
    own = (images, time.perf_counter() - start, data.batch_transforms.found)
    images, seconds, bad = zip(*dist.all_gather_object(own), strict=True)
    images_per_sec = sum(images) / max(seconds)
    return {'loader_images_per_sec': images_per_sec, 'measured_batches': args.measure_batches,
            'bad_samples': len(set.union(*bad)),
            'loader_images_per_sec_per_worker': images_per_sec / (len(images) * max(1, args.num_workers))}


def peak_memory_gib() -> float:
    """Most memory this rank took: reserved on its GPU, or resident on the host where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, once: on rank 0, unless another rank is alone in its error."""

    def error(self, message: str):
        rank = dist.get_global_rank()
        if rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how a launcher ends this rank when rank 0 has spoken
            time.sleep(10)
            message = f'rank {rank}: {message}'
        print(f'{self.prog}: error: {message}', file=sys.stderr)
        sys.exit(2)


def number(kind: type, least: float, most: float, name: str):
    """An argparse type: an int or a float from `least` to `most`, which errors call `name`."""
    def parse(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            if least <= kind(text) <= most:
                return kind(text)
        raise argparse.ArgumentTypeError(f'{text} is not {name}')
    return parse


count = number(int, 1, sys.maxsize, 'a whole number above 0')


def shared_parser(prog: str, description: str) -> Parser:
    """A parser with the flags that encode.py takes as well."""
    parser = Parser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add('--image_size', type=count, default=512, help='height and width in pixels (default: 512)')
    add('--remote', help='MDS shards: a folder or an object store, as convert.py or encode.py writes them')
    add('--local', help='folder that caches the shards (default: one for each remote; a local remote is read in place)')
    add('--cache_limit', metavar='SIZE', help='most that this cache may hold, such as 500gb (default: no limit)')
    add('--max_bad_samples', type=number(float, 0, 1, 'between 0 and 1'), default=0.01, help='share of samples that '
        'may be bad before the run ends (default: 0.01)')
    add('--num_workers', type=number(int, 0, sys.maxsize, 'a whole number'), help='processes that decode, per '
        'device (default: up to 8 of its CPU cores)')
    add('--model_name', default=SD2_BASE, help=f'{", ".join(ARCHITECTURES)}, a diffusers folder or a hub name '
        f'(default: {SD2_BASE}, whose architecture is built in)')
    add('--pretrained', action='store_true', help='load the weights of the VAE and the text encoder from --model_name')
    add('--encoder_precision', choices=list(DTYPES), help='of the frozen encoders; in training fp32 leaves them to '
        '--precision (default: the half precision of --precision)')
    add('--channels_last', action=switch, default=torch.cuda.is_available(), help='memory format of the convolutions '
        '(default: on where there is a GPU)')
    add('--compile', action=switch, default=False, help='compile the UNet and the VAE encoder (takes minutes to start)')
    add('--warmup_batches', type=count, default=3, help='batches before the clock starts (default: 3)')
    add('--seed', type=int, default=17, help='of weights, noise and shuffle (default: 17)')
    add('--results', default='results.jsonl', help='file that the record is appended to (default: results.jsonl)')
    add('--dist_timeout', type=count, default=300, help='seconds to wait for the other processes (default: 300)')
    return parser


def build_parser() -> Parser:
    parser = shared_parser('benchmark.py', __doc__)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add('--batch_size', type=count, default=2048, help='images in a step, over all devices (default: 2048)')
    add('--use_synth_data', action='store_true', help='train on random images that cost nothing to load')
    add('--use_synth_latents', action='store_true', help='train on random latents, as if encode.py had made them')
    add('--tokenizer', help="folder or hub name (default: CLIP's own, from the package open_clip_torch)")
    add('--use_ema', action='store_true', help='keep an exponential moving average of the UNet, half-life 1000 batches')
    add('--device_train_microbatch_size', metavar='N', help="images that go through the model at once; must divide the "
        "device's share of the batch (default: auto, Composer's search; on a CPU the whole share)")
    add('--precision', choices=list(HALF), help='of the UNet (default: amp_bf16 on a GPU that has it, amp_fp16 on '
        'another GPU, fp32 on a CPU)')
    add('--attention', choices=['sdpa', 'xformers'], default='sdpa', help="torch's attention, or the package xformers'")
    add('--gradient_checkpointing', action=switch, default=False, help='less memory, about a third more arithmetic')
    add('--fused_optimizer', action=switch, default=True, help='AdamW in one kernel (default: on)')
    add('--loader_only', action='store_true', help='measure the loader alone, without a model')
    add('--measure_batches', type=count, default=20, help='batches measured after the warm-up (default: 20)')
    add('--max_duration', help="length of the run, such as 5000ba or 2ep (default: warm-up and measured batches)")
    add('--on_nan', choices=['stop', 'skip'], default='stop', help='end the run at a loss that is not finite, or skip '
        'that step and count it (default: stop)')
    add('--save_folder', help='save checkpoints to this new folder or object store (default: none are saved)')
    add('--save_interval', default='1ep', help='time between checkpoints, such as 1000ba (default: 1ep); one is also '
        'saved at the end and on Ctrl-C or SIGTERM')
    add('--save_num_checkpoints_to_keep', type=count, metavar='N', help='the newest that stay in a folder (default: '
        'all); an object store keeps all')
    add('--autoresume', action='store_true', help='go on from the newest checkpoint in --save_folder, if there is one')
    add('--wandb_name', help='log to Weights & Biases under this name')
    add('--wandb_project', help='log to this project of Weights & Biases')
    add('--tensorboard', metavar='DIR', help='log to TensorBoard files in this folder')
    add('--training_images', type=count, default=TRAINING_IMAGES, help='images of the whole training, for its '
        f'cost (default: {TRAINING_IMAGES})')
    add('--dollars_per_gpu_hour', type=number(float, 0, sys.float_info.max, 'an amount'), help='price, for the cost '
        '(default: %(default)s)', default=DOLLARS_PER_GPU_HOUR)
    return parser


def check(args: argparse.Namespace) -> None:
    """Fill in what depends on the machine; ValueError, with the flag, its value and the remedy, for what cannot run."""
    gpu, world_size = torch.cuda.is_available(), dist.get_world_size()
    given = sum(map(bool, (args.remote, args.use_synth_data, args.use_synth_latents)))
    if given != 1:
        raise ValueError('give one of --remote, --use_synth_data and --use_synth_latents' + ', not both' * (given > 1))
    if args.batch_size % world_size:
        raise ValueError(f'--batch_size {args.batch_size} does not divide over {world_size} devices; '
                         f'use {args.batch_size // world_size * world_size or world_size}')
    device_batch = args.batch_size // world_size
    microbatch = args.device_train_microbatch_size or ('auto' if gpu else device_batch)
    if microbatch == 'auto' and not gpu:
        raise ValueError('--device_train_microbatch_size auto needs a GPU; give a number')
    if microbatch != 'auto':
        if not str(microbatch).isdecimal() or int(microbatch) == 0 or device_batch % int(microbatch):
            raise ValueError(f'--device_train_microbatch_size {microbatch} does not divide the {device_batch} images '
                             f'that each of {world_size} devices gets of --batch_size {args.batch_size}')
        microbatch = int(microbatch)
    args.device_train_microbatch_size = microbatch
    args.precision = args.precision or best_precision()
    if args.attention == 'xformers' and not (gpu and importlib.util.find_spec('xformers')):
        raise ValueError('--attention xformers needs a GPU and the package xformers; use sdpa')
    check_shared(args, device_batch)
    args.max_duration = args.max_duration or f'{args.warmup_batches + args.measure_batches}ba'
    if args.autoresume and not args.save_folder:
        raise ValueError('--autoresume needs the --save_folder of the run to resume')
    for flag in ('max_duration', 'save_interval'):
        try:
            Time.from_timestring(getattr(args, flag))
        except (ValueError, KeyError):
            raise ValueError(f'--{flag} {getattr(args, flag)} is not a time such as 5000ba or 2ep') from None
    duration = Time.from_timestring(args.max_duration)
    if duration.unit == TimeUnit.BATCH and duration.value <= args.warmup_batches:
        raise ValueError(f'--max_duration {args.max_duration} ends within --warmup_batches {args.warmup_batches}')
    folder = args.save_folder
    if dist.get_global_rank() == 0 and folder and not args.autoresume and (
            stored(checkpoints, folder) if '://' in folder else os.path.isdir(folder) and os.listdir(folder)):
        raise ValueError(f'--save_folder {folder} already holds files; give a new one, or --autoresume to go on from '
                         'there')


def best_precision() -> str:
    """amp_bf16 on a GPU that has it, amp_fp16 on another, fp32 on a CPU."""
    if not torch.cuda.is_available():
        return 'fp32'
    return 'amp_bf16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'amp_fp16'


def check_shared(args: argparse.Namespace, device_batch: int) -> None:
    """`check` for the flags that encode.py takes as well."""
    if torch.cuda.is_available() and dist.get_local_world_size() > torch.cuda.device_count():
        raise ValueError(f'composer -n {dist.get_local_world_size()} is more than the {torch.cuda.device_count()} GPUs '
                         'of this machine')
    if args.image_size % 8:
        raise ValueError(f'--image_size {args.image_size} is not a multiple of 8; use {args.image_size // 8 * 8 or 8}')
    args.encoder_precision = args.encoder_precision or HALF[getattr(args, 'precision', best_precision())]
    fitting = workers_that_fit(device_batch * 3 * args.image_size ** 2)  # uint8, at most of this size
    if args.num_workers is None:
        args.num_workers = min(8, cores_per_rank(), fitting) if args.remote else 0
    if args.num_workers > fitting:
        raise ValueError(f'--num_workers {args.num_workers} may fill the shared memory, /dev/shm, with its batches; '
                         f'use at most {fitting}, or make it larger (docker run --shm-size)')
    if args.cache_limit:
        if not args.remote or (os.path.isdir(args.remote) and not args.local):
            raise ValueError(f'--cache_limit {args.cache_limit} has no cache to bound: --remote {args.remote} is read '
                             'in place; give --local a folder, or leave the limit out')
        try:
            args.cache_limit = bytes_to_int(args.cache_limit)
        except ValueError:
            raise ValueError(f'--cache_limit {args.cache_limit} is not a size such as 500gb') from None
    if dist.get_global_rank() == 0:
        try:
            open(args.results, 'a').close()  # said before the run, not after it
        except OSError as error:
            raise ValueError(f'--results {args.results} cannot be written: {error.strerror}; name another') from None


def stored(function, folder: str):
    """`function(folder)`, with what any storage client raises as one line."""
    try:
        return function(folder)
    except ValueError:
        raise
    except Exception as error:  # every storage client has its own exceptions
        raise ValueError(f'--save_folder {folder} cannot be read ({one_line(error)}); check its name and your '
                         'credentials') from None


def cores_per_rank() -> int:
    return max(1, len(os.sched_getaffinity(0)) // dist.get_local_world_size())


def workers_that_fit(batch_bytes: int) -> int:
    """Workers of each rank whose batches shared memory can hold; where it is full they would die of a bus error."""
    if not os.path.isdir('/dev/shm'):
        return sys.maxsize
    disk = os.statvfs('/dev/shm')
    batches = disk.f_bavail * disk.f_frsize // (dist.get_local_world_size() * batch_bytes)
    return max(0, (batches - 2) // 2)  # each worker prefetches 2, and 2 are in use


def join_ranks(device, timeout: int) -> None:
    """Meet all ranks within `timeout` seconds (ValueError: some did not come), and share the host's cores."""
    if dist.get_local_world_size() > 1 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(cores_per_rank())  # each rank on all cores is 10 times slower on a CPU
    try:
        dist.initialize_dist(device, timeout)
        if hasattr(torch.distributed.distributed_c10d, '_set_pg_timeout'):  # not public: it may go
            # once met, a rank may wait for another that writes 15 GB
            torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=30))
    except (RuntimeError, ValueError) as error:  # torch's DistError and its kinds are RuntimeErrors
        place = f'{os.environ.get("MASTER_ADDR")}:{os.environ.get("MASTER_PORT")}'
        raise ValueError(f'--dist_timeout {timeout}: the {dist.get_world_size()} processes of this run did not meet at '
                         f'{place} ({one_line(error)[:200]}); check that every node runs, and can reach it') from None


def build_data(args: argparse.Namespace, configs: dict[str, dict], folder: Path | None = None) -> DataSpec:
    """The loader of --remote, whose columns say whether it holds images or latents, or of synthetic data.

    ValueError: the remote or the tokenizer is not there or does not fit the model of `configs`.
    """
    device_batch = args.batch_size // dist.get_world_size()
    vocab_size = configs['text_encoder'].get('vocab_size', CLIP_VOCABULARY)
    if not args.remote:
        dataset = SyntheticImageCaptionDataset(args.image_size, max(100_000, args.batch_size), vocab_size,
                                               args.seed + dist.get_global_rank(), args.use_synth_latents)
        return build_loader(dataset, device_batch, num_workers=0)
    index = checked_index(args)
    if stored_latents := index.get('latents'):
        for key, own in latents_of(args.image_size, configs, folder).items():
            if (theirs := stored_latents.get(key)) != own:
                raise ValueError(f'--remote {args.remote} holds latents with {key} {theirs}, and this run has {own}; '
                                 'use the --image_size, --model_name and --pretrained of their encoding')
    samples = sum(shard['samples'] for shard in index['shards'])
    if samples < args.batch_size:
        raise ValueError(f'--remote {args.remote} holds {samples} samples, fewer than --batch_size {args.batch_size}')
    tokenizer = build_tokenizer(args.tokenizer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(f'--tokenizer {args.tokenizer} has {tokenizer.get_vocab_size()} tokens, more than the '
                         f'{vocab_size} of the text encoder of --model_name {args.model_name}')
    dataset = build_dataset(args, batch_size=device_batch, shuffle=True, shuffle_seed=args.seed)
    return build_loader(dataset, device_batch, args.num_workers, tokenizer, args.max_bad_samples)


def checked_index(args: argparse.Namespace) -> dict:
    """The index of --remote. ValueError: it is not there, lacks a column, or --cache_limit is too small for it."""
    index = read_index(args.remote)
    for shard in index['shards']:
        columns = dict(zip(shard['column_names'], shard['column_encodings'], strict=True))
        needed = LATENT_COLUMNS | {LATENTS: columns.get(LATENTS, 'moments')} if 'latents' in index else MDS_COLUMNS
        if missing := sorted(needed.items() - columns.items()):
            raise ValueError(f'--remote {args.remote} lacks the columns {", ".join(map(" of ".join, missing))}; it has '
                             + ', '.join(map(' of '.join, columns.items())))
    least = 4 * max((shard['raw_data']['bytes'] for shard in index['shards']), default=0)  # Streaming refuses less
    if args.cache_limit and args.cache_limit < least:
        raise ValueError(f'--cache_limit {args.cache_limit} holds fewer than 4 shards of --remote {args.remote}; use '
                         f'at least {least}')
    return index


def build_dataset(args: argparse.Namespace, **kwargs) -> StreamingLAIONDataset:
    """The samples of --remote, cached in --local. ValueError: they cannot be had."""
    try:
        return StreamingLAIONDataset(args.remote, args.local, args.image_size, cache_limit=args.cache_limit, **kwargs)
    except ValueError:
        raise
    except Exception as error:  # every storage client has its own exceptions
        raise ValueError(f'--remote {args.remote} could not be opened ({one_line(error)[:300]})') from None


def latents_of(image_size: int, configs: dict[str, dict], folder: Path | None) -> dict:
    """What latents depend on: kept in the index.json beside them, and compared when they are trained on."""
    weights = 'random'
    if folder:
        with open(folder / 'vae' / 'diffusion_pytorch_model.safetensors', 'rb') as file:
            weights = hashlib.file_digest(file, 'sha256').hexdigest()
    return {'image_size': image_size, 'vae_sha256': weights,
            'scaling_factor': configs['vae'].get('scaling_factor', SCALING_FACTOR)}


def build_optimizer(model: StableDiffusion, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW over the UNet alone: the frozen encoders need no optimizer."""
    return torch.optim.AdamW(model.unet.parameters(), lr=1e-4, weight_decay=0.001, fused=args.fused_optimizer)


def build_loggers(args: argparse.Namespace, latents: bool) -> list:
    """Composer's loggers for the flags that are given. ValueError: W&B cannot start."""
    loggers = [TensorboardLogger(log_dir=args.tensorboard)] if args.tensorboard else []
    if args.wandb_name or args.wandb_project:
        import wandb
        flag = f'--wandb_name {args.wandb_name}' if args.wandb_name else f'--wandb_project {args.wandb_project}'
        remedy = 'run `wandb login`, or set WANDB_MODE=offline'
        try:
            if dist.get_global_rank() == 0:  # Composer's logger would raise from the middle of its Trainer
                if os.environ.get('WANDB_MODE', 'online') == 'online' and not wandb.api.api_key:
                    raise ValueError(f'{flag}: not logged in to Weights & Biases; {remedy}')
                wandb.init(project=args.wandb_project, name=args.wandb_name, config=settings(args, latents))
        except wandb.errors.Error as error:
            raise ValueError(f'{flag}: Weights & Biases did not start ({error}); {remedy}') from None
        loggers.append(WandBLogger(project=args.wandb_project, name=args.wandb_name))
    return loggers


def build_trainer(args, model: StableDiffusion, data: DataSpec, measurement: Measurement, safeguard: Safeguard,
                  load_path: str | None = None) -> Trainer:
    """Composer's Trainer, at its start or at the checkpoint `load_path`. ValueError: that is of another run."""
    if args.precision != 'fp32' and not torch.cuda.is_available():
        raise ValueError(f'--precision {args.precision}: Composer trains in fp32 where there is no GPU; use fp32')
    peak = peak_tflops(args.precision)
    in_store = '://' in str(args.save_folder)
    try:
        trainer = Trainer(
            model=model,
            train_dataloader=data,
            optimizers=build_optimizer(model, args),
            schedulers=ConstantScheduler(),
            algorithms=[EMA()] if args.use_ema else [],
            callbacks=[measurement, SpeedMonitor(min(10, args.measure_batches), (peak or 0) * 1e12), safeguard],
            loggers=build_loggers(args, model.vae is None),
            max_duration=args.max_duration,
            precision=args.precision,
            device_train_microbatch_size=args.device_train_microbatch_size,
            save_folder=args.save_folder,
            save_interval=args.save_interval,
            save_latest_filename=None if in_store else 'latest-rank{rank}.pt',  # 30 s of waiting for each in a store
            save_num_checkpoints_to_keep=1 if in_store else args.save_num_checkpoints_to_keep or -1,  # of the host's
            save_ignore_keys=['rng'],  # Safeguard seeds every batch
            save_overwrite=True,  # only files newer than the one resumed from, which a killed run left
            load_path=load_path,
            seed=args.seed,
            dist_timeout=args.dist_timeout,
        )
    except (RuntimeError, KeyError, ValueError) as error:
        if not load_path:
            raise
        print(file=sys.stderr)  # off the progress bar's line
        raise ValueError(f'--save_folder {args.save_folder}: {load_path} does not fit this run '
                         f'({one_line(error)[:300]}); resume with the flags it was made with') from None
    for callback in trainer.state.callbacks:
        if isinstance(callback, CheckpointSaver) and not in_store:
            callback.saved_checkpoints = checkpoints(args.save_folder)  # Composer forgets those of earlier processes
    return trainer


def peak_tflops(precision: str) -> int | None:
    """Dense peak of this GPU; None where it is not known, or for fp32."""
    if precision == 'fp32' or not torch.cuda.is_available():
        return None
    return PEAK_TFLOPS.get(torch.cuda.get_device_name())


def utilization(images_per_sec_per_device: float, flops_per_image: int, precision: str) -> dict:
    """TFLOPs of a device, and their share of its peak; None where that is not known."""
    tflops_per_sec, peak = images_per_sec_per_device * flops_per_image / 1e12, peak_tflops(precision)
    return {'tflops_per_image': flops_per_image / 1e12, 'tflops_per_sec_per_device': tflops_per_sec,
            'mfu': tflops_per_sec / peak if peak else None}


def settings(args: argparse.Namespace, latents: bool = False) -> dict:
    """What explains a record's figures: when, what, where, and every setting that bears on speed."""
    flags = ['pretrained', 'batch_size', 'num_workers', 'warmup_batches', 'seed']
    if not args.loader_only:
        flags += ['device_train_microbatch_size', 'precision', 'encoder_precision', 'use_ema', 'channels_last',
                  'attention', 'compile', 'gradient_checkpointing', 'fused_optimizer', 'max_duration']
    return circumstances('loader' if args.loader_only else 'train', args, flags) | {
        'dataset': 'streaming' if args.remote else 'synthetic',
        'encoders': 'text_in_loop' if latents else 'in_loop',
    }


def circumstances(stage: str, args: argparse.Namespace, flags: list[str]) -> dict:
    """The part of a record that a training shares with an encoding."""
    return {
        'stage': stage,
        'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'command': redacted(shlex.join(sys.argv)),
        'git_commit': git_commit(),
        'device': torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        'num_devices': dist.get_world_size(),
        'num_nodes': dist.get_world_size() // dist.get_local_world_size(),
        **{flag: getattr(args, flag) for flag in ['model_name', 'image_size', *flags]},
        'versions': versions(),
    }


def redacted(command: str) -> str:
    """A command without the passwords and signatures that URLs can carry."""
    return re.sub(r"\?[^\s']*=[^\s']*", '?***', re.sub(r'://[^/@\s]+@', '://***@', command))


def git_commit() -> str | None:
    """Commit of this program, marked where files differ from it; None outside a git checkout."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*'], check=True,
                              cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


def cpu_name() -> str:
    """The processor's model name, or its architecture where Linux does not say."""
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        return next(line.split(':', 1)[1].strip() for line in lines if line.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Python, CUDA and the libraries that bear on speed; None where one is not installed."""
    found = {'python': platform.python_version(), 'cuda': torch.version.cuda}
    for package in ('torch', 'mosaicml', 'mosaicml-streaming', 'diffusers', 'transformers', 'xformers'):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def summary(record: dict, num_images: int, dollars_per_gpu_hour: float) -> str:
    """The record for people; three significant digits or whole units."""
    speed, devices = record['images_per_sec'], record['num_devices']
    if not speed:
        return (f'no batch was measured: the run was {record["status"]} within --warmup_batches '
                f'{record["warmup_batches"]}')
    days, hours = days_to_train(speed, num_images), gpu_hours(speed, devices, num_images)
    rows = {
        'images/s': f'{speed:.4g} on {devices} x {record["device"]}, {record["images_per_sec_per_device"]:.4g} each',
        'batch': f'{record["batch_seconds_median"]:.3g} s median of {record["measured_batches"]}, 10th to 90th '
                 f'percentile {record["batch_seconds_p10"]:.3g} to {record["batch_seconds_p90"]:.3g} s',
        'drift': '-' if record['drift'] is None else f'{record["drift"]:+.1%} from the first to the last third',
        'wait for data': f'{record["data_wait_fraction"]:.1%} of the time',
        'peak memory': f'{record["peak_memory_gib"]:.3g} GiB, microbatch {record["device_train_microbatch_size"]}',
        'arithmetic': f'{record["tflops_per_sec_per_device"]:.3g} TFLOP/s each, '
                      + (f'{record["mfu"]:.1%} of the peak' if record['mfu'] else 'peak of this device not known'),
        'full training': f'training on {num_images:,} images would take {days:,.1f} days on '
                         + (f'these {devices} GPUs' if devices > 1 else 'this GPU')
                         + f', {hours:,.0f} GPU-hours, ${hours * dollars_per_gpu_hour:,.0f}',
    }
    return '\n'.join(f'{name:<15} {text}' for name, text in rows.items())


def fit(trainer: Trainer, safeguard: Safeguard) -> dict[str, str]:
    """Train; returns how it ended: complete, interrupted (Ctrl-C or SIGTERM) or failed, with the error in one line."""
    outcome = {'status': 'complete'}
    try:
        trainer.fit()
    except (SystemExit, KeyboardInterrupt):
        outcome = {'status': 'interrupted'}
    except Exception as error:  # of an interrupted run where a worker or a rank was faster to go
        outcome = {'status': 'interrupted'} if safeguard.interrupted else \
            {'status': 'failed', 'error': reason(error, microbatch_flag(trainer))}
    ignore_signals()  # what follows is short, and must be whole
    if outcome['status'] != 'complete' and (theirs := failure_of_ranks(outcome.get('error'))):
        outcome = {'status': 'failed', 'error': theirs}
    return outcome


def microbatch_flag(trainer: Trainer) -> str:
    return f'--device_train_microbatch_size {trainer.state.device_train_microbatch_size}'


def reason(error: Exception, batch_flag: str) -> str:
    """Why a run failed, in one line, with the remedy where it is known; else the traceback is printed as well."""
    text = one_line(error)
    if isinstance(error, (DataError, NonFiniteLoss, ResultsError)):
        return text
    if isinstance(error, torch.OutOfMemoryError) or re.search("out of memory|can't allocate memory", text):
        return f'out of memory at {batch_flag}; use a smaller one, a smaller --image_size, or, in training, ' \
               '--gradient_checkpointing'
    causes = [error]
    while causes[-1].__context__:
        causes.append(causes[-1].__context__)
    if any(getattr(cause, 'errno', None) == errno.ENOSPC for cause in causes):  # torch raises another on top
        return 'a disk is full: free some of it, or keep less with --save_num_checkpoints_to_keep'
    traceback.print_exc()
    return f'{type(error).__name__}: {text[:500]}'


def wait_for_rank_0() -> None:
    """Until rank 0 has kept what there is to keep, or is gone."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = torch.distributed.distributed_c10d._get_default_store()
        if dist.get_global_rank():
            store.wait(['kept'], datetime.timedelta(minutes=10))
        else:
            store.set('kept', '')


def failure_of_ranks(own: str | None) -> str | None:
    """On rank 0, why another rank failed, if one did; on others, leave word for rank 0, which may see only silence."""
    if not torch.distributed.is_initialized():
        return None
    store, rank = torch.distributed.distributed_c10d._get_default_store(), dist.get_global_rank()
    with contextlib.suppress(RuntimeError):  # the store went with its host
        if rank and own:
            store.set('failure', f'rank {rank}: {own}')
        elif not rank and store.check(['failure']):
            return store.get('failure').decode()


class ResultsError(ValueError):
    """The record could not be kept."""


def append(line: str, path: str) -> None:
    """Add a line to a file, whole also when others do so at once. ResultsError: it could not be."""
    try:
        with open(path, 'a+b', buffering=0) as file:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            cut = file.read(1) not in (b'', b'\n')  # a full disk may have cut the last line
            file.write(b'\n' * cut + line.encode() + b'\n')
    except OSError as error:
        raise ResultsError(f'--results {path} could not be written: {error.strerror}; see the record above') from None


def finish(record: dict, text: str, path: str, save=None) -> dict:
    """On rank 0: append the record to `path`, call `save`, then print the summary and, last, the record."""
    if dist.get_global_rank() == 0:
        line = json.dumps(record)
        try:
            append(line, path)
        finally:
            try:
                if save:
                    save()
            finally:
                with contextlib.suppress(OSError):  # a pipe's reader may have died of the same Ctrl-C
                    print(text, line, sep='\n', flush=True)
    return record


def main(argv: list[str] | None = None) -> dict:
    """Run the benchmark; returns its record."""
    end_with_launcher()
    parser = build_parser()
    args = parser.parse_args(argv)
    device = get_device()
    try:
        check(args)
        join_ranks(device, args.dist_timeout)
        load_path = stored(newest_checkpoint, args.save_folder) if args.autoresume else None
        data = build_data(args, *load_configs(args.model_name, args.pretrained))
        latents = data.dataloader.dataset.latents
        if args.loader_only:
            record = settings(args, latents) | {'status': 'complete'} | loader_figures(data, args)
            return finish(record, f'loader {record["loader_images_per_sec"]:.4g} images/s', args.results)
        torch.manual_seed(args.seed)
        with torch.device(device._device):  # weights are made where they are used
            model = StableDiffusion(args.model_name, args.image_size, args.pretrained, args.encoder_precision, latents)
        apply_switches(model, args)
        measurement = Measurement(args.warmup_batches, args.measure_batches)
        safeguard = Safeguard(args.seed, args.on_nan, {flag: getattr(args, flag) for flag in SAME_ON_RESUME})
        trainer = build_trainer(args, model, data, measurement, safeguard, load_path)
    except (ValueError, DataError) as error:
        parser.error(one_line(error))
    if trainer.state.timestamp >= trainer.state.max_duration:
        print(f'--save_folder {args.save_folder} holds all of --max_duration {args.max_duration}: nothing left to do')
        sys.exit(0)
    try:
        return conclude(fit(trainer, safeguard), parser, args, trainer, model, data, measurement, safeguard)
    finally:
        safeguard.release_signals()


def conclude(outcome: dict, parser: Parser, args, trainer: Trainer, model: StableDiffusion, data: DataSpec,
             measurement: Measurement, safeguard: Safeguard) -> dict:
    """Make and keep the record of a run that ended as `outcome` says; where it did not complete, end the process."""
    complete = outcome['status'] == 'complete'
    args.device_train_microbatch_size = trainer.state.device_train_microbatch_size  # what auto found
    record = settings(args, model.vae is None) | outcome | figures(measurement, complete, data.batch_transforms.found)
    if record['images_per_sec']:
        flops_per_image = sum(model.flops_per_image.values())
        record |= utilization(record['images_per_sec_per_device'], flops_per_image, args.precision)
    record |= {'first_batch': safeguard.first_batch, 'skipped_batches': safeguard.skipped_batches}
    if (args.wandb_name or args.wandb_project) and dist.get_global_rank() == 0:
        import wandb
        wandb.run.summary.update(record)
    save = None
    if outcome['status'] == 'interrupted' and args.save_folder and measurement.batches and not safeguard.updating:
        save = partial(save_interrupted, trainer.state, args.save_folder)
    try:
        if complete:
            trainer.close()
        finish(record, summary(record, args.training_images, args.dollars_per_gpu_hour), args.results, save)
    except Exception as error:
        parser.error(reason(error, microbatch_flag(trainer)))
    if outcome['status'] == 'interrupted' or dist.get_global_rank() == 0:
        wait_for_rank_0()  # a launcher ends all ranks 30 s after the first
    if outcome['status'] == 'interrupted':
        sys.exit(130)
    if not complete:
        print(file=sys.stderr)  # off the progress bar's line
        parser.error(f'the run failed at batch {trainer.state.timestamp.batch.value + 1}: {outcome["error"]}')
    return record


if __name__ == '__main__':
    main()
