"""A training that is ready to start: how it begins, runs, ends and is recorded."""
import contextlib
import sys
from dataclasses import dataclass
from functools import partial

import torch
from composer import Trainer
from composer.core import DataSpec, State
from composer.utils import dist

from inputs.words import counted
from measuring.gpu_monitor import gather_gpu_figures
from measuring.measurement import Measurement, figures, total_batches, whole_epochs
from measuring.record import UNMEASURED, keep, redacted, summary, training_settings, uses_tf32
from measuring.tracing import PROFILED, where_to_look
from models.diffusion_model import DiffusionModel
from models.flops import utilization
from settings.train import Train
from training.checkpoints import save_interrupted
from training.evaluation import Evaluations, take_live_weights_back
from training.failures import reason
from training.loggers import log_record
from training.progress import Progress, batches_in_words
from training.ranks import failure_of_ranks, wait_for_rank_0
from training.safeguard import Safeguard, ignore_signals


class RunFailed(Exception):
    """A training ended early, or its record is lost; the text is for the user."""


@dataclass
class Run:
    """A training that is ready to start, and what its record will be made of."""
    settings: Train
    model: DiffusionModel
    data: DataSpec
    trainer: Trainer
    measurement: Measurement
    safeguard: Safeguard
    progress: Progress
    evaluations: Evaluations

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint that it resumes from is its last."""
        state = self.trainer.state
        batches = total_batches(state)
        if batches is not None:  # at the end of the last batch, Composer's epoch is not yet over
            return state.timestamp.batch.value >= batches
        return state.timestamp >= state.max_duration

    @property
    def microbatch_flag(self) -> str:
        return f'--device_train_microbatch_size {self.trainer.state.device_train_microbatch_size}'


def say_what_is_built(settings: Train) -> None:
    """On rank 0, since building and the first batch can take minutes."""
    if dist.get_global_rank() == 0:
        print(f'building {redacted(settings.model_name)} for images of {settings.image_size} px, '
              f'{settings.batch_size:,} a batch, on {counted(dist.get_world_size(), "device")}', file=sys.stderr,
              flush=True)


def say_how_it_begins(settings: Train, state: State, load_path: str | None) -> None:
    """On rank 0: what is resumed or started from, or that nothing will be kept."""
    if dist.get_global_rank():
        return
    if settings.load_weights and not load_path:
        print(f'starting from the weights of {settings.load_weights}')
    if load_path:
        print(f'resuming from {load_path}, {batches_in_words(state)}')
    elif settings.autoresume:
        print(f'--save_folder {settings.save_folder} holds no checkpoint yet: starting anew')
    elif settings.keeps_nothing:
        print(f'warning: without --save_folder nothing of these {settings.max_duration} will be kept', file=sys.stderr)


def train(run: Run) -> dict[str, str]:
    """Train; returns how it ended: complete, interrupted (Ctrl-C or SIGTERM) or failed, with the error in one line."""
    outcome = {'status': 'complete'}
    run.safeguard.conclude_when_stuck(partial(conclude_while_stuck, run))
    try:
        run.trainer.fit()
    except (SystemExit, KeyboardInterrupt):
        outcome = {'status': 'interrupted'}
        leave_evaluation(run)
    except Exception as error:
        if run.safeguard.interrupted:  # a worker or a rank was faster to go
            outcome = {'status': 'interrupted'}
        else:
            outcome = {'status': 'failed', 'error': redacted(reason(error, run.microbatch_flag))}
    run.safeguard.answer_signals()
    ignore_signals()
    run.progress.stop()
    if outcome['status'] != 'complete':
        error_of_others = failure_of_ranks(outcome.get('error'))
        if error_of_others:
            outcome = {'status': 'failed', 'error': error_of_others}
    return outcome


def leave_evaluation(run: Run) -> None:
    """Where a signal ended the run within an evaluation, the model holds the averages: take the live weights back."""
    take_live_weights_back(run.trainer.state, run.trainer.logger)
    run.safeguard.leave_update()


def training_record(run: Run, outcome: dict[str, str]) -> dict:
    """The record of a training that ended as `outcome` says."""
    microbatch = run.trainer.state.device_train_microbatch_size
    record = training_settings(run.settings, run.model.vae is None, microbatch) | outcome
    bad_samples = run.data.batch_transforms.found
    all_ranks = outcome['status'] == 'complete'
    record |= figures(run.measurement.window, all_ranks, bad_samples)
    record |= gather_gpu_figures(run.measurement.gpu, record['images_per_sec'], all_ranks)
    record['turnover_batches'] = run.measurement.turnover_batches
    if record['images_per_sec']:
        flops_per_image = sum(run.model.flops_per_image.values())
        record |= utilization(record['images_per_sec_per_device'], flops_per_image, run.settings.precision,
                              record['device'])
    record |= run.evaluations.figures()
    timestamp = run.trainer.state.timestamp
    record |= {'first_batch': run.safeguard.first_batch, 'trained_batches': timestamp.batch.value,
               'trained_epochs': whole_epochs(run.trainer.state), 'loss': run.measurement.loss,
               'skipped_batches': run.safeguard.skipped_batches}
    record |= {'microbatch_search': run.settings.searches_microbatch, 'tf32': uses_tf32()}
    if record['status'] == 'complete' and not record['images_per_sec']:
        record['status'] = UNMEASURED
    elif run.settings.profile and record['status'] == 'complete':
        record['status'] = PROFILED
    return record


def conclude(run: Run, outcome: dict[str, str]) -> dict:
    """Make the record and keep it; returns it if the run completed.

    Raises RunFailed if it failed or the record could not be kept, and SystemExit if it was interrupted.
    """
    record = training_record(run, outcome)
    log_record(run.trainer.logger.destinations, record)
    save_state = None
    if outcome['status'] == 'interrupted':
        save_state = partial(save_where_it_stopped, run)
    try:
        if outcome['status'] == 'complete':
            run.trainer.close()
        text = summary(record, run.settings.training_images, run.settings.dollars_per_gpu_hour)
        if record['status'] == PROFILED:
            text += f'\n{"trace":<15} {where_to_look(run.settings.profile)}'
        keep(record, text, run.settings.results, save_state)
    except Exception as error:
        raise RunFailed(redacted(reason(error, run.microbatch_flag))) from None
    if outcome['status'] == 'interrupted' or dist.get_global_rank() == 0:
        wait_for_rank_0()  # a launcher ends all ranks 30 s after the first
    if outcome['status'] == 'interrupted':
        sys.exit(130 if dist.get_local_rank() == 0 else 0)  # a launcher would print all that a rank has printed
    if outcome['status'] == 'failed':
        failed_batch = run.trainer.state.timestamp.batch.value + 1
        raise RunFailed(f'the run failed at batch {failed_batch}: {outcome["error"]}')
    return record


def conclude_while_stuck(run: Run) -> None:
    """In a thread, where a signal came and the main one waits for another rank: keep the record and the checkpoint.

    The weights are those of the last batch, since a step follows what the ranks do together. A GPU's own queue waits,
    too, so this reads from it in another.
    """
    if dist.get_global_rank() != 0:
        return
    own_queue = contextlib.nullcontext()
    if torch.cuda.is_available():
        own_queue = torch.cuda.stream(torch.cuda.Stream())
    with own_queue:
        outcome = {'status': 'interrupted'}
        failure = failure_of_ranks(None)
        if failure:
            outcome = {'status': 'failed', 'error': failure}
        print(f'{failure or "a signal came, and another rank does not answer"}: ending without it', file=sys.stderr)
        record = training_record(run, outcome)
        text = summary(record, run.settings.training_images, run.settings.dollars_per_gpu_hour)
        keep(record, text, run.settings.results, partial(save_where_it_stopped, run))


def save_where_it_stopped(run: Run) -> None:
    """Save what an interrupted run has learned, where it is to be kept, and say how to go on."""
    folder = run.settings.save_folder
    stopped = f'stopped at {batches_in_words(run.trainer.state)}'
    if not folder:
        print(f'{stopped}; without --save_folder nothing was saved')
    elif run.measurement.batches and not run.safeguard.updating:
        path = save_interrupted(run.trainer.state, folder)
        print(f'{stopped}; saved {path}; the same command with --autoresume goes on')
    else:
        print(f'{stopped}; the same command with --autoresume goes on from the newest checkpoint in {folder}')
