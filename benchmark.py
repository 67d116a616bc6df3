"""Measure how fast Stable Diffusion 2 trains here, and what training it from scratch would cost.

    composer benchmark.py --use_ema --use_synth_data --device_train_microbatch_size 4
    composer benchmark.py --use_ema --remote s3://my-bucket/laion/mds --device_train_microbatch_size 4
    python benchmark.py --use_ema --use_synth_data --model_name tiny --image_size 64 --batch_size 4
"""
from cli.early_checks import answer_early, refuse_early_training
from cli.options import benchmark_parser
from fitting.allocator import let_segments_grow

if __name__ == '__main__':
    let_segments_grow()
    answer_early(benchmark_parser(__doc__), refuse_early_training)  # before the imports, which take seconds

import argparse
import contextlib
import sys
from functools import cached_property

import torch
import torch.nn.functional as F
from composer import Algorithm, Callback, ComposerModel, Evaluator, Trainer
from composer.callbacks import SpeedMonitor
from composer.core import DataSpec
from composer.utils import dist, get_device
from diffusers import DDPMScheduler, UNet2DConditionModel
from tokenizers import Tokenizer
from torchmetrics import MeanSquaredError

from cli.checks import refuse_bad_training, refuse_more_ranks_than_gpus, warn_of_what_comes_too_late
from cli.defaults import agree_on_workers, fill_in_training_defaults
from cli.launcher import end_with_launcher
from cli.options import Parser
from data import (
    SyntheticImageCaptionDataset,
    build_held_out_loader,
    build_loader,
    normalize,
    open_dataset,
    say_what_an_epoch_leaves_out,
)
from ema import EMA
from fitting.dry_run import dry_run
from fitting.fake_step import has_no_values
from fitting.memory import build_outline, refuse_too_little_memory
from fitting.microbatch import largest_microbatch
from fitting.switches import apply_switches, process_switches, switch_callbacks
from inputs.captions import build_tokenizer
from inputs.errors import DataError, one_line
from inputs.held_out import NOISE, TIMESTEP, HeldOutSamples
from inputs.shards import (
    LATENTS,
    index_hash,
    number_of_samples,
    read_index,
    require_cache_for,
    require_columns,
    require_same_origin,
)
from measuring.measurement import Measurement, loader_figures
from measuring.record import keep, redacted, training_settings
from measuring.tracing import build_profiler, tracing_callbacks
from models.flops import flops_of_an_image, peak_tflops
from models.latents import draw_latents, origin_of_latents, vae_moments
from models.loading import SD2_BASE, ModelFiles, build_text_encoder, build_vae, find_model
from training.augmentation import CaptionDrop, RandomFlip
from training.checkpoints import WholeCheckpoints, leave_out_empty_scaler, newest_checkpoint, tensors_alone_are_loaded
from training.evaluation import LABEL, METRIC, Evaluations, PatientTrainer
from training.initial_weights import load_initial_weights
from training.loggers import build_loggers
from training.optimization import FiniteGradientClipping, build_schedule
from training.progress import Progress
from training.ranks import join_ranks
from training.run import Run, RunFailed, conclude, say_how_it_begins, train
from training.safeguard import DATASET, Safeguard
from training.sampling import Sampling

SAME_ON_RESUME = ('model_name', 'image_size', 'batch_size', 'remote', 'use_synth_data', 'use_synth_latents', 'use_ema',
                  'seed', 'tokenizer', 'learning_rate', 'lr_warmup', 'lr_schedule', 'weight_decay', 'clip_grad_norm',
                  'ema_half_life', 'ema_start', 'caption_drop', 'random_flip')

MOST_BRIGHTNESS = 1.5  # of images in [-1, 1] that a bicubic filter has resized; CLIP's own scaling goes to 2.1


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
        self.range_was_checked = False  # of the images
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
        self.encoders_attention = contextlib.nullcontext  # makes a context that the frozen encoders run in

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
        and `image` float (B, 3, H, W) in [-1, 1] or uint8, or the VAE's `moments` float16 (B, 8, H/8, W/8). In an
        evaluation the batch brings its draws along: `noise` float32 (B, 8, H/8, W/8) and `timestep` int64 (B,).

        ValueError: the images are far outside [-1, 1], or whole numbers of another type.
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
            image = normalize(batch)['image']  # (B, 3, H, W) in [-1, 1]
            self.refuse_other_range(image)
            with self.encoder_autocast(image.device.type), self.encoders_attention():
                moments = vae_moments(self.vae, image)  # (B, 8, H/8, W/8)
        noise = batch[NOISE][:, :4] if NOISE in batch else None  # (B, 4, H/8, W/8)
        return draw_latents(moments, self.scaling_factor, noise), self.text_states(batch['caption'])

    def refuse_other_range(self, image: torch.Tensor) -> None:
        """ValueError: images (B, 3, H, W) are far outside [-1, 1], as where they were scaled in another way.

        On a GPU only the first batch is looked at: to look is to wait for the device.
        """
        if self.range_was_checked or has_no_values(image):
            return
        self.range_was_checked = image.device.type != 'cpu'
        least, most = (float(bound) for bound in image.aminmax())
        if not -MOST_BRIGHTNESS <= least <= most <= MOST_BRIGHTNESS:
            raise ValueError(f'images have values from {least:g} to {most:g}; give floats in [-1, 1], or bytes (uint8)')

    @torch.no_grad()
    def text_states(self, caption: torch.Tensor) -> torch.Tensor:
        """States of the text encoder, float32 (B, 77, D), for token ids int64 (B, 77)."""
        with self.encoder_autocast(caption.device.type), self.encoders_attention():
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
    args.index_hash = index_hash(index)
    require_columns(args.remote, index)
    require_cache_for(args.remote, index, args.cache_limit)
    if 'latents' in index:  # images are of no VAE, whose weights take seconds to hash
        require_same_origin(args.remote, index, origin_of_latents(files, args.image_size))
    samples = number_of_samples(index)
    if samples < args.batch_size:
        raise ValueError(f'--remote {args.remote} holds {samples} samples, fewer than --batch_size {args.batch_size}; '
                         f'{batch_for(samples, args)}')
    if args.random_flip and 'latents' in index:
        raise ValueError(f'--random_flip mirrors images, and --remote {args.remote} holds latents; leave it out')
    tokenizer = build_fitting_tokenizer(args, files)
    dataset = open_dataset(args.remote, args.local, image_size=args.image_size, index=index,
                           cache_limit=args.cache_limit, batch_size=device_batch, shuffle=True, shuffle_seed=args.seed)
    if not args.loader_only:
        say_what_an_epoch_leaves_out(samples, args.batch_size)
    return build_loader(dataset, device_batch, args.num_workers, tokenizer, args.max_bad_samples)


def batch_for(samples: int, args: argparse.Namespace) -> str:
    """What to do where there are only so many samples."""
    devices = dist.get_world_size()
    multiple = devices
    microbatch = args.device_train_microbatch_size
    if isinstance(microbatch, int) and microbatch < args.batch_size // devices:
        multiple = devices * microbatch
    largest = samples // multiple * multiple
    if largest == 0:
        return 'use more samples'
    return f'use --batch_size {largest}'


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
    images = open_dataset(args.eval_remote, None, flag, image_size=args.image_size, index=index, batch_size=1)
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
    if args.random_flip:
        algorithms.append(RandomFlip(args.seed))
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
    resumed = contextlib.nullcontext()
    if args.autoresume:
        resumed = newest_checkpoint(args.save_folder)
    with resumed as load_path:
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
        return start_run(args, model, files, data, algorithms, evaluator, load_path)


def start_run(args: argparse.Namespace, model: StableDiffusion, files: ModelFiles, data: DataSpec,
              algorithms: list[Algorithm], evaluator: Evaluator | None, load_path: str | None) -> Run:
    """The training of a model, at its start or at the checkpoint `load_path`. ValueError: that does not fit it."""
    measurement = Measurement(args.warmup_batches, args.measure_batches)
    safeguard = Safeguard(args.seed, args.on_nan, flags_to_keep(args))
    evaluations = Evaluations()
    progress = Progress()
    callbacks = [measurement, progress, safeguard, *tracing_callbacks(args), evaluations]
    if args.sample_prompts:
        ema = next((algorithm for algorithm in algorithms if isinstance(algorithm, EMA)), None)
        callbacks.append(Sampling(args, model, files, measurement, ema))
    try:
        trainer = build_trainer(args, model, data, callbacks, algorithms, evaluator, load_path)
    except (RuntimeError, KeyError, ValueError) as error:
        if not load_path:
            raise
        raise ValueError(f'--save_folder {args.save_folder}: {load_path} does not fit this run '
                         f'({one_line(error)[:300]}); resume with the flags it was made with') from None
    flops_per_image = sum(model.flops_per_image.values())
    warn_of_what_comes_too_late(args, trainer.state)
    say_how_it_begins(args, trainer.state, load_path)
    return Run(args, model, data, trainer, flops_per_image, measurement, safeguard, progress, evaluations)


def flags_to_keep(args: argparse.Namespace) -> dict:
    """What must be the same when the run resumes, without passwords: flags, and of a dataset the hash of its index."""
    flags = {}
    for flag in SAME_ON_RESUME:
        value = getattr(args, flag)
        flags[flag] = redacted(value) if isinstance(value, str) else value
    if args.remote:
        flags[DATASET] = args.index_hash
    return flags


def build_trainer(args: argparse.Namespace, model: StableDiffusion, data: DataSpec, callbacks: list[Callback],
                  algorithms: list[Algorithm], evaluator: Evaluator | None = None,
                  load_path: str | None = None) -> Trainer:
    """Composer's Trainer, at its start or at the checkpoint `load_path`."""
    window = min(10, args.measure_batches or 10)
    peak_flops = (peak_tflops(args.precision) or 0) * 1e12
    savers = []
    if args.save_folder:
        savers.append(WholeCheckpoints(args.save_folder, args.save_interval, args.save_num_checkpoints_to_keep))
    with tensors_alone_are_loaded():
        return PatientTrainer(
            model=model,
            train_dataloader=data,
            optimizers=build_optimizer(model, args),
            schedulers=build_schedule(args),
            algorithms=algorithms,
            callbacks=[*switch_callbacks(args), SpeedMonitor(window, peak_flops), *callbacks, *savers],
            eval_dataloader=evaluator,
            progress_bar=False,
            loggers=build_loggers(training_settings(args, model.vae is None), args.tensorboard, args.wandb_name,
                                  args.wandb_project),
            max_duration=args.max_duration,
            precision=args.precision,
            device_train_microbatch_size=args.device_train_microbatch_size,
            load_path=load_path,
            load_ignore_keys=leave_out_empty_scaler,
            seed=args.seed,
            dist_timeout=args.dist_timeout,
            profiler=build_profiler(args),
        )


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
            find_model(args.model_name, args.pretrained)  # says what is wrong with it
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
        return conclude(run, outcome)
    except RunFailed as error:
        parser.error(str(error))
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
