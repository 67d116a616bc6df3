"""Start a training, run it to its end, and write its record."""
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
from sdbench.flags.times import to_batches
from sdbench.flags.train import SD2_BASE, TINY_COMMAND, Run
from sdbench.flags.training_command import caution_about_steps
from sdbench.inputs.batches import CAPTIONS
from sdbench.inputs.shards import index_hash
from sdbench.models.loading import weight_files
from sdbench.process import launcher_variable
from sdbench.records.record import append_record, make_record
from sdbench.records.status import COMPLETE, FAILED, INTERRUPTED, PROFILED, UNMEASURED
from sdbench.records.summary import run_summary
from sdbench.stores import read_file, write_file
from sdbench.training.checkpoints import RECORD
from sdbench.training.end_of_batch import EndOfBatch
from sdbench.training.loggers import TRACE_WARMUP, TRACED_BATCHES
from sdbench.training.microbatch import less_memory
from sdbench.training.ranks import on_rank_0, print_on_rank_0

# Composer warns about a smaller last batch of an evaluation and about a resume at the end of an epoch. Both are normal.
COMPOSERS_WARNINGS = ('Cannot split tensor of length', 'No batches were trained')


def announce_build(settings: Run) -> None:
    """Print on rank 0 that the model is being built, because this and the first batch can take minutes.

    On a CPU it warns that Stable Diffusion 2 is slow, and raises UserError if the machine has too little memory.
    Otherwise a newcomer's first command would run for hours, or fill the memory of a laptop until the system stalls.
    """
    if settings.model_name == SD2_BASE and not torch.cuda.is_available():
        # GB of weights, gradients, moments and encoders; of EMA weights; and of activations for the backward pass
        microbatch = settings.device_train_microbatch_size
        ema = 3.5 if settings.use_ema else 0
        needed = math.ceil(14.5 + ema + 2 * microbatch * (settings.image_size / 512) ** 2)
        available = int(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9)
        needs = (f'this machine has no GPU and {available} GB of memory; on a CPU, Stable Diffusion 2 needs '
                 f'{needed:,} GB for a microbatch of {plural(microbatch, "image")}')
        if needed > available:
            smaller = 'a smaller --device_train_microbatch_size, or ' if microbatch > 1 else ''
            raise UserError(f'{needs}; give {smaller}the tiny model: {TINY_COMMAND}')
        print_on_rank_0(f'warning: {needs}, and several seconds for each of the {settings.batch_size:,} images of a '
                        f'batch; the tiny model is faster: {TINY_COMMAND}')
    print_on_rank_0(f'building {redacted(settings.model_name)} for images of {settings.image_size} px, '
                    f'{settings.batch_size:,} a batch, on {plural(dist.get_world_size(), "device")}')


def begin_run(settings: Run, model: ComposerModel, trainer: Trainer, checkpoint: str | None, training_id: str) -> None:
    """Log the settings, and print on rank 0 where the run starts.

    Raises SystemExit if the training is already complete, and UserError if the run is too short for --profile.
    """
    # Count the FLOPs now, before the clock runs. Otherwise Composer's SpeedMonitor would do so between two batches.
    flops = {'flops_per_image': sum(model.flops_per_image.values())}
    trainer.logger.log_hyperparameters(make_record('train', settings, flops))

    # Exit with status 0 if nothing is left to do. A cluster that restarts the command then knows that it is done.
    batch = trainer.state.timestamp.batch.value
    batches = to_batches(settings.max_duration)
    if batch >= batches and is_recorded(settings, trainer, training_id):
        if dist.get_global_rank() == 0:
            print(f'--save_folder {settings.save_folder} holds batch {batch}, all of --max_duration '
                  f'{settings.max_duration}, and the record: nothing left to do; a longer --max_duration goes on')
        sys.exit(0)

    # Refuse a profile that would be empty.
    needed = settings.warmup_batches + TRACE_WARMUP + TRACED_BATCHES
    if settings.profile and batches - batch < needed:
        raise UserError(f'--profile {settings.profile} needs {needed} batches and traces the last {TRACED_BATCHES}, '
                        f'but the run has only {plural(batches - batch, "batch", "batches")} left; give a longer run, '
                        'or omit --profile')

    if dist.get_global_rank() == 0:
        announce_start(settings, trainer, checkpoint)


def is_recorded(settings: Run, trainer: Trainer, training_id: str) -> bool:
    """Tell whether the record next to the checkpoints is of this training and has its last evaluation.

    A record can be missing, because the run was killed before it wrote it; it can be of another training, whose
    checkpoints were removed; or the complete training is to be evaluated on other data now.
    """
    batch = trainer.state.timestamp.batch.value
    path = os.path.join(settings.save_folder, RECORD.format(batch=batch))
    content = on_rank_0(partial(read_file, path, f'--save_folder {settings.save_folder}'))
    if content is None:
        return False
    record = parse_json(content, path)
    evaluated = [(curve.get('eval_sha256'), curve.get('eval_batch'))
                 for curve in (record, *record.get('other_evaluations', ()))]
    has_evaluations = all((index_hash(evaluator.dataloader.dataloader.dataset.index), batch) in evaluated
                          for evaluator in trainer.state.evaluators)
    return has_evaluations and record.get('training_id') == training_id


def announce_start(settings: Run, trainer: Trainer, checkpoint: str | None) -> None:
    """Print where the weights come from, and warn of results that the user may not expect."""
    state = trainer.state
    if settings.load_weights and not checkpoint:
        print(f'starting from the weights of {settings.load_weights}')
    elif settings.pretrained and not checkpoint and weight_files(Path(settings.model_name, 'unet')):
        print('the UNet starts from random weights, because --pretrained loads only the VAE and the text encoder; to '
              f'start from trained weights, give --load_weights {settings.model_name}')
    if checkpoint:
        print(f'resuming from {checkpoint}, batch {state.timestamp.batch.value} of {state.max_duration.value}')
    elif settings.autoresume:
        print(f'--save_folder {settings.save_folder} holds no checkpoint yet: starting from the first batch')

    caution = caution_about_steps(settings, state.train_dataloader.dataset.num_samples)
    if caution and not checkpoint:
        print(f'warning: {caution}', file=sys.stderr)
    if not settings.measures and not settings.save_folder:
        print(f'warning: without --save_folder the weights are lost after these {settings.max_duration}',
              file=sys.stderr)
    if (settings.save_folder or settings.eval_remote) and not settings.pretrained:
        print('warning: without --pretrained the VAE and the text encoder have random weights, so the model cannot '
              'generate images, and its loss does not compare with other trainings; give --model_name FOLDER '
              '--pretrained', file=sys.stderr)


def fit(settings: Run, trainer: Trainer, end_of_batch: EndOfBatch) -> dict[str, Any]:
    """Train to the end, and return the outcome for the record.

    The outcome has the `first_batch` after which this run started, a `status` (complete, interrupted by a signal or the
    budget, or failed), and the `error` in one line if the training failed.
    """
    # A resumed run may have all batches already, and lack only its last evaluation and images.
    first_batch = trainer.state.timestamp.batch.value
    outcome = {'first_batch': first_batch, 'status': COMPLETE}
    try:
        with warnings.catch_warnings():
            for message in COMPOSERS_WARNINGS:
                warnings.filterwarnings('ignore', message)
            end_of_batch.evaluate_and_generate(trainer.state, trainer.logger)
            if first_batch < to_batches(settings.max_duration):
                trainer.fit()
    except Exception as error:
        # Nothing from here on may wait for the other ranks, which may be gone. Closing the engine inside of `except`
        # lets W&B mark the run as failed. An error without a known reason is a bug, and keeps its traceback.
        trainer.engine.close()
        reason = known_reason(error, f'--device_train_microbatch_size {settings.device_train_microbatch_size} is too '
                                     f'large; {less_memory(settings)}')
        if reason is None:
            traceback.print_exception(error)
            reason = f'{type(error).__name__}: {one_line(error, 500)}'
        outcome |= {'status': FAILED, 'error': redacted(reason)}
    if end_of_batch.stop.interrupted and outcome['status'] != FAILED:
        outcome['status'] = INTERRUPTED
    return outcome


def training_record(settings: Run, model: ComposerModel, data: DataSpec, trainer: Trainer,
                    outcome: dict[str, Any]) -> dict:
    """Return the record of a training. `outcome` is what `fit` returned."""
    # Collect the length of the training, its FLOPs, and the outcome.
    batches = trainer.state.timestamp.batch.value
    found = {
        'tf32': torch.cuda.is_available() and torch.cuda.is_tf32_supported(),  # Composer turns it on if it can
        'trained_batches': batches,
        'trained_epochs': batches // settings.batches_per_epoch,
        'tflops_per_image': sum(model.flops_per_image.values()) / 1e12,
        'gpus_per_node': dist.get_local_world_size(),
        'captions': getattr(data.dataloader.dataset, 'index', {}).get(CAPTIONS),  # random images have no index
        **outcome,
    }

    # Add the metrics that callbacks have collected. After a failure, do not wait for other ranks.
    all_ranks = outcome['status'] != FAILED
    for callback in trainer.state.callbacks:
        if hasattr(callback, 'metrics_for_record'):
            found |= callback.metrics_for_record(all_ranks)

    # Count the bad samples of all ranks, each once, and mark runs whose speed must not be reported.
    bad = set(data.batch_transforms.found)
    if all_ranks:
        bad.update(*dist.all_gather_object(bad))
    found['bad_samples'] = len(bad)
    if found['status'] == COMPLETE and not found['images_per_sec']:
        found['status'] = UNMEASURED
    elif settings.profile and found['status'] == COMPLETE:
        found['status'] = PROFILED
    return make_record('train', settings, found)


def finish_run(settings: Run, trainer: Trainer, record: dict) -> None:
    """Close the loggers, append the record to --results, print its summary, and end the process if it is incomplete.

    Raises DataError if the training failed or the record could not be written, and SystemExit if it was interrupted.
    """
    # A failed run prints its error instead of a summary.
    text = None
    if record['status'] != FAILED:
        text = run_summary(record, settings)

    # An interrupted run says where it stopped and how to resume it.
    if record['status'] == INTERRUPTED:
        remedy = '--autoresume'
        text += f'\n{"stopped":<15} after batch {record["trained_batches"]}'
        if settings.budget is not None and record['dollars'] >= settings.budget:
            text += f', because --budget {settings.budget:g} is spent'
            remedy += ' and a larger --budget'
        if not settings.save_folder:
            text += '; without --save_folder nothing was saved'
        elif record['trained_batches'] > 0:
            text += f'; a checkpoint is in {settings.save_folder}: the same command with {remedy} resumes from it'

    # Close the loggers before the record is written. After a failure, `fit` has already closed them.
    if record['status'] != FAILED:
        numbers = {key: value for key, value in record.items() if type(value) in (int, float)}
        trainer.logger.log_metrics(numbers)  # each number becomes a curve with one point
        trainer.close()
    append_record(record, text, settings.results)

    # Save the record next to the checkpoints. If the command is started again, the record shows that the training is
    # complete.
    if settings.save_folder and record['status'] not in (FAILED, INTERRUPTED) and dist.get_global_rank() == 0:
        path = os.path.join(settings.save_folder, RECORD.format(batch=record['trained_batches']))
        write_file(path, json.dumps(record).encode(), f'--save_folder {settings.save_folder}')

    # End the process with a status other than 0 unless the training is complete: 0 would tell a cluster not to restart
    # the command. For such a status Composer's launcher prints a traceback, and everything that a rank has printed, so
    # only one rank per machine has it.
    if record['status'] == INTERRUPTED:
        if launcher_variable('LOCAL_RANK') is not None:
            print_on_rank_0('A traceback and "exited with code 130" around this summary come from the launcher and are '
                            'harmless.')
        sys.exit(130 if dist.get_local_rank() == 0 else 0)
    if record['status'] == FAILED:
        batches = record['trained_batches']
        place = f'at batch {batches + 1}'
        if batches >= to_batches(settings.max_duration):
            place = f'after its last batch, {batches}'
        raise DataError(f'the run failed {place}: {record["error"]}')
