"""How a training begins, ends and is recorded."""
import json
import math
import os
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer import ComposerModel, Trainer
from composer.core import DataSpec
from composer.utils import dist

from sdbench.errors import DataError, UserError, known_reason, one_line, plural, redacted
from sdbench.files import parse_json
from sdbench.flags.times import is_due, to_batches
from sdbench.flags.train import SD2_BASE, TINY_COMMAND, Train
from sdbench.flags.training_command import caution_about_steps
from sdbench.measuring.clock import TRACE_WARMUP, TRACED_BATCHES
from sdbench.models.loading import weight_files
from sdbench.process import launcher_variable
from sdbench.records.record import append_record, make_record
from sdbench.records.status import COMPLETE, FAILED, INTERRUPTED, PROFILED, UNMEASURED
from sdbench.records.summary import run_summary
from sdbench.training.checkpoints import RECORD, read_beside, write_beside
from sdbench.training.microbatch import changes_that_take_less
from sdbench.training.progress import HeldOutLoss, is_held_out
from sdbench.training.ranks import GracefulStop, on_rank_0, print_on_rank_0
from sdbench.training.sampling import Sampling
from sdbench.training.spending import Spending

# what Composer warns of where nothing is wrong: the smaller last batch of an evaluation, a resume at an epoch's end
COMPOSERS_WARNINGS = ('Cannot split tensor of length', 'No batches were trained')


def announce_build(settings: Train) -> None:
    """Say on rank 0 what is being built: that and the first batch can take minutes, or without a GPU hours.

    Raises UserError where `require_memory_of_cpu` does.
    """
    if settings.model_name == SD2_BASE and not torch.cuda.is_available():
        require_memory_of_cpu(settings)
    devices = plural(dist.get_world_size(), 'device')
    print_on_rank_0(f'building {redacted(settings.model_name)} for images of {settings.image_size} px, '
                    f'{settings.batch_size:,} a batch, on {devices}')


def require_memory_of_cpu(settings: Train) -> None:
    """Warn on rank 0 of what Stable Diffusion 2 takes on a CPU. Raises UserError where its memory is too small.

    A newcomer's first command would take hours, and fill a laptop's memory until the system stalls.
    """
    # GB: weights, gradients, moments and encoders; the average; and what is kept of each image for the backward pass
    at_once = settings.device_train_microbatch_size
    average = 3.5 if settings.use_ema else 0
    needed = math.ceil(14.5 + average + 2 * at_once * (settings.image_size / 512) ** 2)
    there = int(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9)

    smaller = 'a smaller --device_train_microbatch_size, or ' if at_once > 1 else ''
    takes = (f'there is no GPU, and on a CPU Stable Diffusion 2 takes {needed:,} GB of memory for '
             f'{plural(at_once, "image")} at once, and this machine has {there} GB')
    if needed > there:
        raise UserError(f'{takes}; give {smaller}the tiny model: {TINY_COMMAND}')
    print_on_rank_0(f'warning: {takes}; each of {settings.batch_size:,} images of a batch takes seconds; the tiny '
                    f'model takes less: {TINY_COMMAND}')


def begin_run(settings: Train, model: ComposerModel, trainer: Trainer, checkpoint: str | None) -> None:
    """Log the settings, say on rank 0 what the run resumes or starts from, and warn of what will not come of it.

    Raises SystemExit if it resumes a training that is over: one that has all of its batches, and its record. Raises
    UserError if the run is too short for --profile.
    """
    # FLOPs are counted here, before the clock runs: Composer's SpeedMonitor asks for them between two batches.
    state = trainer.state
    flops = {'flops_per_image': sum(model.flops_per_image.values())}
    trainer.logger.log_hyperparameters(make_record('train', settings, flops))

    # Where there is nothing left to do, a cluster that starts the command again is told by the status that it is done.
    batch = state.timestamp.batch.value
    if batch >= to_batches(settings.max_duration) and on_rank_0(partial(is_recorded, settings.save_folder, batch)):
        if dist.get_global_rank() == 0:
            print(f'--save_folder {settings.save_folder} holds all of --max_duration {settings.max_duration}, and the '
                  'record: nothing left to do; a longer --max_duration goes on')
        sys.exit(0)

    # a trace that would not come
    needed = settings.warmup_batches + TRACE_WARMUP + TRACED_BATCHES
    left = to_batches(settings.max_duration) - batch
    if settings.profile and left < needed:
        raise UserError(f'--profile needs {needed} batches, of which it traces the last {TRACED_BATCHES}, and {left} '
                        'are left of the run; give a longer one, or leave it out')

    # where it starts
    if dist.get_global_rank():
        return
    if settings.load_weights and not checkpoint:
        print(f'starting from the weights of {settings.load_weights}')
    elif settings.pretrained and not checkpoint and weight_files(Path(settings.model_name, 'unet')):
        print('the UNet starts from random weights: --pretrained is for the VAE and the text encoder; to start from '
              f'trained ones, give --load_weights {settings.model_name}')
    if checkpoint:
        print(f'resuming from {checkpoint}, batch {batch} of {state.max_duration.value}')
    elif settings.autoresume:
        print(f'--save_folder {settings.save_folder} holds no checkpoint yet: starting from the first batch')
    elif not settings.measures and not settings.save_folder:
        print(f'warning: without --save_folder nothing of these {settings.max_duration} will be kept', file=sys.stderr)

    # what will not come of it
    caution = caution_about_steps(settings, state.train_dataloader.dataset.num_samples)
    if caution and not checkpoint:
        print(f'warning: {caution}', file=sys.stderr)
    for evaluator in state.evaluators:
        if not is_held_out(state, evaluator.dataloader.dataloader.dataset):
            print(f'warning: --eval_remote {settings.eval_remote} is not known to be held out: not all data of this '
                  'training is the other side of the same convert.py --held_out', file=sys.stderr)
    if (settings.save_folder or settings.eval_remote) and not settings.pretrained:
        print('warning: without --pretrained the VAE and the text encoder are random, so that the model will not draw, '
              'and its loss says nothing of one that does; give --model_name FOLDER --pretrained', file=sys.stderr)


def is_recorded(folder: str, batches: int) -> bool:
    """Tell whether --save_folder has the record of a training of so many batches, which is the last that it keeps."""
    text = read_beside(folder, RECORD)
    return text is not None and parse_json(text, f'{folder}/{RECORD}')['trained_batches'] == batches


def evaluate_and_generate_if_due(settings: Train, trainer: Trainer) -> None:
    """Evaluate and draw what is due after the batch of the checkpoint, before a training goes on from there.

    A signal or a crash may have ended the earlier run before it did so. An evaluation that the checkpoint already has
    is not made again. If the budget is spent, nothing is evaluated or generated.
    """
    state = trainer.state
    batch = state.timestamp.batch.value
    evaluated = None
    for callback in state.callbacks:
        if isinstance(callback, Spending) and callback.was_spent:
            return
        if isinstance(callback, HeldOutLoss):
            evaluated = callback.found['eval_batch']
    if state.evaluators and batch != evaluated and is_due(batch, settings.eval_interval, settings.max_duration):
        trainer.eval()
    for callback in state.callbacks:
        if isinstance(callback, Sampling):
            callback.draw_if_due(state, trainer.logger)


def less_memory(settings: Train) -> str:
    """Say what to do where the memory of a device has run out in a training; what was given already is left out."""
    advice = 'use a GPU with more memory'
    changes = changes_that_take_less(settings)
    if changes:
        advice = f'use {", or ".join(changes)}; --dry_run with the same flags says which of these fit'
    return f'--device_train_microbatch_size {settings.device_train_microbatch_size} is too large; {advice}'


def fit(settings: Train, trainer: Trainer, stop: GracefulStop) -> dict[str, Any]:
    """Train to the end, and return how that was.

    It is a `status`: complete, interrupted (Ctrl-C or SIGTERM, as `stop` has noted) or failed; where the training
    failed the `error` in one line; and the `first_batch`, after which it began.
    """
    # the training, which may have nothing but its last evaluation and drawing left
    first_batch = trainer.state.timestamp.batch.value
    outcome = {'first_batch': first_batch, 'status': COMPLETE}
    try:
        with warnings.catch_warnings():
            for words in COMPOSERS_WARNINGS:
                warnings.filterwarnings('ignore', words)
            if first_batch > 0:
                evaluate_and_generate_if_due(settings, trainer)
            if first_batch < to_batches(settings.max_duration):
                trainer.fit()
    except Exception as error:
        trainer.engine.close()  # without the other ranks, which may be gone; here W&B sees that the run has failed
        reason = known_reason(error, less_memory(settings))
        if reason is None:  # nobody foresaw it: its traceback says where it was
            traceback.print_exception(error)
            reason = f'{type(error).__name__}: {one_line(error, 500)}'
        outcome |= {'status': FAILED, 'error': redacted(reason)}
    if stop.interrupted and outcome['status'] != FAILED:
        outcome['status'] = INTERRUPTED
    return outcome


def training_record(settings: Train, model: ComposerModel, data: DataSpec, trainer: Trainer,
                    outcome: dict[str, Any]) -> dict:
    """Return the record of a training that ended as `outcome` of `fit` says."""
    # what was trained, and how it ended
    batches = trainer.state.timestamp.batch.value
    found = {
        'tf32': torch.cuda.is_available() and torch.cuda.is_tf32_supported(),  # Composer uses it where it is there
        'trained_batches': batches,
        'trained_epochs': batches // settings.batches_per_epoch,
        'tflops_per_image': sum(model.flops_per_image.values()) / 1e12,
        'gpus_per_node': dist.get_local_world_size(),
        'captions': getattr(data.dataloader.dataset, 'captions', None),
        **outcome,
    }

    # what each callback has to say
    all_ranks = outcome['status'] != FAILED  # else they may be gone
    for callback in trainer.state.callbacks:
        if hasattr(callback, 'figures'):
            found |= callback.figures(all_ranks)

    # what follows from these
    bad = set(data.batch_transforms.found)
    if all_ranks:
        bad.update(*dist.all_gather_object(bad))
    found['bad_samples'] = len(bad)
    if found['status'] == COMPLETE and not found['images_per_sec']:
        found['status'] = UNMEASURED
    elif settings.profile and found['status'] == COMPLETE:
        found['status'] = PROFILED
    return make_record('train', settings, found)


def finish_run(settings: Train, trainer: Trainer, record: dict) -> None:
    """Close the loggers, keep the record, print its summary, and end the process unless the training completed.

    Raises DataError if it failed or the record could not be kept, and SystemExit if it was interrupted.
    """
    # the summary, but of a run that failed its error says all
    text = None
    if record['status'] != FAILED:
        text = run_summary(record, settings)

    # where a run stopped before its end, and how to go on
    if record['status'] == INTERRUPTED:
        remedy = '--autoresume'
        text += f'\n{"stopped":<15} after batch {record["trained_batches"]}'
        if settings.budget is not None and record['dollars'] >= settings.budget:
            text += f', for --budget {settings.budget:g} is spent'
            remedy += ' and a larger one'
        if settings.save_folder:
            text += f'; a checkpoint is in {settings.save_folder}: the same command with {remedy} goes on'
        else:
            text += '; without --save_folder nothing was saved'

    # the end of the loggers and callbacks, which a failure has ended already, and the record
    if record['status'] != FAILED:
        numbers = {key: value for key, value in record.items() if type(value) in (int, float)}
        trainer.logger.log_metrics(numbers)  # each is a curve of one point
        trainer.close()
    append_record(record, text, settings.results_file)

    # With it a training is over. What lies beside the checkpoints is there for whoever starts the command again.
    if settings.save_folder and record['status'] not in (FAILED, INTERRUPTED) and dist.get_global_rank() == 0:
        write_beside(settings.save_folder, RECORD, json.dumps(record))

    # the end of the process
    if record['status'] == INTERRUPTED:
        # Composer's launcher cannot be told to end quietly: it prints the traceback of its own handler of the signal,
        # and reports any status but 0. A status of 0 would tell whoever starts the command again that all is done.
        if launcher_variable('LOCAL_RANK') is not None:
            print_on_rank_0('A traceback and "exited with code 130" around this summary come from the launcher and are '
                            'harmless.')
        sys.exit(130 if dist.get_local_rank() == 0 else 0)  # a launcher would print all that a rank has printed
    if record['status'] == FAILED:
        failed_batch = trainer.state.timestamp.batch.value + 1
        raise DataError(f'the run failed at batch {failed_batch}: {record["error"]}')
