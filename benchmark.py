"""Measure how fast Stable Diffusion 2 trains here, and what training it from scratch would cost.

    composer benchmark.py --use_ema --use_synth_data --device_train_microbatch_size 4
    composer benchmark.py --use_ema --remote s3://my-bucket/laion/mds --device_train_microbatch_size 4
    python benchmark.py --use_ema --use_synth_data --model_name tiny --image_size 64 --batch_size 4
"""
from harness.allocator import let_segments_grow
from harness.options import benchmark_parser

if __name__ == '__main__':
    benchmark_parser(__doc__).parse_args()  # a typo is answered before the imports, which take seconds
    let_segments_grow()

import argparse
import sys
from functools import cached_property

import torch
import torch.nn.functional as F
from composer import Algorithm, Callback, ComposerModel, Evaluator, Trainer
from composer.callbacks import CheckpointSaver, SpeedMonitor
from composer.core import DataSpec
from composer.utils import dist, get_device
from diffusers import DDPMScheduler, UNet2DConditionModel
from tokenizers import Tokenizer
from torchmetrics import MeanSquaredError

from data import SyntheticImageCaptionDataset, build_held_out_loader, build_loader, open_dataset
from ema import EMA
from harness.caption_drop import CaptionDrop
from harness.checkpoints import checkpoints, from_storage, newest_checkpoint
from harness.dry_run import dry_run
from harness.evaluation import LABEL, METRIC, Evaluations
from harness.initial_weights import load_initial_weights
from harness.launcher import end_with_launcher
from harness.loggers import build_loggers
from harness.measurement import Measurement, loader_figures
from harness.memory import build_outline, refuse_too_little_memory
from harness.microbatch import largest_microbatch
from harness.optimization import FiniteGradientClipping, build_schedule
from harness.options import Parser
from harness.preflight import (agree_on_workers, fill_in_training_defaults, refuse_bad_training,
                               refuse_more_ranks_than_gpus)
from harness.progress import Progress
from harness.ranks import join_ranks
from harness.record import keep, training_settings
from harness.run import Run, conclude, say_how_it_begins, train
from harness.safeguard import Safeguard
from harness.sampling import Sampling
from harness.switches import apply_switches, process_switches, switch_callbacks
from harness.tracing import build_profiler, tracing_callbacks
from inputs.captions import build_tokenizer
from inputs.errors import DataError, one_line
from inputs.held_out import NOISE, TIMESTEP, HeldOutSamples
from inputs.shards import (LATENTS, number_of_samples, read_index, require_cache_for, require_columns,
                           require_same_origin)
from models.flops import flops_of_an_image, peak_tflops
from models.latents import draw_latents, origin_of_latents, vae_moments
from models.loading import SD2_BASE, ModelFiles, build_text_encoder, build_vae, find_model

SAME_ON_RESUME = ('model_name', 'image_size', 'batch_size', 'remote', 'use_synth_data', 'use_synth_latents', 'use_ema',
                  'seed', 'tokenizer', 'learning_rate', 'lr_warmup', 'weight_decay', 'clip_grad_norm', 'ema_half_life',
                  'ema_start', 'caption_drop')


class StableDiffusion(ComposerModel):
    """Stable Diffusion for training: the UNet learns, the VAE and the CLIP text encoder are frozen.

    Args:
        model_name: a built-in architecture (random weights: they do not change the speed), a local diffusers folder, or
            a hub name.
        image_size: height and width in pixels, a multiple of 8.
        pretrained: load the weights of the VAE and the text encoder from `model_name`; the UNet always starts anew.
        encoder_precision: 'bf16' or 'fp16' holds the frozen encoders in it; 'fp32' leaves them to autocast.
        latents: train on the VAE's moments, as encode.py stores them; the VAE is not made at all.
        files: of `model_name`, where they have been found already.

    ValueError: the model is not there, or its scheduler predicts neither epsilon nor v_prediction.
    """

    def __init__(self, model_name: str = SD2_BASE, image_size: int = 512, pretrained: bool = False,
                 encoder_precision: str = 'fp32', latents: bool = False, files: ModelFiles | None = None):
        super().__init__()
        self.image_size = image_size
        files = files or find_model(model_name, pretrained)
        self.scaling_factor = files.scaling_factor
        with torch.device('cpu'):  # its small tables go where they are used
            self.scheduler = DDPMScheduler.from_config(files.configs['scheduler'])
        self.prediction_type = self.scheduler.config.prediction_type
        if self.prediction_type not in ('epsilon', 'v_prediction'):
            raise ValueError(f'--model_name {model_name} has a scheduler with prediction_type {self.prediction_type}; '
                             'only epsilon and v_prediction can be trained here')
        self.unet = UNet2DConditionModel.from_config(files.configs['unet'])
        self.vae = None
        if not latents:
            self.vae = build_vae(files, encoder_precision)
        self.text_encoder = build_text_encoder(files, encoder_precision)

    @property
    def noise_scheduler(self) -> DDPMScheduler:
        """The scheduler, by the name that the original gave it."""
        return self.scheduler

    def train(self, mode: bool = True) -> 'StableDiffusion':
        """Training mode for the UNet; the frozen encoders stay in eval mode."""
        super().train(mode)
        self.text_encoder.eval()
        if self.vae is not None:
            self.vae.eval()
        return self

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prediction and target, each float (B, 4, H/8, W/8), of a batch on the model's device: `caption` int64 (B, 77)
        and `image` float (B, 3, H, W) in [-1, 1], or the VAE's `moments` float16 (B, 8, H/8, W/8). In an evaluation
        the batch brings its draws along: `noise` float32 (B, 8, H/8, W/8) and `timestep` int64 (B,).
        """
        latents, text = self.encode(batch)  # (B, 4, H/8, W/8), (B, 77, D)
        if NOISE in batch:
            noise = batch[NOISE][:, 4:]  # (B, 4, H/8, W/8)
            timesteps = batch[TIMESTEP]  # (B,)
        else:
            noise = torch.randn_like(latents)  # (B, 4, H/8, W/8)
            timesteps = torch.randint(len(self.scheduler), (len(latents),), device=latents.device)  # (B,)
        noised = self.scheduler.add_noise(latents, noise, timesteps)  # (B, 4, H/8, W/8)
        prediction = self.unet(noised, timesteps, text).sample  # (B, 4, H/8, W/8)
        if self.prediction_type == 'epsilon':
            return prediction, noise
        return prediction, self.scheduler.get_velocity(latents, noise, timesteps)

    @torch.no_grad()
    def encode(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents float32 (B, 4, H/8, W/8), of unit variance, and text states float32 (B, 77, D)."""
        if LATENTS in batch:
            moments = batch[LATENTS]
        else:
            with self.encoder_autocast(batch['image'].device.type):
                moments = vae_moments(self.vae, batch['image'])  # (B, 8, H/8, W/8)
        noise = batch[NOISE][:, :4] if NOISE in batch else None  # (B, 4, H/8, W/8)
        return draw_latents(moments, self.scaling_factor, noise), self.text_states(batch['caption'])

    @torch.no_grad()
    def text_states(self, caption: torch.Tensor) -> torch.Tensor:
        """States of the text encoder, float32 (B, 77, D), for token ids int64 (B, 77)."""
        with self.encoder_autocast(caption.device.type):
            return self.text_encoder(caption)[0].float()

    def encoder_autocast(self, device: str) -> torch.autocast:
        """Autocast as it is set, but none for encoders that are held in half precision: they compute in it as they are.
        """
        wanted = torch.is_autocast_enabled(device) and self.text_encoder.dtype == torch.float32
        return torch.autocast(device, enabled=wanted)

    def loss(self, outputs: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Mean squared error, in float32."""
        prediction, target = outputs
        return F.mse_loss(prediction.float(), target)

    def get_metrics(self, is_train: bool) -> dict:
        """What an evaluation measures; training needs nothing but its loss."""
        if is_train:
            return {}
        return {METRIC: MeanSquaredError()}

    def update_metric(self, batch, outputs: tuple[torch.Tensor, torch.Tensor], metric) -> None:
        prediction, target = outputs
        metric.update(prediction.float().flatten(), target.flatten())

    @cached_property
    def flops_per_image(self) -> dict[str, int]:
        """FLOPs (1 multiply-add = 2) of an image: UNet forward and backward, VAE encode, text; counted on no data."""
        vae_config = None if self.vae is None else self.vae.config
        return flops_of_an_image(self.unet.config, self.text_encoder.config, vae_config, self.image_size)

    def flops_per_batch(self, batch: dict[str, torch.Tensor]) -> int:
        """FLOPs of a training batch at `image_size`, whatever size it is stored at. Composer's MFU comes from this."""
        return len(batch['caption']) * sum(self.flops_per_image.values())


def build_data(args: argparse.Namespace, files: ModelFiles) -> DataSpec:
    """The loader of --remote, which holds images or latents, or of synthetic data.

    ValueError: the remote or the tokenizer is not there or does not fit the model.
    """
    device_batch = args.batch_size // dist.get_world_size()
    if not args.remote:
        dataset = SyntheticImageCaptionDataset(args.image_size, num_samples=max(100_000, args.batch_size),
                                               vocab_size=files.vocab_size, seed=args.seed + dist.get_global_rank(),
                                               latents=args.use_synth_latents)
        return build_loader(dataset, device_batch, num_workers=0)
    index = read_index(args.remote)
    require_columns(args.remote, index)
    require_cache_for(args.remote, index, args.cache_limit)
    if 'latents' in index:  # images are of no VAE, whose weights take seconds to hash
        require_same_origin(args.remote, index, origin_of_latents(files, args.image_size))
    samples = number_of_samples(index)
    if samples < args.batch_size:
        raise ValueError(f'--remote {args.remote} holds {samples} samples, fewer than --batch_size {args.batch_size}')
    tokenizer = build_fitting_tokenizer(args, files)
    dataset = open_dataset(args.remote, args.local, image_size=args.image_size, index=index,
                           cache_limit=args.cache_limit, batch_size=device_batch, shuffle=True, shuffle_seed=args.seed)
    return build_loader(dataset, device_batch, args.num_workers, tokenizer, args.max_bad_samples)


def build_fitting_tokenizer(args: argparse.Namespace, files: ModelFiles) -> Tokenizer:
    """The tokenizer of --tokenizer. ValueError: there is none, or it has more tokens than the text encoder."""
    tokenizer = build_tokenizer(args.tokenizer)
    if tokenizer.get_vocab_size() > files.vocab_size:
        raise ValueError(f'--tokenizer {args.tokenizer} has {tokenizer.get_vocab_size()} tokens, more than the '
                         f'{files.vocab_size} of the text encoder of --model_name {args.model_name}')
    return tokenizer


def open_held_out(args: argparse.Namespace, files: ModelFiles, latents: bool) -> HeldOutSamples:
    """The samples of --eval_remote. ValueError: it is not there, or does not fit the model."""
    flag = '--eval_remote'
    index = read_index(args.eval_remote, flag)
    require_columns(args.eval_remote, index, flag)
    if 'latents' in index:
        require_same_origin(args.eval_remote, index, origin_of_latents(files, args.image_size), flag)
    if number_of_samples(index) == 0:
        raise ValueError(f'{flag} {args.eval_remote} holds no samples')
    if latents and 'latents' not in index:
        raise ValueError(f'{flag} {args.eval_remote} holds images, and the training is on latents, without a VAE; '
                         'encode it, too')
    images = open_dataset(args.eval_remote, None, flag, image_size=args.image_size, index=index, batch_size=1,
                          beside_another=bool(args.remote))
    images.captions_as_text = True
    timesteps = files.configs['scheduler'].get('num_train_timesteps', 1000)
    return HeldOutSamples(images, args.image_size, timesteps, args.seed)


def build_evaluator(args: argparse.Namespace, files: ModelFiles, held_out: HeldOutSamples) -> Evaluator:
    """The evaluation of a run, in batches of its microbatch."""
    microbatch = args.device_train_microbatch_size
    loader = build_held_out_loader(held_out, microbatch, build_fitting_tokenizer(args, files), args.max_bad_samples)
    return Evaluator(label=LABEL, dataloader=loader, eval_interval=args.eval_interval,
                     device_eval_microbatch_size=microbatch)


def build_model(args: argparse.Namespace, latents: bool, device: torch.device | None = None,
                files: ModelFiles | None = None) -> StableDiffusion:
    """The model with its switches, its weights drawn from the seed on `device`, by default the one that trains them."""
    torch.manual_seed(args.seed)
    with device or torch.device(get_device()._device):
        model = StableDiffusion(args.model_name, args.image_size, args.pretrained, args.encoder_precision, latents,
                                files)
    apply_switches(model, args)
    return model


def build_optimizer(model: StableDiffusion, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW over the UNet alone: the frozen encoders need no optimizer."""
    return torch.optim.AdamW(model.unet.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay,
                             fused=args.fused_optimizer)


def build_algorithms(args: argparse.Namespace, files: ModelFiles | None = None,
                     average: dict | None = None) -> list[Algorithm]:
    """What changes a batch, its gradients or the weights' average; `average` is the state of one to go on with."""
    algorithms = []
    if args.caption_drop:
        empty_caption = torch.tensor(build_fitting_tokenizer(args, files).encode('').ids)  # (77,)
        algorithms.append(CaptionDrop(args.caption_drop, args.seed, empty_caption))
    if args.clip_grad_norm:
        algorithms.append(FiniteGradientClipping(args.clip_grad_norm))
    if args.use_ema:
        ema = EMA(args.ema_half_life, ema_start=args.ema_start or '0ba')
        if average and not args.ema_start:
            ema.load_state_dict(average)
        algorithms.append(ema)
    return algorithms


def build_run(args: argparse.Namespace, data: DataSpec, files: ModelFiles | None = None) -> Run:
    """The training, at its start or at the checkpoint to resume from; `files` are the model's, if they are found.

    ValueError: it cannot be built as asked.
    """
    files = files or find_model(args.model_name, args.pretrained)
    latents = data.dataloader.dataset.latents
    held_out = None
    if args.eval_remote:
        held_out = open_held_out(args, files, latents)
    load_path = None
    if args.autoresume:
        load_path = from_storage(newest_checkpoint, args.save_folder)
    model = build_model(args, latents, None, files)
    average = None
    if args.load_weights and not load_path:
        average = load_initial_weights(args.load_weights, model)
    algorithms = build_algorithms(args, files, average)
    if args.microbatch_search:
        args.device_train_microbatch_size = largest_microbatch(model, data, args)
    evaluator = None
    if held_out is not None:
        evaluator = build_evaluator(args, files, held_out)
    measurement = Measurement(args.warmup_batches, args.measure_batches)
    safeguard = Safeguard(args.seed, args.on_nan, {flag: getattr(args, flag) for flag in SAME_ON_RESUME})
    evaluations = Evaluations()
    progress = Progress()
    callbacks = [measurement, progress, safeguard, *tracing_callbacks(args), evaluations]
    if args.sample_prompts:
        ema = next((algorithm for algorithm in algorithms if isinstance(algorithm, EMA)), None)
        callbacks.append(Sampling(args, model, measurement, ema))
    try:
        trainer = build_trainer(args, model, data, callbacks, algorithms, evaluator, load_path)
    except (RuntimeError, KeyError, ValueError) as error:
        if not load_path:
            raise
        raise ValueError(f'--save_folder {args.save_folder}: {load_path} does not fit this run '
                         f'({one_line(error)[:300]}); resume with the flags it was made with') from None
    flops_per_image = sum(model.flops_per_image.values())
    say_how_it_begins(args, trainer.state, load_path)
    return Run(args, model, data, trainer, flops_per_image, measurement, safeguard, progress, evaluations)


def build_trainer(args: argparse.Namespace, model: StableDiffusion, data: DataSpec, callbacks: list[Callback],
                  algorithms: list[Algorithm], evaluator: Evaluator | None = None,
                  load_path: str | None = None) -> Trainer:
    """Composer's Trainer, at its start or at the checkpoint `load_path`."""
    window = min(10, args.measure_batches or 10)
    peak_flops = (peak_tflops(args.precision) or 0) * 1e12
    in_store = '://' in str(args.save_folder)
    latest_filename = 'latest-rank{rank}.pt'
    checkpoints_to_keep = args.save_num_checkpoints_to_keep or -1  # all
    if in_store:
        latest_filename = None  # Composer waits 30 s for each in a store
        checkpoints_to_keep = 1  # on the host's disk: the store keeps all
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        optimizers=build_optimizer(model, args),
        schedulers=build_schedule(args),
        algorithms=algorithms,
        callbacks=[*switch_callbacks(args), SpeedMonitor(window, peak_flops), *callbacks],
        eval_dataloader=evaluator,
        progress_bar=False,
        loggers=build_loggers(args, training_settings(args, model.vae is None)),
        max_duration=args.max_duration,
        precision=args.precision,
        device_train_microbatch_size=args.device_train_microbatch_size,
        save_folder=args.save_folder,
        save_interval=args.save_interval,
        save_latest_filename=latest_filename,
        save_num_checkpoints_to_keep=checkpoints_to_keep,
        save_ignore_keys=['rng'],  # Safeguard seeds every batch
        save_overwrite=True,  # files newer than the one resumed from, which a killed run left
        load_path=load_path,
        seed=args.seed,
        dist_timeout=args.dist_timeout,
        profiler=build_profiler(args),
    )
    if not in_store:
        for callback in trainer.state.callbacks:
            if isinstance(callback, CheckpointSaver):
                # Composer forgets those of earlier processes
                callback.saved_checkpoints = checkpoints(args.save_folder)
    return trainer


def measure_loader(args: argparse.Namespace, data: DataSpec) -> dict:
    """The record of --loader_only, which is also kept and printed."""
    record = training_settings(args, data.dataloader.dataset.latents) | {'status': 'complete'}
    record |= loader_figures(data, args.warmup_batches, args.measure_batches)
    return keep(record, f'loader {record["loader_images_per_sec"]:.4g} images/s', args.results)


def run_benchmark(args: argparse.Namespace, parser: Parser) -> dict:
    """Check, build, train and record; returns the record, or with --dry_run the microbatches that fit."""
    try:
        refuse_more_ranks_than_gpus()
        fill_in_training_defaults(args)
        refuse_bad_training(args)
        if args.dry_run is not None:
            return dry_run(args, build_model)
        join_ranks(get_device(), args.dist_timeout)
        agree_on_workers(args)
        files = find_model(args.model_name, args.pretrained)
        data = build_data(args, files)
        if args.loader_only:
            return measure_loader(args, data)
        outline = build_outline(args, files, data.dataloader.dataset.latents, build_model)
        refuse_too_little_memory(args, outline)
        run = build_run(args, data, files)
    except (ValueError, DataError) as error:
        parser.error(one_line(error))
    if run.is_over:
        if dist.get_global_rank() == 0:
            print(f'--save_folder {args.save_folder} holds all of --max_duration {args.max_duration}: nothing left to '
                  'do')
        sys.exit(0)
    try:
        outcome = train(run)
        return conclude(run, outcome, parser)
    finally:
        run.safeguard.release_signals()


def main(argv: list[str] | None = None) -> dict:
    """Run the benchmark; returns its record."""
    end_with_launcher()
    parser = benchmark_parser(__doc__)
    args = parser.parse_args(argv)
    with process_switches(args):
        return run_benchmark(args, parser)


if __name__ == '__main__':
    main()
