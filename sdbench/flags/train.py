"""The flags of benchmark.py, each in one place, and what of them cannot be. Nothing here needs torch."""
import argparse
import os
import re
from dataclasses import dataclass, fields
from typing import Literal

from sdbench.costs import DOLLARS_PER_GPU_HOUR, TRAINING_IMAGES, Prices
from sdbench.errors import UserError
from sdbench.flags.parser import amount, below_1, count, flag, fraction, positive, seed, whole_number
from sdbench.flags.times import time_in
from sdbench.gpus import cards_named
from sdbench.process import launcher_variable

TINY_MODEL = 'tiny'  # a small model of the same kind, also built in
SD2_BASE = 'stabilityai/stable-diffusion-2-base'  # whose architecture is built in
BATCH_SIZE = 2048  # of the published benchmark
ENCODERS = {False: 'in_loop', True: 'text_in_loop'}  # in the loop of a training, by whether it is on latents
INTERVAL_DEFAULT = '(default: 1000ba, or a quarter of a shorter run)'
TINY_COMMAND = 'python benchmark.py --use_ema --use_synth_data --model_name tiny --image_size 64 --batch_size 4'


def microbatch(text: str) -> int | Literal['auto']:
    """Convert a number of images that go through the model at once, or auto."""
    return text if text == 'auto' else count(text)


def divisors(number: int) -> list[int]:
    """List what divides a number, the smallest first."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def pixels(text: str) -> int:
    """Convert the side of an image in pixels: a multiple of 8, since the VAE makes one latent of 8 pixels."""
    size = count(text)
    if size % 8:
        raise argparse.ArgumentTypeError(f'{text} is not a multiple of 8; use {size // 8 * 8 or 8}')
    return size


def known_gpu(text: str) -> str:
    """Return the text unchanged if it is the name of a known GPU, or a part of it."""
    try:
        cards_named((text,))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def price(text: str) -> tuple[str | None, float]:
    """Convert a price in dollars, such as 2.5, or NAME=PRICE, such as H100=2.5, for the GPUs of that name."""
    name, is_named, dollars = text.rpartition('=')
    if not re.match('[0-9]', dollars):
        raise argparse.ArgumentTypeError(f'{text} is no price such as 2.5 or H100=2.5; leave out the $, which the '
                                         'shell takes for the name of a variable')
    if not is_named:
        return None, amount(text)
    return name, amount(dollars)


def caption_weight(text: str) -> tuple[str, float]:
    """Convert NAME=WEIGHT of captions, such as long=3."""
    name, is_named, weight = text.rpartition('=')
    if not is_named:
        raise argparse.ArgumentTypeError(f'{text} is not NAME=WEIGHT, such as long=3')
    return name, amount(weight)


PRICES_HELP = ('price of a GPU-hour in dollars, for all GPUs or by their names, such as H100=2.5 H200=3.2 '
               f'(default: {DOLLARS_PER_GPU_HOUR} for every GPU)')


@dataclass(frozen=True, kw_only=True)
class DataLoading:
    heading = 'data'

    remote: str | None = flag(None, 'folder or object store with the MDS shards to read: images and captions, as '
                              'convert.py writes them; a training also reads the latents that encode.py writes')
    local: str | None = flag(None, 'folder that caches the shards of --remote (default: a temporary folder for an '
                             'object store; a folder is read in place); without --remote, the folder with the shards')
    num_workers: int | None = flag(None, 'processes that load and decode samples, for each device (default: one for '
                                   'each of its CPU cores, up to 8)', converter=whole_number)
    by_default: tuple[str, ...] = ()  # no flag: those that complete.py fills in by the machine or the run's length


@dataclass(frozen=True, kw_only=True)
class TrainingSamples:
    heading = 'data'

    cache_limit: str | None = flag(None, 'most disk space that the cached shards of a dataset may take, such as 500gb '
                                   '(default: no limit)', metavar='SIZE', may_change=True)
    max_bad_samples: float = flag(0.01, 'share of bad samples tolerated before the run stops', converter=fraction,
                                  may_change=True)
    use_synth_data: bool = flag(False, 'train on random images, which cost nothing to load, instead of --remote')
    use_synth_latents: bool = flag(False, 'train on random latents, as if encode.py had written them, instead of '
                                   '--remote')
    batch_size: int = flag(BATCH_SIZE, 'images in a step of the optimizer, over all devices', converter=count)
    tokenizer: str | None = flag(None, 'folder or hub name of the tokenizer of the captions (default: the one in the '
                                 "folder --model_name, or else CLIP's own)",
                                 may_change=True)  # its place: the token ids must be the same
    caption_weights: tuple[tuple[str, float], ...] = flag(
        (), 'weights by which one of the captions of an image is drawn at each visit, by their names, such as short=1 '
        'long=3; a name that is left out weighs 0 (default: all captions of an image have the same chance)',
        converter=caption_weight, metavar='NAME=WEIGHT', needs='remote local dry_run')
    random_flip: bool = flag(False, 'mirror each image with a probability of one half, drawn again in each epoch')
    caption_drop: float = flag(0.0, 'share of captions replaced by an empty one, such as 0.1; classifier-free guidance '
                               'needs some', converter=fraction)


@dataclass(frozen=True, kw_only=True)
class Model:
    heading = 'model'

    model_name: str = flag(SD2_BASE, f'model to build: tiny, a diffusers folder or a hub name (default: {SD2_BASE}, '
                           'whose architecture is built in)',
                           may_change=True)  # its place: the configuration must be the same
    pretrained: bool = flag(False, 'load the weights of the VAE and the text encoder from --model_name; tiny has those '
                            'of a VAE alone (default: off: random weights, which train as fast)')
    image_size: int = flag(512, 'height and width of the images in pixels', converter=pixels)
    seed: int = flag(17, 'seed of the random weights, the noise and the order of samples', converter=seed)


@dataclass(frozen=True, kw_only=True)
class Encoders:
    heading = 'speed'

    encoder_precision: Literal['bf16', 'fp16', 'fp32'] | None = flag(
        None, 'precision of the frozen VAE and text encoder; with fp32 a training holds their weights in float32 and '
        'computes in --precision (default: that of --precision; in encode.py bf16 on a GPU that has it, fp16 on '
        'another GPU, fp32 on a CPU)')
    channels_last: bool | None = flag(None, 'keep images in the memory format channels_last (default: on with '
                                      '--compile)')
    compile: bool | Literal['max-autotune-no-cudagraphs', 'reduce-overhead'] = flag(
        False, 'compile the model by torch.compile, in its default mode or the one given; this takes minutes at the '
        'start', bare=True)


@dataclass(frozen=True, kw_only=True)
class Speed:
    heading = 'speed'

    device_train_microbatch_size: int | Literal['auto'] = flag(
        'auto', 'images that go through the model at once on each device; auto is the most that fit on a GPU, and on '
        'a CPU its share of the batch', converter=microbatch, metavar='N')
    precision: Literal['amp_bf16', 'amp_fp16', 'fp32'] | None = flag(
        None, "precision of the UNet's arithmetic; on GPUs since the A100 fp32 multiplies in TF32 (default: amp_bf16 "
        'on a GPU that has it, amp_fp16 on another GPU, fp32 on a CPU)')
    attention: Literal['sdpa', 'cudnn', 'flash', 'efficient', 'math', 'xformers'] = flag(
        'sdpa', 'implementation of attention: sdpa lets torch choose one of its kernels cudnn, flash, efficient and '
        'math; xformers is a package of its own')
    gradient_checkpointing: bool = flag(False, 'compute activations again in the backward pass: less memory for about '
                                        'a third more arithmetic')
    fused_optimizer: bool = flag(True, 'run the step of AdamW as one kernel')
    half_precision_norms: bool = flag(False, "compute the norms of the UNet and of the VAE's encoder in half precision")
    cudnn_benchmark: bool = flag(False, 'let cuDNN time its algorithms for each new shape and keep the fastest')
    compile_blocks: bool | None = flag(
        None, "compile each kind of the UNet's blocks once instead of the whole UNet, which starts sooner and "
        'exchanges gradients earlier (default: on with several devices, unless --compile is reduce-overhead)',
        needs='compile')
    allreduce_precision: Literal['fp32', 'bf16'] = flag('fp32', 'precision in which GPUs exchange gradients')


@dataclass(frozen=True, kw_only=True)
class Warmup:
    heading = 'measurement'

    warmup_batches: int = flag(3, 'batches to run before the clock starts', converter=count)


@dataclass(frozen=True, kw_only=True)
class Results:
    heading = 'measurement'

    results: str | None = flag(None, 'file to append the record of the run to, or - to print it as the last line of '
                               'output (default: results.jsonl; a forecast is kept only where this is given)',
                               metavar='FILE')

    @property
    def results_file(self) -> str:
        """Return where the record of a run goes."""
        return self.results or 'results.jsonl'

    def check(self) -> None:
        """Raise UserError if the file of results cannot be written: better before the run than after it."""
        if launcher_variable('RANK'):  # rank 0 alone writes it, perhaps on another machine
            return
        if self.results is None and getattr(self, 'dry_run', None) is not None:  # such a forecast keeps no record
            return
        path = self.results_file
        if path.lower().endswith('.csv'):
            raise UserError(f'--results {path} is a table, and a record is a line of JSON; name a file such as '
                            'results.jsonl')
        place = path if os.path.exists(path) else os.path.dirname(os.path.abspath(path))
        if path != '-' and (os.path.isdir(path) or not os.access(place, os.W_OK)):
            raise UserError(f'--results {path} is no file that can be written; name another, or - to print')


@dataclass(frozen=True, kw_only=True)
class Measuring:
    heading = 'measurement'

    measure_batches: int | None = flag(
        None, 'batches to measure after the warm-up (default: all of --max_duration; without it 20, or more if the '
        'loader prepares many ahead)', converter=count)
    loader_only: bool = flag(False, 'measure the data loader alone, without a model')
    profile: str | None = flag(None, "folder for torch's profile of 3 batches after the warm-up; reports leave such a "
                               'run out (default: no profile)', metavar='DIR')


@dataclass(frozen=True, kw_only=True)
class Cost:
    heading = 'forecast and cost'

    dry_run: tuple[int, ...] | None = flag(
        None, 'forecast what fits on each GPU and how fast so many of them would train; this needs no GPU and trains '
        'nothing; several numbers, such as 8 16 32, make a table (default: off; without a number, as many GPUs as '
        'there are processes)', converter=count, metavar='GPUS', bare=(0,))
    gpus_per_node: int | None = flag(
        None, 'GPUs in each machine of a forecast (default: 8; GB200 and L40S 4, GH200 1)', converter=count,
        metavar='GPUS', needs='dry_run')
    network_gbits: float | None = flag(
        None, 'network of each machine in Gbit/s, all adapters together, by which several machines are forecast, and '
        'which a measurement notes; give half of it for plain TCP, which does not reach more (default: as fast as the '
        'link of the GPUs)', converter=positive, metavar='GBITS')
    gpu: tuple[str, ...] = flag((), 'GPUs to forecast, by their names or a part of them, such as A100-40GB H200 '
                                '(default: all that are known)', converter=known_gpu, metavar='NAME', needs='dry_run')
    training_images: int | None = flag(
        None, f'images of the whole training whose cost is stated (default: {TRAINING_IMAGES:,}, those of Stable '
        'Diffusion 2; with --dry_run and --max_duration those of that run; for the model tiny no cost is stated)',
        converter=count)
    dollars_per_gpu_hour: Prices = flag((), PRICES_HELP, converter=price, metavar='PRICE')
    budget: float | None = flag(
        None, 'most dollars that the GPU-hours may cost, with those of the runs that this one resumes; then it saves '
        'and ends (default: no limit)', converter=positive, metavar='DOLLARS', needs='dollars_per_gpu_hour')


@dataclass(frozen=True, kw_only=True)
class Training:
    heading = 'training and checkpoints'

    max_duration: str | None = flag(None, 'length of the run in batches or epochs, such as 5000ba or 2ep (default: the '
                                    'warm-up and the measured batches)', converter=time_in('ba ep'))
    load_weights: str | None = flag(None, 'weights that the UNet starts from: a checkpoint, a folder or an object '
                                    'store for its newest, or a UNet or pipeline of diffusers (default: random ones)')
    on_nan: Literal['stop', 'skip'] = flag('stop', 'action at a loss or a gradient that is not finite: stop the run, '
                                           'or skip the step, up to 10 in a row')
    save_folder: str | None = flag(None, 'folder or object store for checkpoints, a new one unless --autoresume '
                                   'resumes from it (default: no checkpoints)')
    save_interval: str | None = flag(None, f'time between checkpoints {INTERVAL_DEFAULT}; one is also saved at the '
                                     'end and on Ctrl-C or SIGTERM', converter=time_in('ba ep dur'),
                                     needs='save_folder dry_run')
    save_num_checkpoints_to_keep: int | None = flag(
        None, 'number of checkpoints to keep in a folder, the newest (default: all; one of Stable Diffusion 2 takes '
        '15 GB); in an object store all are kept', converter=count, needs='save_folder dry_run')
    autoresume: bool = flag(False, 'resume from the newest checkpoint in --save_folder, if there is one',
                            needs='save_folder dry_run')
    dist_timeout: int = flag(1800, 'seconds to wait for the other processes before the run fails; they also wait '
                             'while one compiles, saves or draws', converter=count)

    def check(self) -> None:
        if self.save_folder and re.search('[{}%]', self.save_folder):
            raise UserError(f'--save_folder {self.save_folder} contains {{, }} or %, which Composer replaces in the '
                            'names of checkpoints; give a folder without them')


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    heading = 'loss, optimizer and average'

    snr_gamma: float | None = flag(None, 'gamma of the Min-SNR loss, such as 5.0: images at a signal-to-noise ratio '
                                   'above it weigh less (default: all weigh the same)', converter=positive,
                                   metavar='GAMMA')
    learning_rate: float = flag(1e-4, 'learning rate of AdamW after --lr_warmup', converter=positive)
    lr_warmup: str | None = flag(None, 'length of the warm-up, in which the learning rate rises from 0, such as '
                                 '10000ba (default: no warm-up)', converter=time_in('ba ep dur'))
    lr_schedule: Literal['constant', 'cosine', 'linear'] = flag(
        'constant', 'learning rate after the warm-up: it stays, or falls along a cosine or a line until the end of '
        '--max_duration')
    lr_final: float = flag(0.0, 'final learning rate of the schedules cosine and linear, as a share of '
                           '--learning_rate, such as 0.1', converter=fraction)
    weight_decay: float = flag(0.001, 'weight decay of AdamW', converter=amount)
    adam_betas: tuple[float, float] = flag(
        (0.9, 0.999), 'betas of AdamW: the share that each step keeps of its averages of the gradient and of its '
        'square (default: 0.9 0.999)', converter=below_1, metavar='BETA')
    clip_grad_norm: float | None = flag(None, 'largest norm of the gradients of a step; larger ones are scaled down '
                                        'to it (default: no limit)', converter=positive, metavar='NORM')
    use_ema: bool = flag(False, "keep an exponential moving average (EMA) of the UNet's weights")
    ema_half_life: str | None = flag(
        None, "half-life of the average, after which today's weights count half (default: 1000ba, or a tenth of a "
        'shorter run)', converter=time_in('ba ep'), needs='use_ema')
    ema_start: str | None = flag(None, 'time at which the average starts, such as 5000ba, or 0.5dur for half of the '
                                 'run (default: the start of the run)', converter=time_in('ba ep dur'), needs='use_ema')

    def check(self) -> None:
        if self.lr_final and self.lr_schedule == 'constant':
            raise UserError(f'--lr_final {self.lr_final} does nothing with --lr_schedule constant; give --lr_schedule '
                            'cosine or linear')


@dataclass(frozen=True, kw_only=True)
class EvaluationAndSamples:
    heading = 'evaluation, drawing and curves'

    eval_remote: str | None = flag(None, 'folder or object store with MDS shards that are held out, whose loss is '
                                   'evaluated with the first caption of each image, and the same noise and timesteps '
                                   'each time; --local and --cache_limit hold for its shards as well (default: no '
                                   'evaluation)')
    eval_interval: str | None = flag(None, f'time between evaluations {INTERVAL_DEFAULT}; there is also one at the end',
                                     converter=time_in('ba ep'), needs='eval_remote dry_run')
    sample_prompts: str | None = flag(None, 'text file of prompts, one on a line, that are drawn during the training, '
                                      'with the averaged weights where there are any; needs --pretrained (default: '
                                      'nothing is drawn)', metavar='FILE')
    sample_interval: str | None = flag(None, f'time between drawings of --sample_prompts {INTERVAL_DEFAULT}; they are '
                                       'also drawn at the end', converter=time_in('ba ep'),
                                       needs='sample_prompts dry_run')
    wandb_name: str | None = flag(None, 'name of the run in Weights & Biases (default: W&B is not used)')
    wandb_project: str | None = flag(None, 'project of Weights & Biases to log to (default: W&B is not used)')
    tensorboard: str | None = flag(None, 'folder to write TensorBoard files to (default: none are written)',
                                   metavar='DIR')


@dataclass(frozen=True, kw_only=True)
class Train(DataLoading, TrainingSamples, Model, Encoders, Speed, Warmup, Measuring, Results, Cost, Training, Optimizer,
            EvaluationAndSamples):
    """All flags of benchmark.py. `sdbench/complete.py` fills in what is None here and has another default in --help.

    Attributes:
        encoders: which encoders run in the loop, by a name of ENCODERS.
        num_devices: number of devices of the run, or the number given to --dry_run.
        batches_per_epoch: length of the loader.
        sample_folder: folder for the images of --sample_prompts.

    These four are no flags: they are None until the settings are complete.
    """
    encoders: str | None = None
    num_devices: int | None = None
    batches_per_epoch: int | None = None
    sample_folder: str | None = None

    def check(self) -> None:
        """Raise UserError for flags of several groups that do not go together; each group checks its own flags."""
        # one source of data
        sources = [bool(self.remote or self.local), self.use_synth_data, self.use_synth_latents]
        if not any(sources) and self.dry_run is None:
            raise UserError('give one of --remote, --use_synth_data and --use_synth_latents')
        if sum(sources) > 1:
            raise UserError('give only one of --remote, --use_synth_data and --use_synth_latents, not both')

        # a batch that divides over each number of devices
        counts = self.dry_run or (0,)
        for devices in counts:
            self.check_batch(devices or launcher_variable('WORLD_SIZE') or 1)
        if len(set(counts)) < len(counts):
            raise UserError(f'--dry_run {" ".join(map(str, counts))} has a number twice; leave one out')

        # a VAE that decodes what is drawn
        if self.sample_prompts and not self.pretrained:
            raise UserError(f'--sample_prompts {self.sample_prompts} needs a VAE that can decode, and without '
                            '--pretrained it is random; give --model_name FOLDER --pretrained')

    def check_batch(self, devices: int) -> None:
        """Raise UserError if the batch does not divide over so many devices, or a device's share into microbatches."""
        if self.batch_size % devices:
            divisible = self.batch_size // devices * devices or devices
            raise UserError(f'--batch_size {self.batch_size} does not divide over {devices} devices; use {divisible}')
        device_batch = self.batch_size // devices
        microbatch = self.device_train_microbatch_size
        if microbatch != 'auto' and device_batch % microbatch:
            largest = max(size for size in divisors(device_batch) if size <= microbatch)
            raise UserError(f'--device_train_microbatch_size {microbatch} does not divide the {device_batch} images '
                            f'that a device gets of --batch_size {self.batch_size}; use {largest}')

    @property
    def latents(self) -> bool:
        """Tell whether the run is on latents, so that it needs no VAE."""
        return self.encoders == ENCODERS[True]

    @property
    def device_batch_size(self) -> int:
        """Return the images of a batch on each device."""
        return self.batch_size // self.num_devices

    @property
    def microbatch_sizes(self) -> list[int]:
        """List the microbatches into which a device's share of a batch divides, the smallest first."""
        return divisors(self.device_batch_size)

    @property
    def measures(self) -> bool:
        """Tell whether a measurement was asked for: without --max_duration, or by --measure_batches."""
        return self.measure_batches is not None


# Flags that take a time. A complete setting of any of them is in batches.
TIMES = ('max_duration', 'save_interval', 'eval_interval', 'sample_interval', 'lr_warmup', 'ema_half_life', 'ema_start')
# The flags of these groups decide what is learned: a resumed run has the same ones, except those that may change.
LEARNING = (TrainingSamples, Model, Optimizer)
SAME_ON_RESUME = tuple(field for group in LEARNING for field in fields(group) if not field.metadata['may_change'])
# Flags of these groups that take no time in a step: measurements with other values of them are of one speed. A new flag
# is not among them until somebody has looked.
NO_EFFECT_ON_SPEED = ('random_flip', 'caption_drop', 'caption_weights', 'pretrained', 'seed', 'snr_gamma',
                      'learning_rate', 'lr_warmup', 'lr_schedule', 'lr_final', 'weight_decay', 'adam_betas',
                      'ema_half_life')
ENCODER_PRECISIONS = {'amp_bf16': 'bf16', 'amp_fp16': 'fp16', 'fp32': 'fp32'}  # the default for each --precision
SWITCHES = tuple(field.name for group in (Encoders, Speed) for field in fields(group))
