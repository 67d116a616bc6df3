r"""Train Stable Diffusion 2 and measure how fast it trains here, or forecast its speed and cost with --dry_run.

    composer benchmark.py @recipes/fastest.txt --use_ema --use_synth_data    # measure all GPUs of this machine
    python benchmark.py --dry_run 8 --gpu H100-80GB --use_ema                # forecast, without a GPU
    composer benchmark.py --remote photos-mds --model_name FOLDER --pretrained --use_ema --caption_drop 0.1 \
        --max_duration 10ep --save_folder checkpoints --autoresume           # train
    python benchmark.py --use_synth_data --model_name tiny --image_size 64 --batch_size 4    # try it on a CPU

The composer launcher starts one process per GPU. Without --max_duration only a short measurement runs.
"""
import sys

from sdbench.flags.parser import answer_early, parse
from sdbench.flags.train import SD2_BASE, Run, Train
from sdbench.process import begin, one_line_errors

PROGRAM = 'benchmark.py'


def answer_dry_run(settings: Train) -> None:
    """Print the forecasts of a dry run and end the process, before the imports below, which take seconds."""
    if settings.dry_run is not None:
        from sdbench.forecast.dry_run import forecast_training  # a training does not need this module
        with one_line_errors(PROGRAM):
            forecast_training(settings)
        sys.exit()


if __name__ == '__main__':
    answer_early(Train, __doc__, answer_dry_run)

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from composer import Algorithm, Callback, ComposerModel, Trainer
from composer.callbacks import LRMonitor
from composer.core import DataSpec, Evaluator
from composer.utils import get_device
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torchmetrics import MeanSquaredError

from data import build_data, build_evaluator, open_held_out
from ema import EMA
from sdbench.complete import complete, index_of_data
from sdbench.inputs.batches import NOISE, TIMESTEP, normalize
from sdbench.inputs.shards import MOMENTS
from sdbench.measuring import measure_loader
from sdbench.models.flops import flops_of_an_image
from sdbench.models.loading import ModelFiles, build_text_encoder, build_unet, build_vae, find_model
from sdbench.models.switches import apply_switches, process_switches, switch_allreduce
from sdbench.training.checkpoints import load_checkpoint, local_copy, locked_save_folder, newest_checkpoint
from sdbench.training.end_of_batch import METRIC, EndOfBatch, Spending
from sdbench.training.loggers import Throughput, Trace, build_loggers
from sdbench.training.microbatch import with_found_microbatch
from sdbench.training.optimization import FiniteSteps, build_schedule, min_snr_weights
from sdbench.training.ranks import destroy_nccl_group, join_ranks, on_rank_0
from sdbench.training.resuming import (
    ExactResume,
    Mismatch,
    add_missing_networks,
    difference_of_models,
    facts_of_model,
    facts_to_keep,
    kept_in,
    omit_networks_of_folder,
    with_kept_defaults,
)
from sdbench.training.run import announce_build, begin_run, finish_run, fit, training_record
from sdbench.training.sampling import Sampling, read_prompts
from sdbench.training.weights import load_initial_weights


class StableDiffusion(ComposerModel):
    """Stable Diffusion for training: the UNet is trained, the VAE and the CLIP text encoder are frozen.

    Args:
        model_name: a built-in architecture (with random weights, which train as fast as trained ones), a local folder
            of diffusers, or a hub name.
        image_size: height and width in pixels, a multiple of 8.
        pretrained: load the weights of the VAE and the text encoder from `model_name`. The UNet always starts with
            random weights.
        encoder_precision: 'bf16' or 'fp16' stores the weights of the frozen encoders in this type; 'fp32' stores them
            in float32 and leaves the rest to autocast.
        latents: train on the VAE's moments, as encode.py stores them. No VAE is built.
        files: the files of `model_name`, if they have been found already.
        snr_gamma: gamma of the Min-SNR loss weights; None gives every image the same weight.

    Raises UserError if the model does not exist or is not a Stable Diffusion.
    """

    def __init__(self, model_name: str = SD2_BASE, image_size: int = 512, pretrained: bool = False,
                 encoder_precision: str = 'fp32', latents: bool = False, files: ModelFiles | None = None,
                 snr_gamma: float | None = None):
        super().__init__()
        self.snr_gamma = snr_gamma
        self.image_size = image_size

        # Read the constants of latents and noise from the configuration files.
        files = files or find_model(model_name, pretrained)
        self.latent_size = files.latent_size(image_size)
        self.scaling_factor = files.scaling_factor
        with torch.device('cpu'):  # the scheduler itself copies its small tables to the device that needs them
            self.scheduler = DDPMScheduler.from_config(files.configs['scheduler'])
        self.noise_scheduler = self.scheduler  # the name in the original benchmark
        self.prediction_type = self.scheduler.config.prediction_type

        # Build the networks. A checkpoint has `facts`, which tell this model from others, and no network whose weights
        # are in the folder of the model.
        self.unet = build_unet(files)
        self.vae = None
        if not latents:
            self.vae = build_vae(files, encoder_precision)
        self.text_encoder = build_text_encoder(files, encoder_precision)
        self.facts = facts_of_model(files, image_size, self.unet, self.text_encoder, self.scheduler)
        self.register_state_dict_post_hook(omit_networks_of_folder)
        self.register_load_state_dict_pre_hook(add_missing_networks)

    def get_extra_state(self) -> dict:
        """Return facts about the model, which torch saves in a checkpoint together with the weights."""
        return self.facts

    def set_extra_state(self, facts: dict) -> None:
        """Raise Mismatch if torch loads weights of another model, or weights that were trained with another VAE."""
        difference = difference_of_models(facts, self.facts)
        if difference:
            raise Mismatch(f'--model_name {self.facts["model_name"]} has another configuration: {difference}')

    def train(self, mode: bool = True) -> 'StableDiffusion':
        """Put the UNet into training mode, and keep the frozen encoders in eval mode."""
        super().train(mode)
        self.text_encoder.eval()
        if self.vae is not None:
            self.vae.eval()
        return self

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the UNet's prediction and its target, each float (B, 4, H/8, W/8), for a batch on the model's device.

        Args:
            batch: `caption` int64 (B, 77), and either `image`, float (B, 3, H, W) in [-1, 1] or uint8, or the VAE's
                `moments` float16 (B, 8, H/8, W/8). An evaluation also has `noise` float32 (B, 8, H/8, W/8) and
                `timestep` int64 (B,), which are the same in every evaluation. In training both are random, and
                `timestep` is added to the batch.

        Raises UserError if the images are integers of a type other than uint8.
        """
        # Encode images and captions, without gradients.
        latents, text = self.encode(batch)  # (B, 4, H/8, W/8), (B, 77, D)

        # Take the noise and timesteps of an evaluation, or random ones in training.
        if NOISE in batch:
            noise = batch[NOISE][:, 4:]  # (B, 4, H/8, W/8); `encode` samples the latents with the first 4 channels
            timesteps = batch[TIMESTEP]  # (B,)
        else:
            noise = torch.randn_like(latents)  # (B, 4, H/8, W/8)
            timesteps = torch.randint(len(self.scheduler), (len(latents),), device=latents.device)  # (B,)
            batch[TIMESTEP] = timesteps  # `loss` computes the Min-SNR weights from them

        # Predict the noise, or the velocity for a v-prediction model, from the noised latents.
        noised = self.scheduler.add_noise(latents, noise, timesteps)  # (B, 4, H/8, W/8)
        prediction = self.unet(noised, timesteps, text).sample  # (B, 4, H/8, W/8)
        if self.prediction_type == 'epsilon':
            return prediction, noise
        return prediction, self.scheduler.get_velocity(latents, noise, timesteps)

    @torch.no_grad()
    def encode(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latents float32 (B, 4, H/8, W/8) with unit variance, and text states float32 (B, 77, D)."""
        # Get the mean and log variance of the latents, (B, 8, H/8, W/8), from the batch or from the VAE.
        if MOMENTS in batch:
            moments = batch[MOMENTS]
        else:
            image = normalize(batch)['image']  # (B, 3, H, W) in [-1, 1]
            with self.encoder_autocast(image.device.type):
                moments = self.vae.encode(image.to(self.vae.dtype)).latent_dist.parameters

        # Sample the latents. Random numbers follow the memory layout, so use one layout whatever the VAE's layout is,
        # and for stored moments too.
        posterior = DiagonalGaussianDistribution(moments.to(torch.float32, memory_format=torch.channels_last))
        if NOISE in batch:
            latents = posterior.mean + posterior.std * batch[NOISE][:, :4]
        else:
            latents = posterior.sample()
        return latents * self.scaling_factor, self.text_states(batch['caption'])

    @torch.no_grad()
    def text_states(self, caption: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of the text encoder, float32 (B, 77, D), for token ids int64 (B, 77)."""
        with self.encoder_autocast(caption.device.type):
            return self.text_encoder(caption)[0].float()

    def encoder_autocast(self, device: str) -> torch.autocast:
        """Return the current autocast for encoders in float32, and a disabled one for encoders in half precision."""
        wanted = torch.is_autocast_enabled(device) and self.text_encoder.dtype == torch.float32
        return torch.autocast(device, enabled=wanted)

    def loss(self, outputs: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean squared error, in float32, of the outputs of `forward` for this batch.

        With `snr_gamma` each image has the Min-SNR weight of its `timestep`.
        """
        prediction, target = outputs
        if self.snr_gamma is None:
            return F.mse_loss(prediction.float(), target)
        errors = F.mse_loss(prediction.float(), target, reduction='none').mean(dim=(1, 2, 3))  # (B,)
        alphas_cumprod = self.scheduler.alphas_cumprod[batch[TIMESTEP]]  # (B,)
        return (min_snr_weights(alphas_cumprod, self.snr_gamma, self.prediction_type) * errors).mean()

    def get_metrics(self, is_train: bool) -> dict:
        """Return the metrics of an evaluation; training needs only the loss."""
        if is_train:
            return {}
        return {METRIC: MeanSquaredError()}

    def update_metric(self, batch, outputs: tuple[torch.Tensor, torch.Tensor], metric) -> None:
        """Add a batch to an evaluation. The loss is unweighted here, so runs with and without `snr_gamma` compare."""
        prediction, target = outputs
        metric.update(prediction.float().flatten(), target.flatten())

    @cached_property
    def flops_per_image(self) -> dict[str, int]:
        """Count the FLOPs (1 multiply-add = 2) per image: UNet forward and backward, VAE encoder, text encoder."""
        return flops_of_an_image(self)

    def flops_per_batch(self, batch: dict[str, torch.Tensor]) -> int:
        """Count the FLOPs of a batch at `image_size`, whatever its stored size is. Composer computes MFU from this."""
        return len(batch['caption']) * sum(self.flops_per_image.values())


def build_model(settings: Run, latents: bool, device: torch.device | None = None,
                files: ModelFiles | None = None) -> StableDiffusion:
    """Build the model and apply the switches of --compile, --attention and so on.

    Its random weights are initialized from the seed, on `device`; None means the device that trains.
    """
    torch.manual_seed(settings.seed)
    with device or torch.device(get_device()._device):
        model = StableDiffusion(settings.model_name, settings.image_size, settings.pretrained,
                                settings.encoder_precision, latents, files, settings.snr_gamma)
    apply_switches(model, settings)
    return model


def build_optimizer(model: StableDiffusion, settings: Run) -> torch.optim.Optimizer:
    """Build AdamW for the weights of the UNet; the frozen encoders need no optimizer."""
    # Without `fused`, choose `foreach` explicitly: torch does so by default on a GPU, and a dry run has no GPU.
    return torch.optim.AdamW(model.unet.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay,
                             betas=settings.adam_betas, fused=settings.fused_optimizer,
                             foreach=not settings.fused_optimizer)


def build_algorithms(settings: Run, ema_state: dict | None = None) -> list[Algorithm]:
    """Build the EMA, if --use_ema is given. `ema_state` is the state of an EMA to continue; None starts a new one."""
    if not settings.use_ema:
        return []
    ema = EMA(settings.ema_half_life, ema_start=settings.ema_start or '0ba')
    if ema_state and not settings.ema_start:
        ema.load_state_dict(ema_state)
    return [ema]


def build_trainer(settings: Run, name: str, model: StableDiffusion, data: DataSpec, evaluator: Evaluator | None,
                  algorithms: list[Algorithm], callbacks: Sequence[Callback]) -> Trainer:
    """Build Composer's Trainer for a training with this `name`. `callbacks` follow those made here."""
    first = [
        Throughput(settings),
        LRMonitor(),    # the curve of the learning rate
        ExactResume(settings.seed),
        FiniteSteps(settings.on_nan, settings.clip_grad_norm),  # looks at each step before the optimizer takes it
    ]
    if settings.profile:
        first.insert(0, Trace(settings.profile, settings.warmup_batches))
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        eval_dataloader=evaluator,
        optimizers=build_optimizer(model, settings),
        schedulers=build_schedule(settings.lr_schedule, settings.lr_warmup, settings.lr_final),
        algorithms=algorithms,
        callbacks=[*first, *callbacks],
        loggers=build_loggers(settings, name),
        run_name=name,
        progress_bar=False,
        max_duration=settings.max_duration,
        precision=settings.precision,
        device_train_microbatch_size=settings.device_train_microbatch_size,
        seed=settings.seed,
        dist_timeout=settings.dist_timeout,
    )
    switch_allreduce(trainer.state.model, settings)
    return trainer


def train(settings: Run, files: ModelFiles, data: DataSpec, callbacks: Sequence[Callback] = ()) -> dict:
    """Train, append the record to --results, and return it. `callbacks` run before the callbacks that measure and save.

    Raises DataError if the training failed, and SystemExit if a signal ended it, or there is nothing left to train.
    """
    # Check whatever can be missing or wrong before the model is built, which takes a while.
    announce_build(settings)
    checkpoint = newest_checkpoint(settings.save_folder) if settings.autoresume else None
    dataset = data.dataloader.dataset
    held_out = open_held_out(settings, files, dataset)
    prompts = on_rank_0(partial(read_prompts, settings.sample_prompts))

    with local_copy(checkpoint, '--save_folder') as path:
        # Find out what a checkpoint to resume from has kept.
        before = kept_in(load_checkpoint(path, label=checkpoint)['state']) if path else {}
        spending = Spending(settings, before)
        settings = with_kept_defaults(settings, before)

        # Build the model, with the weights of --load_weights unless a checkpoint replaces them. Then find its
        # microbatch: the trials run before there is an optimizer, whose state would take memory.
        model = build_model(settings, dataset.latents, files=files)
        ema_state, data_before = None, []
        if settings.load_weights and not path:
            ema_state, data_before = load_initial_weights(settings.load_weights, model, files, settings.tokenizer)
        settings = with_found_microbatch(settings, model, partial(build_optimizer, model, settings))

        # Give a new training an identity. No two trainings have the same name.
        kept = facts_to_keep(settings, files, dataset, before, data_before)
        name = f'{kept["beginning"]}-{kept["training_id"]}'
        settings = replace(settings, sample_folder=os.path.join(settings.sample_folder, name))

        # Build the training at its start, or at the checkpoint.
        sampling = Sampling(settings, prompts, model, files) if prompts else None
        end_of_batch = EndOfBatch(settings, kept, before, path and (checkpoint, path), spending, sampling)
        evaluator = build_evaluator(settings, files, held_out)
        trainer = build_trainer(settings, name, model, data, evaluator, build_algorithms(settings, ema_state),
                                [end_of_batch.held_out, *callbacks, end_of_batch])
        end_of_batch.trainer = trainer

    # Train, and report how it ended. A signal or the budget ends it after a batch, so the record can still be written.
    begin_run(settings, model, trainer, checkpoint, kept['training_id'])
    with end_of_batch.stop:
        outcome = fit(settings, trainer, end_of_batch)
        record = training_record(settings, model, data, trainer, outcome)
        finish_run(settings, trainer, record)
        return record


def main(argv: list[str] | None = None, callbacks: Sequence[Callback] = ()) -> dict | list:
    """Run the benchmark and return its record, or the forecasts with --dry_run. Composer's Trainer gets `callbacks`."""
    begin()
    with one_line_errors(PROGRAM):
        # Read the flags, and fill in the open ones from the ranks, this machine and the data.
        settings = parse(Train, __doc__, argv, PROGRAM)
        if settings.dry_run is not None:
            from sdbench.forecast.dry_run import forecast_training  # a training does not need this module
            return forecast_training(settings)
        join_ranks(settings.dist_timeout)
        index = index_of_data(settings)
        settings = complete(settings, index)

        folder = None if settings.loader_only else settings.save_folder  # --loader_only saves no checkpoints
        with locked_save_folder(folder, settings.autoresume), process_switches(settings):
            # Find the model first: its tokenizer and VAE decide how the data is read.
            files = find_model(settings.model_name, settings.pretrained)
            data = build_data(settings, files, index)
            if settings.loader_only:
                return measure_loader(settings, data)
            return train(settings, files, data, callbacks)


if __name__ == '__main__':
    main()
    destroy_nccl_group()
