"""Measure how fast Stable Diffusion 2 trains here, and what training it from scratch would cost.

    composer benchmark.py --use_ema --use_synth_data --device_train_microbatch_size 4
    composer benchmark.py --use_ema --remote s3://my-bucket/laion/mds --device_train_microbatch_size 4
    python benchmark.py --use_ema --use_synth_data --model_name tiny --image_size 64 --batch_size 4
"""
from settings.allocator import let_segments_grow
from settings.ends import end, end_with_launcher, one_line_errors
from settings.flags import parse
from settings.train import Train

PROGRAM = 'benchmark.py'

if __name__ == '__main__':
    let_segments_grow()
    parse(Train, __doc__)  # a mistake is answered before the imports, which take seconds

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from composer import Algorithm, Callback, Evaluator, Trainer
from composer.callbacks import SpeedMonitor
from composer.core import DataSpec
from composer.utils import dist, get_device
from diffusers import DDPMScheduler, UNet2DConditionModel
from tokenizers import Tokenizer
from torchmetrics import MeanSquaredError

from data import (
    StreamingLAIONDataset,
    SyntheticImageCaptionDataset,
    build_held_out_loader,
    build_loader,
    normalize,
)
from ema import EMA
from fitting import (
    apply_switches,
    build_outline,
    dry_run,
    gradients_in_buckets,
    has_no_values,
    largest_microbatch,
    process_switches,
    refuse_too_little_memory,
    switch_callbacks,
)
from inputs.captions import build_tokenizer
from inputs.errors import one_line
from inputs.held_out import NOISE, TIMESTEP, HeldOutSamples
from inputs.places import number_of_samples
from inputs.shards import LATENTS, read_index, require_columns, require_same_origin
from inputs.words import counted
from measuring.measurement import Measurement, loader_figures
from measuring.record import caution_sentence, keep, redacted, training_settings
from measuring.tracing import build_profiler
from models.diffusion_model import DiffusionModel
from models.flops import flops_of_an_image, peak_tflops
from models.latents import draw_latents, origin_of_latents, vae_moments
from models.loading import SD2_BASE, ModelFiles, build_text_encoder, build_vae, find_model
from settings.here import on_this_machine
from training.augmentation import CaptionDrop, RandomFlip
from training.checkpoints import (
    WholeCheckpoints,
    leave_out_empty_scaler,
    newest_checkpoint,
    refuse_files_of_another_run,
    saving_alone,
    tensors_alone_are_loaded,
)
from training.evaluation import LABEL, METRIC, Evaluations, TolerantTrainer
from training.initial_weights import load_initial_weights
from training.loggers import build_loggers
from training.optimization import build_schedule
from training.progress import Progress
from training.ranks import join_ranks, leave_ranks, on_rank_0
from training.run import Run, RunFailed, conclude, say_how_it_begins, say_what_is_built, train
from training.safeguard import DATASET, Safeguard
from training.sampling import Sampling

SAME_ON_RESUME = ('model_name', 'image_size', 'batch_size', 'remote', 'use_synth_data', 'use_synth_latents', 'use_ema',
                  'seed', 'tokenizer', 'learning_rate', 'lr_warmup', 'lr_schedule', 'weight_decay', 'clip_grad_norm',
                  'ema_half_life', 'ema_start', 'caption_drop', 'random_flip')

MOST_BRIGHTNESS = 1.5  # of images in [-1, 1] that a bicubic filter has resized; CLIP's own scaling goes to 2.1


class StableDiffusion(DiffusionModel):
    """Stable Diffusion for training: the UNet learns, the VAE and the CLIP text encoder are frozen.

    Args:
        model_name: a built-in architecture (random weights: they do not change the speed), a local diffusers folder, or
            a hub name.
        image_size: height and width in pixels, a multiple of 8.
        pretrained: load the weights of the VAE and the text encoder from `model_name`; the UNet always starts anew.
        encoder_precision: 'bf16' or 'fp16' holds the frozen encoders in it; 'fp32' leaves them to autocast.
        latents: train on the VAE's moments, as encode.py stores them; the VAE is not made at all.
        files: of `model_name`, where they have been found already.

    Raises ValueError if the model is not there, or its scheduler predicts neither epsilon nor v_prediction.
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

        Raises ValueError if the images are far outside [-1, 1], or whole numbers of another type.
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
        """Raises ValueError if images (B, 3, H, W) are far outside [-1, 1], as where they were scaled in another way.

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


def build_data(settings: Train, files: ModelFiles) -> DataSpec:
    """The loader of --remote, which holds images or latents, or of synthetic data.

    Raises ValueError if the remote or the tokenizer is not there or does not fit the model.
    """
    image_size = settings.image_size
    seed = settings.seed
    device_batch = settings.batch_size // dist.get_world_size()
    if not settings.remote:
        dataset = SyntheticImageCaptionDataset(image_size, num_samples=max(100_000, settings.batch_size),
                                               vocab_size=files.vocab_size, seed=seed + dist.get_global_rank(),
                                               latents=settings.use_synth_latents)
        return build_loader(dataset, device_batch, num_workers=0)
    index = read_index(settings.remote)
    require_columns(settings.remote, index)
    if 'latents' in index:  # images are of no VAE, whose weights take seconds to hash
        require_same_origin(settings.remote, index, origin_of_latents(files, image_size))
    samples = number_of_samples(index)
    if samples < settings.batch_size:
        raise ValueError(f'--remote {settings.remote} holds {counted(samples, "sample")}, fewer than --batch_size '
                         f'{settings.batch_size}; use a smaller batch')
    if settings.random_flip and 'latents' in index:
        raise ValueError(f'--random_flip mirrors images, and --remote {settings.remote} holds latents; leave it out')
    tokenizer = build_fitting_tokenizer(settings.tokenizer, files)
    dataset = StreamingLAIONDataset(settings.remote, settings.local, image_size=image_size, index=index,
                                    cache_limit=settings.cache_limit, batch_size=device_batch, shuffle=True,
                                    shuffle_seed=seed)
    return build_loader(dataset, device_batch, settings.num_workers, tokenizer, settings.max_bad_samples)


def build_fitting_tokenizer(name: str | None, files: ModelFiles) -> Tokenizer:
    """The tokenizer of --tokenizer. Raises ValueError if there is none, or if the text encoder lacks its tokens."""
    tokenizer = build_tokenizer(name)
    if tokenizer.get_vocab_size() > files.vocab_size:
        raise ValueError(f'--tokenizer {name} has {tokenizer.get_vocab_size()} tokens, more than the '
                         f'{files.vocab_size} of the text encoder of --model_name {files.name}')
    return tokenizer


def open_held_out(remote: str, files: ModelFiles, image_size: int, seed: int, latents: bool) -> HeldOutSamples:
    """The samples of --eval_remote. Raises ValueError if it is not there, or does not fit the model.

    Args:
        remote: the value of the flag.
        files: of the model.
        image_size: that is trained at, in pixels.
        seed: of the samples' noise and timesteps.
        latents: whether the training is on latents, so that its model has no VAE.
    """
    flag = '--eval_remote'
    index = read_index(remote, flag)
    require_columns(remote, index, flag)
    if 'latents' in index:
        require_same_origin(remote, index, origin_of_latents(files, image_size), flag)
    if number_of_samples(index) == 0:
        raise ValueError(f'{flag} {remote} holds no samples')
    if latents and 'latents' not in index:
        raise ValueError(f'{flag} {remote} holds images, and the training is on latents, without a VAE; encode it, too')
    images = StreamingLAIONDataset(remote, image_size=image_size, index=index, batch_size=1)
    timesteps = files.configs['scheduler'].get('num_train_timesteps', 1000)
    return HeldOutSamples(images, image_size, timesteps, seed)


def build_evaluator(settings: Train, files: ModelFiles, held_out: HeldOutSamples, microbatch: int) -> Evaluator:
    """The evaluation of a run, in batches of its microbatch."""
    tokenizer = build_fitting_tokenizer(settings.tokenizer, files)
    loader = build_held_out_loader(held_out, microbatch, tokenizer, settings.max_bad_samples)
    return Evaluator(label=LABEL, dataloader=loader, eval_interval=settings.eval_interval,
                     device_eval_microbatch_size=microbatch)


def build_model(settings: Train, latents: bool, device: torch.device | None = None,
                files: ModelFiles | None = None) -> StableDiffusion:
    """The model with its switches, its weights drawn from the seed on `device`, by default the one that trains them."""
    torch.manual_seed(settings.seed)
    with device or torch.device(get_device()._device):
        model = StableDiffusion(settings.model_name, settings.image_size, settings.pretrained,
                                settings.encoder_precision, latents, files)
    apply_switches(model, settings)
    return model


def build_optimizer(model: StableDiffusion, settings: Train) -> torch.optim.Optimizer:
    """AdamW over the UNet alone: the frozen encoders need no optimizer."""
    return torch.optim.AdamW(model.unet.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay,
                             fused=settings.fused_optimizer)


def build_algorithms(settings: Train, files: ModelFiles | None = None,
                     average: dict | None = None) -> list[Algorithm]:
    """What changes a batch or the weights' average; `average` is the state of one to go on with."""
    seed = settings.seed
    algorithms = []
    if settings.caption_drop:
        tokenizer = build_fitting_tokenizer(settings.tokenizer, files)
        empty_caption = torch.tensor(tokenizer.encode('').ids)  # (77,)
        algorithms.append(CaptionDrop(settings.caption_drop, seed, empty_caption))
    if settings.random_flip:
        algorithms.append(RandomFlip(seed))
    if settings.use_ema:
        ema_start = settings.ema_start
        ema = EMA(settings.ema_half_life, ema_start=ema_start or '0ba')
        if average and not ema_start:
            ema.load_state_dict(average)
        algorithms.append(ema)
    return algorithms


def build_run(settings: Train, data: DataSpec, files: ModelFiles | None = None,
              callbacks: Sequence[Callback] = ()) -> Run:
    """The training, at its start or at the checkpoint to resume from.

    Args:
        settings: of the run.
        data: what it trains on.
        files: of the model, if they are found already.
        callbacks: more for Composer's Trainer; they come before the run's own.

    Raises ValueError if it cannot be built as asked.
    """
    files = files or find_model(settings.model_name, settings.pretrained)
    latents = data.dataloader.dataset.latents
    held_out = None
    if settings.eval_remote:
        held_out = open_held_out(settings.eval_remote, files, settings.image_size, settings.seed, latents)
    resumed = contextlib.nullcontext()
    if settings.autoresume:
        resumed = newest_checkpoint(settings.save_folder)
    with resumed as load_path:
        model = build_model(settings, latents, None, files)
        average = None
        if settings.load_weights and not load_path:
            average = load_initial_weights(settings.load_weights, model)
        algorithms = build_algorithms(settings, files, average)
        microbatch = find_microbatch(settings, model, data)
        evaluator = None
        if held_out is not None:
            evaluator = build_evaluator(settings, files, held_out, microbatch)
        return start_run(settings, model, files, data, algorithms, evaluator, load_path, microbatch, callbacks)


def find_microbatch(settings: Train, model: StableDiffusion, data: DataSpec) -> int:
    """Images that go through the model at once: as asked for, or found. Raises ValueError if not even one fits."""
    if not settings.searches_microbatch:
        return settings.device_train_microbatch_size
    share = settings.batch_size // dist.get_world_size()
    microbatch = largest_microbatch(model, data, share, settings.precision, settings.use_ema)
    model.range_was_checked = False  # of blank images; the first batch of the run is still to be looked at
    if dist.get_global_rank() == 0:
        found = f'{counted(microbatch, "image")} at once: the largest power of two that fits'
        print(found, file=sys.stderr, flush=True)
    return microbatch


def start_run(settings: Train, model: StableDiffusion, files: ModelFiles, data: DataSpec,
              algorithms: list[Algorithm], evaluator: Evaluator | None, load_path: str | None, microbatch: int,
              callbacks: Sequence[Callback] = ()) -> Run:
    """The training of a model, at its start or at the checkpoint `load_path`. Raises ValueError if that does not fit.
    """
    measurement = Measurement(settings.warmup_batches, settings.measure_batches)
    safeguard = Safeguard(settings.seed, settings.on_nan, flags_to_keep(settings, data), settings.clip_grad_norm)
    evaluations = Evaluations()
    progress = Progress(measurement)
    callbacks = [*callbacks, measurement, progress, safeguard, evaluations]
    if settings.sample_prompts:
        ema = next((algorithm for algorithm in algorithms if isinstance(algorithm, EMA)), None)
        callbacks.append(Sampling(settings, model, files, measurement, ema))
    try:
        trainer = build_trainer(settings, model, data, callbacks, algorithms, evaluator, load_path, microbatch)
    except (RuntimeError, KeyError, ValueError) as error:
        if not load_path:
            raise
        raise ValueError(f'--save_folder {settings.save_folder}: {load_path} does not fit this run '
                         f'({one_line(error)[:300]}); resume with the flags it was made with') from None
    run = Run(settings, model, data, trainer, measurement, safeguard, progress, evaluations)
    if not run.is_over:
        say_how_it_begins(settings, trainer.state, load_path)
    return run


def flags_to_keep(settings: Train, data: DataSpec) -> dict:
    """What must be the same when the run resumes, without passwords: flags, and of a dataset the hash of its index."""
    values = dataclasses.asdict(settings)
    flags = {}
    for flag in SAME_ON_RESUME:
        value = values[flag]
        flags[flag] = redacted(value) if isinstance(value, str) else value
    if settings.remote:
        flags[DATASET] = data.dataloader.dataset.index_hash
    return flags


def build_trainer(settings: Train, model: StableDiffusion, data: DataSpec, callbacks: list[Callback],
                  algorithms: list[Algorithm], evaluator: Evaluator | None = None, load_path: str | None = None,
                  microbatch: int | None = None) -> Trainer:
    """Composer's Trainer, at its start or at the checkpoint `load_path`; None is the microbatch of the settings."""
    microbatch = microbatch or settings.device_train_microbatch_size
    window = min(10, settings.measure_batches or 10)
    peak_flops = (peak_tflops(settings.precision) or 0) * 1e12
    savers = []
    if settings.save_folder:
        savers.append(WholeCheckpoints(settings.save_folder, settings.save_interval,
                                       settings.save_num_checkpoints_to_keep))
    is_one_microbatch = microbatch == settings.batch_size // dist.get_world_size()
    with tensors_alone_are_loaded(), gradients_in_buckets(is_one_microbatch):
        return TolerantTrainer(
            model=model,
            train_dataloader=data,
            optimizers=build_optimizer(model, settings),
            schedulers=build_schedule(settings.lr_schedule, settings.lr_warmup),
            algorithms=algorithms,
            callbacks=[*switch_callbacks(settings), SpeedMonitor(window, peak_flops), *callbacks, *savers],
            eval_dataloader=evaluator,
            progress_bar=False,
            loggers=build_loggers(training_settings(settings, model.vae is None, microbatch),
                                  settings.tensorboard, settings.wandb_name, settings.wandb_project),
            max_duration=settings.max_duration,
            precision=settings.precision,
            device_train_microbatch_size=microbatch,
            load_path=load_path,
            load_ignore_keys=leave_out_empty_scaler,
            seed=settings.seed,
            dist_timeout=settings.dist_timeout,
            profiler=build_profiler(settings),
        )


def measure_loader(settings: Train, data: DataSpec) -> dict:
    """The record of --loader_only, which is also kept and printed."""
    record = training_settings(settings, data.dataloader.dataset.latents) | {'status': 'complete'}
    record |= loader_figures(data, settings.warmup_batches, settings.measure_batches)
    text = f'loader {record["loader_images_per_sec"]:.4g} images/s'
    caution = caution_sentence(record)
    if caution:
        text += f'\ncaution: {caution}'
    return keep(record, text, settings.results)


def train_and_record(settings: Train, callbacks: Sequence[Callback]) -> dict:
    """Build and train, or measure the loader; returns the record."""
    files = find_model(settings.model_name, settings.pretrained)
    data = build_data(settings, files)
    if settings.loader_only:
        return measure_loader(settings, data)
    outline = build_outline(settings, files, data.dataloader.dataset.latents, build_model)
    refuse_too_little_memory(settings, outline)
    say_what_is_built(settings)
    run = build_run(settings, data, files, callbacks)
    if run.is_over:
        if dist.get_global_rank() == 0:
            print(f'--save_folder {settings.save_folder} holds all of --max_duration {settings.max_duration}: nothing '
                  'left to do')
        sys.exit(0)
    try:
        return conclude(run, train(run))
    except RunFailed as error:
        end(PROGRAM, 1, str(error))
    finally:
        run.safeguard.release_signals()


def main(argv: list[str] | None = None, callbacks: Sequence[Callback] = ()) -> dict:
    """Run the benchmark, with more callbacks for Composer's Trainer if there are any; returns its record."""
    end_with_launcher()
    with one_line_errors(PROGRAM):
        settings = on_this_machine(parse(Train, __doc__, argv, PROGRAM))
        if settings.dry_run is not None:
            return dry_run(settings, build_model)
        join_ranks(get_device(), settings.dist_timeout)
        if settings.save_folder and not settings.autoresume:
            on_rank_0(partial(refuse_files_of_another_run, settings.save_folder))
        with saving_alone(settings.save_folder), process_switches(settings):
            return train_and_record(settings, callbacks)


if __name__ == '__main__':
    main()
    leave_ranks()
