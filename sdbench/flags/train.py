"""Define the flags of benchmark.py, and refuse combinations that make no sense. Nothing here needs torch."""
import argparse
import os
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from sdbench.costs import DOLLARS_PER_GPU_HOUR, TRAINING_IMAGES, Prices
from sdbench.errors import UserError
from sdbench.flags.parser import amount, below_1, count, flag, flags, fraction, positive, seed, whole_number
from sdbench.flags.times import LONGEST_INTERVAL, time_in, to_batches
from sdbench.process import launcher_variable
from sdbench.records.status import FEWEST_BATCHES

TINY_MODEL = 'tiny'  # a small model of the same kind, also built in
SD2_BASE = 'stabilityai/stable-diffusion-2-base'  # its architecture is built in
BATCH_SIZE = 2048  # batch size of the published benchmark
# Which encoders run in the training loop, by whether the training reads latents.
ENCODERS = {False: 'in_loop', True: 'text_in_loop'}
INTERVAL_DEFAULT = f'(default: a quarter of the run, at most {LONGEST_INTERVAL}ba)'
MOST_WORKERS = 8
TINY_COMMAND = 'python benchmark.py --use_ema --use_synth_data --model_name tiny --image_size 64 --batch_size 4'


def microbatch(text: str) -> int | Literal['auto']:
    return text if text == 'auto' else count(text)


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def power_of_two(number: int) -> int:
    """Return the largest power of two up to `number`, and 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)


def divisible_batch_size(batch_size: int, devices: int, microbatch: int | None = None) -> int:
    """Return the batch size to use instead of one that is not divisible by the number of devices.

    The batch of a device is rounded down to a multiple of a power of two, by less than an eighth, because a microbatch
    must divide it: 2048 images on 5 devices would become 409 on each, a prime, into which only a microbatch of 1 fits.
    If there is a `microbatch`, it is rounded to a multiple of that.
    """
    per_device = batch_size // devices
    factor = microbatch or power_of_two(per_device // 8)
    return max(1, per_device // factor) * factor * devices


def pixels(text: str) -> int:
    """Convert an image size in pixels. It must be a multiple of 8, because the VAE downsamples by 8."""
    size = count(text)
    if size % 8:
        raise argparse.ArgumentTypeError(f'{text} is not a multiple of 8; use {size // 8 * 8 or 8}')
    return size


pixels.metavar = 'PIXELS'


def price(text: str) -> tuple[str | None, float]:
    """Convert a price: dollars for every GPU, such as 2.5, or NAME=PRICE for GPUs with that name, such as H100=2.5."""
    name, _, dollars = text.rpartition('=')
    if not re.match('[0-9]', dollars):
        raise argparse.ArgumentTypeError(f'{text} is not a price such as 2.5 or H100=2.5; write it without $, which '
                                         'the shell expands as a variable')
    return name or None, amount(dollars)


def caption_weight(text: str) -> tuple[str, float]:
    """Convert the weight of a caption name, NAME=WEIGHT, such as long=3."""
    name, _, weight = text.rpartition('=')
    if not name:
        raise argparse.ArgumentTypeError(f'{text} is not NAME=WEIGHT, such as long=3')
    return name, amount(weight)


@flags('data')
class TrainingData:
    remote: str | None = flag(None, 'folder or object store with MDS shards: images and captions from convert.py, or '
                              'latents and captions from encode.py (default: no shards)')
    local: str | None = flag(None, 'cache folder for the shards of a --remote in an object store (default: a temporary '
                             'folder; a --remote folder is read in place); without --remote, the folder that holds the '
                             'shards')
    num_workers: int | None = flag(None, "data loader processes per device (default: the machine's CPU cores divided "
                                   f'by its devices, at most {MOST_WORKERS})', type=whole_number)
    cache_limit: str | None = flag(None, 'disk space limit for the cached shards of each dataset, such as 500gb '
                                   '(default: no limit)', metavar='SIZE')
    max_bad_samples: float = flag(0.01, 'fraction of unreadable samples above which the run stops', type=fraction)
    tokenizer: str | None = flag(None, 'folder or Hugging Face Hub ID of the tokenizer (default: the one in the '
                                 "--model_name folder, or else CLIP's)")


@flags('data')
class TrainingSamples:
    use_synth_data: bool = flag(False, 'train on random images, which take no time to load, instead of --remote')
    use_synth_latents: bool = flag(False, 'train on random latents of the shape that encode.py writes, instead of '
                                   '--remote')
    batch_size: int = flag(BATCH_SIZE, 'images per optimizer step, summed over all devices', type=count)
    caption_weights: tuple[tuple[str, float], ...] = flag(
        (), 'weights for the random choice among the captions of an image, by caption name, such as short=1 long=3; '
        'other names get weight 0 (default: every caption of an image is equally likely)', type=caption_weight,
        nargs='+', metavar='NAME=WEIGHT', needs='remote local dry_run')
    random_flip: bool = flag(False, 'mirror each image horizontally with probability 0.5, chosen anew in each epoch')
    caption_drop: float = flag(0.0, 'fraction of captions replaced by the empty caption, such as 0.1; classifier-free '
                               'guidance needs some (default: 0)', type=fraction)

    def check(self) -> None:
        if self.caption_weights and not any(weight for _, weight in self.caption_weights):
            raise UserError('--caption_weights are all 0, which chooses no caption; give at least one number above 0')


@flags('model')
class Model:
    model_name: str = flag(SD2_BASE, 'model: tiny (a small test model), a diffusers folder or a Hugging Face Hub ID '
                           f'(default: {SD2_BASE}, whose architecture is built in)')
    pretrained: bool = flag(False, 'load the trained weights of the VAE and the text encoder from --model_name; tiny '
                            'has trained weights for its VAE only (default: off; random weights are as fast, but no '
                            'model can generate images with them)')
    image_size: int = flag(512, 'image height and width in pixels', type=pixels)
    seed: int = flag(17, 'seed for all random numbers', type=seed)


@flags('speed')
class Encoders:
    channels_last: bool | None = flag(None, 'store image tensors in the channels_last memory format (default: on with '
                                      '--compile, else off)', action=argparse.BooleanOptionalAction)
    compile: bool | str = flag(False, 'compile the model with torch.compile, in its default mode or in the given mode; '
                               'compiling takes several minutes at the start',
                               choices=('max-autotune-no-cudagraphs', 'reduce-overhead'), nargs='?', const=True)


@flags('speed')
class Speed:
    device_train_microbatch_size: int | Literal['auto'] = flag(
        'auto', 'images per forward and backward pass on each device; auto finds the largest microbatch that fits in '
        'GPU memory, and takes the whole per-device batch on a CPU', type=microbatch, metavar='N')
    precision: str | None = flag(None, 'precision of the UNet; fp32 uses TF32 for matrix multiplications on the A100 '
                                 'and newer GPUs (default: amp_bf16 on GPUs that support it, amp_fp16 on other GPUs, '
                                 'fp32 on CPUs)', choices=('amp_bf16', 'amp_fp16', 'fp32'))
    encoder_precision: str | None = flag(None, 'precision of the frozen VAE and text encoder; fp32 stores their '
                                         'weights in float32, but they compute in --precision (default: the precision '
                                         'of --precision)', choices=('bf16', 'fp16', 'fp32'))
    attention: str = flag('sdpa', 'attention implementation: sdpa lets torch choose among its kernels cudnn, flash, '
                          'efficient and math; xformers needs the xformers package',
                          choices=('sdpa', 'cudnn', 'flash', 'efficient', 'math', 'xformers'))
    gradient_checkpointing: bool = flag(False, 'recompute activations in the backward pass, which saves memory and '
                                        'adds about a third more compute')
    fused_optimizer: bool = flag(True, 'use the fused AdamW kernel')
    half_precision_norms: bool = flag(False, 'compute the norm layers of the UNet and the VAE encoder in half '
                                      'precision')
    cudnn_benchmark: bool = flag(False, 'let cuDNN time its algorithms for each new shape and use the fastest')
    compile_blocks: bool | None = flag(None, 'compile each kind of UNet block once instead of the whole UNet, which '
                                       'compiles faster and overlaps the gradient all-reduce with the backward pass '
                                       '(default: on if --compile is given on several devices, but off with '
                                       'reduce-overhead)', action=argparse.BooleanOptionalAction, needs='compile')
    allreduce_precision: str = flag('fp32', 'precision of the gradient all-reduce', choices=('fp32', 'bf16'))


@flags('measurement')
class Results:
    results: str = flag('results.jsonl', "file to which the run's record, one line of JSON, is appended, or - to print "
                        'it as the last line of output', metavar='FILE')

    def check(self) -> None:
        """Raise UserError if the results file cannot be written, which would otherwise only show after the run."""
        # Only rank 0 writes it, and may be on another machine. A dry run writes nothing.
        if self.results == '-' or launcher_variable('RANK') or getattr(self, 'dry_run', None):
            return
        folder = os.path.dirname(os.path.abspath(self.results))
        if not os.path.isdir(folder):
            raise UserError(f'--results {self.results}: there is no folder {folder}; create it, or give another file')
        place = self.results if os.path.exists(self.results) else folder
        if self.results.lower().endswith('.csv') or os.path.isdir(self.results) or not os.access(place, os.W_OK):
            raise UserError(f'--results {self.results} is not a file to which lines of JSON can be appended; give a '
                            'file such as results.jsonl, or - to print the record')


@flags('measurement')
class Measuring:
    warmup_batches: int = flag(3, 'batches to run before the measurement starts', type=count)
    measure_batches: int | None = flag(None, 'batches to measure after the warm-up (default: all batches if '
                                       f'--max_duration is given, or else {FEWEST_BATCHES}, or more if the data loader '
                                       'prefetches many batches)', type=count)
    loader_only: bool = flag(False, 'measure only the data loader, without a model')
    profile: str | None = flag(None, 'folder for a torch profiler trace of 3 batches after the warm-up; the speed of '
                               'a profiled run is not reliable (default: no profile)', metavar='DIR')


@flags('machines')
class Machines:
    gpus_per_node: int | None = flag(None, 'GPUs per machine in a forecast (default: 8; 4 for GB200 and L40S; 1 for '
                                     'GH200)', type=count, metavar='GPUS')
    network_gbits: float | None = flag(None, 'network bandwidth of each machine in Gbit/s, summed over its adapters; '
                                       'for plain TCP give half of it (default: the bandwidth of the GPU interconnect)',
                                       type=positive, metavar='GBITS')


@flags('forecast and cost')
class Cost:
    dry_run: tuple[int, ...] | None = flag(None, 'forecast memory and training speed for this many GPUs, without a GPU '
                                           'and without training; several counts, such as 8 16 32, make a table '
                                           '(default: off; without a count, as many GPUs as there are processes)',
                                           type=count, nargs='*', metavar='GPUS')
    gpu: tuple[str, ...] = flag((), 'GPUs to forecast, by name or part of a name, such as A100-40GB H200 (default: all '
                                'known GPUs)', nargs='+', metavar='NAME', needs='dry_run')
    dollars_per_gpu_hour: Prices = flag((), 'price per GPU-hour in dollars, for every GPU or by GPU name, such as '
                                        'H100=2.5 H200=3.2 (default: recipes/prices.csv in a forecast, or else '
                                        f'{DOLLARS_PER_GPU_HOUR} for every GPU)',
                                        type=price, nargs='+', metavar='PRICE')
    budget: float | None = flag(None, 'maximum cost of the training in dollars, including earlier runs that this run '
                                'resumes; at this limit the run saves a checkpoint and stops (default: no limit)',
                                type=positive, metavar='DOLLARS', needs='dollars_per_gpu_hour')


@flags('training and checkpoints')
class Training:
    max_duration: str | None = flag(None, 'length of the training in batches or epochs, such as 5000ba or 2ep '
                                    '(default: only the warm-up and the measured batches)', type=time_in('ba ep'))
    load_weights: str | None = flag(None, 'initial weights for the UNet: a checkpoint, a folder or object store with '
                                    'checkpoints (the newest is used), or a diffusers UNet or pipeline (default: '
                                    'random weights)')
    on_nan: str = flag('stop', 'what to do if the loss or a gradient is not finite: stop the run, or skip the step (at '
                       'most 10 steps in a row)', choices=('stop', 'skip'))
    save_folder: str | None = flag(None, 'folder or object store for checkpoints; it must be new or empty, unless '
                                   '--autoresume is given (default: no checkpoints)')
    save_interval: str | None = flag(None, f'time between checkpoints {INTERVAL_DEFAULT}; one is also saved at the end '
                                     'and on Ctrl-C or SIGTERM', type=time_in('ba ep dur'), needs='save_folder dry_run')
    save_num_checkpoints_to_keep: int | None = flag(None, 'how many of the newest checkpoints to keep in a folder; an '
                                                    'object store keeps all (default: all; one of Stable Diffusion 2 '
                                                    'takes 14 GB)', type=count, needs='save_folder dry_run')
    autoresume: bool = flag(False, 'resume from the newest complete checkpoint in --save_folder, if there is one',
                            needs='save_folder dry_run')
    dist_timeout: int = flag(1800, 'seconds that a process waits for the others before the run fails; must be longer '
                             'than any compilation, save or image generation', type=count, metavar='SECONDS')


@flags('loss, optimizer and EMA')
class Optimizer:
    snr_gamma: float | None = flag(None, 'Min-SNR gamma, such as 5.0, which lowers the loss weight of timesteps with a '
                                   'higher signal-to-noise ratio (default: no weighting)', type=positive,
                                   metavar='GAMMA')
    learning_rate: float = flag(1e-4, 'AdamW learning rate after --lr_warmup', type=positive)
    lr_warmup: str | None = flag(None, 'length of the linear learning rate warm-up, such as 10000ba (default: no '
                                 'warm-up)', type=time_in('ba ep dur'))
    lr_schedule: str = flag('constant', 'learning rate schedule after the warm-up: constant, or a cosine or linear '
                            'decay until the end of --max_duration', choices=('constant', 'cosine', 'linear'))
    lr_final: float = flag(0.0, 'final learning rate of the cosine and linear schedules, as a fraction of '
                           '--learning_rate, such as 0.1', type=fraction)
    weight_decay: float = flag(0.001, 'AdamW weight decay', type=amount)
    adam_betas: tuple[float, float] = flag((0.9, 0.999), 'AdamW betas, the decay rates of the two moment estimates '
                                           '(default: 0.9 0.999)', type=below_1, nargs=2, metavar='BETA')
    clip_grad_norm: float | None = flag(None, 'maximum gradient norm; larger gradients are scaled down to it (default: '
                                        'no clipping)', type=positive, metavar='NORM')
    use_ema: bool = flag(False, "keep an exponential moving average (EMA) of the UNet's weights")
    ema_half_life: str | None = flag(None, "half-life of the EMA: the time after which a step's contribution has "
                                     f'halved (default: a tenth of the run, at most {LONGEST_INTERVAL}ba)',
                                     type=time_in('ba ep'), needs='use_ema')
    ema_start: str | None = flag(None, 'time at which the EMA starts, such as 5000ba, or 0.5dur for half of the run '
                                 '(default: the start of the run)', type=time_in('ba ep dur'), needs='use_ema')

    def check(self) -> None:
        if self.lr_final and self.lr_schedule == 'constant':
            raise UserError(f'--lr_final {self.lr_final} has no effect with --lr_schedule constant; give '
                            '--lr_schedule cosine or linear')


@flags('evaluation, image generation and logging')
class EvaluationAndSamples:
    eval_remote: str | None = flag(None, 'folder or object store with held-out MDS shards for the evaluation loss, '
                                   "which uses each image's first caption and the same noise and timesteps each time; "
                                   '--local and --cache_limit apply too (default: no evaluation)')
    eval_interval: str | None = flag(None, f'time between evaluations {INTERVAL_DEFAULT}; an evaluation is also run at '
                                     'the end', type=time_in('ba ep'), needs='eval_remote dry_run')
    sample_prompts: str | None = flag(None, 'text file with one prompt per line; images are generated from them during '
                                      'the training, with the EMA weights if there are any; needs --pretrained',
                                      metavar='FILE', needs='pretrained')
    sample_interval: str | None = flag(None, 'time between image generations from --sample_prompts '
                                       f'{INTERVAL_DEFAULT}; images are also generated before the first batch and at '
                                       'the end', type=time_in('ba ep'), needs='sample_prompts dry_run')
    wandb_name: str | None = flag(None, 'run name in Weights & Biases (default: W&B is not used)')
    wandb_project: str | None = flag(None, 'Weights & Biases project to log to (default: W&B is not used)')
    tensorboard: str | None = flag(None, 'folder for TensorBoard files', metavar='DIR')


@dataclass(frozen=True, kw_only=True)
class Train(TrainingData, TrainingSamples, Model, Encoders, Speed, Measuring, Results, Machines,
            Cost, Training, Optimizer, EvaluationAndSamples):
    """The flags of benchmark.py, as they were given. `sdbench/complete.py` makes a Run of them."""

    def check(self) -> None:
        """Raise UserError for combinations of flags from several groups; each group checks its own flags."""
        # A run reads exactly one dataset; only a dry run can do without any.
        sources = [bool(self.remote or self.local), self.use_synth_data, self.use_synth_latents]
        if sum(sources) > 1 or not any(sources) and self.dry_run is None:
            raise UserError('give one of --remote, --use_synth_data and --use_synth_latents, and only one')

        # Every device must get the same number of images, for each GPU count of a dry run.
        microbatch = self.device_train_microbatch_size
        for devices in self.dry_run or (0,):
            devices = devices or launcher_variable('WORLD_SIZE') or 1
            if self.batch_size % devices:
                given = None if microbatch == 'auto' else microbatch
                raise UserError(f'--batch_size {self.batch_size} is not divisible by {devices} devices; use '
                                f'{divisible_batch_size(self.batch_size, devices, given)}')
            images = self.batch_size // devices
            if microbatch != 'auto' and images % microbatch:
                largest = max(size for size in divisors(images) if size <= microbatch)
                raise UserError(f'--device_train_microbatch_size {microbatch} does not divide the per-device batch of '
                                f'{images} images (--batch_size {self.batch_size}); use {largest}')


@dataclass(frozen=True, kw_only=True)
class Run(Train):
    """The settings of a run, all filled in: every default is resolved, and every time is in batches.

    Attributes:
        encoders: which encoders run in the training loop, one of ENCODERS.
        num_devices: number of devices in the run, or the GPU count given to --dry_run.
        batches_per_epoch: length of the data loader.
        sample_folder: folder for the images generated from --sample_prompts.
        by_default: names of the flags that the user left open, and whose default depends on the machine or the run.
    """
    encoders: str
    num_devices: int
    batches_per_epoch: int
    sample_folder: str
    by_default: tuple[str, ...]

    @property
    def latents(self) -> bool:
        return self.encoders == ENCODERS[True]

    @property
    def device_batch_size(self) -> int:
        return self.batch_size // self.num_devices

    @property
    def training_images(self) -> int | None:
        """Return the images of the whole training for which days and dollars are stated; None for a test model."""
        if self.model_name == TINY_MODEL:
            return None
        if self.dry_run and 'max_duration' not in self.by_default:
            return to_batches(self.max_duration) * self.batch_size
        return TRAINING_IMAGES

    @property
    def measures(self) -> bool:
        """Tell whether the run is a measurement: it has --measure_batches, or no --max_duration."""
        return self.measure_batches is not None


# Flags that take a time. complete.py converts each of them to batches.
TIMES = ('max_duration', 'save_interval', 'eval_interval', 'sample_interval', 'lr_warmup', 'ema_half_life', 'ema_start')
# The flags in these groups affect the training result, and a resumed run must have the same values. Only the folder of
# the model may move; its configuration is compared.
SAME_ON_RESUME = tuple(field for group in (TrainingSamples, Model, Optimizer) for field in fields(group)
                       if field.name != 'model_name')
# Flags in these groups that do not change the time of a step: measurements that differ only in them measure the same
# speed. Add a new flag here only after checking that.
NO_EFFECT_ON_SPEED = ('random_flip', 'caption_drop', 'caption_weights', 'pretrained', 'seed', 'snr_gamma',
                      'learning_rate', 'lr_warmup', 'lr_schedule', 'lr_final', 'weight_decay', 'adam_betas',
                      'ema_half_life')
ENCODER_PRECISIONS = {'amp_bf16': 'bf16', 'amp_fp16': 'fp16', 'fp32': 'fp32'}  # the default for each --precision
SWITCHES = tuple(field.name for group in (Encoders, Speed) for field in fields(group))


def default_switches(precision: str, compile: bool | str, num_devices: int) -> dict[str, Any]:
    """Return the switches whose defaults depend on other settings."""
    return {'encoder_precision': ENCODER_PRECISIONS[precision],
            # Without compiling, channels_last is slower, because torch's group norm copies its input to NCHW and back.
            'channels_last': bool(compile),
            # On several devices, compiled blocks start the all-reduce while other blocks still run backward. A CUDA
            # graph (reduce-overhead) has fixed weight addresses, so blocks cannot share one.
            'compile_blocks': num_devices > 1 and compile not in (False, 'reduce-overhead')}
