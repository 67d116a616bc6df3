"""What lets a run of days survive: an exact resume, signals that lose nothing, a finite loss."""
import math
import signal
import time
from collections.abc import Callable

import numpy as np
import torch
from composer import Callback
from composer.core import Precision
from composer.utils import dist

from inputs.verified_stream import VerifiedDataset
from measuring.record import redacted
from training.ranks import SECONDS_FOR_A_BATCH, failure_of_ranks, wait_at_most
from training.signal_watch import SignalWatch

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LEAST_SECONDS_TO_AGREE = 15  # after a signal, for the ranks to reach the end of a batch together
SECONDS_TO_NOTICE = 3  # for the main thread, that a collective has ended
BATCHES_TO_AGREE = 2  # that may take longer: the one under way, and the next on a rank that heard of it late
DATASET = 'dataset'  # among the flags of a checkpoint: the hash of the index of its --remote
MOST_SKIPS_IN_A_ROW = 10  # after so many steps that were left out the weights will not recover


class NonFiniteStep(Exception):
    """The loss of a batch, or a gradient of it, is infinite or not a number."""


class Safeguard(Callback):
    """Makes each batch's noise depend on its number alone, stops what is not finite, and lets no signal cut an update.

    A loss can be finite where a gradient is not, and one such step ruins weights and average. With fp16, gradients that
    are not finite are expected: Composer's GradScaler leaves such a step out and lowers its scale.

    Composer restores the random state in the middle of an epoch only where it spins the loader itself, so every batch
    has a seed of its own, by run, batch and rank. From a step's gradients to the end of its batch weights, optimizer
    and EMA change; a signal waits for that, so that at any other time the state is that of the last batch. Several
    ranks agree on a last batch: one that left alone would leave the others waiting for it on their GPUs.

    Args:
        seed: of the run.
        on_nan: 'stop' ends the run at a loss or gradient that is not finite, 'skip' leaves that step out, up to
            MOST_SKIPS_IN_A_ROW.
        flags: those that must be the same when the run resumes, with their values.
        clip_grad_norm: what the norm of all gradients of a step is scaled down to, where it is larger; None: it stays.
    """

    def __init__(self, seed: int, on_nan: str = 'stop', flags: dict | None = None,
                 clip_grad_norm: float | None = None):
        self.seed = seed
        self.on_nan = on_nan
        self.flags = flags or {}
        self.clip_grad_norm = clip_grad_norm
        self.skipped_batches = 0
        self._skips_in_a_row = 0
        self._batch_seconds = 0.0  # of the batch before
        self._batch_start: float | None = None
        self.interrupted = False
        self.first_batch = 0  # of this process: more than 0 where it resumed
        self.updating = False  # between two consistent states
        self._loss: float | torch.Tensor = 0.0  # of the microbatches of this batch so far
        self._stop = False
        self._handlers_before: dict = {}  # of SIGNALS
        self._conclude: Callable[[], None] | None = None  # what to do where a signal cannot be answered otherwise
        self._watch: SignalWatch | None = None

    def conclude_when_stuck(self, conclude: Callable[[], None]) -> None:
        """Before the run starts: what a thread does where a signal came and the main one waits for another rank."""
        self._conclude = conclude

    def leave_update(self) -> None:
        """The weights are those of a whole batch again, as after an evaluation that was left in its middle."""
        self.updating = False

    def fit_start(self, state, logger) -> None:
        """Take the signals over, and let the data go on where the weights are."""
        self._handlers_before = {number: signal.signal(number, self._interrupt) for number in SIGNALS}
        if dist.get_world_size() > 1 and self._conclude is not None:
            self._watch = SignalWatch(SIGNALS, lambda: seconds_to_answer(self._batch_seconds), self._conclude)
        self.first_batch = state.timestamp.batch.value
        dataset = state.train_dataloader.dataset
        if self.first_batch and isinstance(dataset, VerifiedDataset):
            dataset.resume_at(state.timestamp.epoch.value, state.timestamp.sample_in_epoch.value)

    def batch_start(self, state, logger) -> None:
        """Seed the batch's noise and timesteps."""
        now = time.monotonic()
        if self._batch_start is not None:
            self._batch_seconds = now - self._batch_start
        self._batch_start = now
        seeds = np.random.SeedSequence((self.seed, state.timestamp.batch.value, dist.get_global_rank()))
        torch.manual_seed(int(seeds.generate_state(1)[0]))

    def before_train_batch(self, state, logger) -> None:
        self._loss = 0.0

    def after_loss(self, state, logger) -> None:
        self._loss = self._loss + state.loss.detach()

    def after_train_batch(self, state, logger) -> None:
        """Before the optimizer steps: agree with the other ranks on whether to take the step, and on going on.

        A GPU is waited for once. The norm that tells whether the gradients are finite is the one that they are clipped
        by: Composer's own GradientClipping comes before callbacks, and makes zeros of gradients whose norm is infinite.
        """
        gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        go_on = torch.tensor(not self.interrupted, device=self._loss.device)
        agreed = torch.stack([torch.isfinite(self._loss), torch.isfinite(norm), go_on]).int()
        dist.all_reduce(agreed, 'MIN')  # the ranks' gradients are one: all step, or none
        loss_is_finite, gradients_finite, go_on = agreed.tolist()
        # the GradScaler of fp16 looks itself; Composer 0.32.1 makes one in every precision, on a GPU always enabled
        gradients_finite = gradients_finite or state.precision == Precision.AMP_FP16
        self._stop = not go_on
        if loss_is_finite and gradients_finite:
            self._skips_in_a_row = 0
            if self.clip_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(state.model.parameters(), self.clip_grad_norm, norm)
        else:
            self._stop_or_skip(state, 'a gradient' if loss_is_finite else 'the loss')
        self.updating = True

    def _stop_or_skip(self, state, what: str) -> None:
        """Leave the step out, or raise NonFiniteStep."""
        place = f'of batch {state.timestamp.batch.value + 1}'
        if self.on_nan == 'stop':
            raise NonFiniteStep(f'{what} {place} is not finite, at microbatch size '
                                f'{state.device_train_microbatch_size}; --on_nan skip leaves such steps out')
        self.skipped_batches += 1
        self._skips_in_a_row += 1
        if self._skips_in_a_row > MOST_SKIPS_IN_A_ROW:
            raise NonFiniteStep(f'{what} {place} is not finite, and {MOST_SKIPS_IN_A_ROW} steps before it were left '
                                'out for that; go on from an earlier checkpoint, in another precision or with '
                                'another seed')
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)  # without gradients the step changes nothing

    def batch_end(self, state, logger) -> None:
        self.updating = False
        if state.timestamp.batch.value == self.first_batch + 1:
            wait_at_most(SECONDS_FOR_A_BATCH)  # what takes long at a start, such as compiling, is over
        if self._stop:
            raise SystemExit

    def eval_before_all(self, state, logger) -> None:
        """An evaluation exchanges the weights with their average, in which no signal may cut in."""
        self.updating = True

    def eval_batch_end(self, state, logger) -> None:
        """Ranks agree after each batch of an evaluation on whether to go on with it."""
        interrupted = state.device.tensor_to_device(torch.tensor(int(self.interrupted)))
        dist.all_reduce(interrupted, 'MAX')
        if interrupted.item():
            raise SystemExit

    def eval_after_all(self, state, logger) -> None:
        self.updating = False
        if self._stop:
            raise SystemExit

    def state_dict(self) -> dict:
        return {'flags': self.flags}

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError if a flag of the run that is resumed had another value."""
        for flag, value in state['flags'].items():
            if isinstance(value, str):
                value = redacted(value)  # earlier versions kept passwords
            now = self.flags.get(flag)
            if now == value:
                continue
            if flag == DATASET:
                raise ValueError('the dataset of --remote was made anew since, its order is another: the hash of its '
                                 f'index was {value}, and is {now} now; give the old one, or a new --save_folder with '
                                 '--load_weights')
            raise ValueError(f'--{flag} was {value}, and is {now} now')

    def answer_signals(self) -> None:
        """From here on the main thread answers a signal itself, or has."""
        if self._watch is not None:
            self._watch.answer()
            self._watch = None

    def release_signals(self) -> None:
        """Leave SIGNALS to whom they were left to before the run."""
        self.answer_signals()
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame) -> None:
        """A signal's handler: ends a run of one rank at once, but for an update; several ranks agree on a batch."""
        ignore_signals()  # a launcher sends another, and the record comes first
        self.interrupted = True
        if dist.get_world_size() > 1 and number != signal.SIGALRM:
            signal.signal(signal.SIGALRM, self._interrupt)
            signal.alarm(seconds_to_agree(self._batch_seconds))
            return
        self._stop = True
        if not self.updating:
            raise SystemExit


def seconds_to_agree(batch_seconds: float) -> int:
    """How long ranks may take, after a signal, to agree on a last batch: long enough for the batches under way."""
    return max(LEAST_SECONDS_TO_AGREE, math.ceil(BATCHES_TO_AGREE * batch_seconds))


def seconds_to_answer(batch_seconds: float) -> int:
    """How long the main thread has to answer a signal, before a thread does it in its place.

    Where another rank has failed, the signal is the launcher's, which kills 30 s later, and the main thread may wait
    for that rank in vain.
    """
    if failure_of_ranks(None):
        return SECONDS_TO_NOTICE
    return seconds_to_agree(batch_seconds) + SECONDS_TO_NOTICE


def ignore_signals() -> None:
    """From here on, no signal ends this process: what follows is short, and must be whole."""
    signal.alarm(0)
    for number in SIGNALS:
        signal.signal(number, do_nothing)


def do_nothing(number: int, frame) -> None:
    """A signal's handler; with SIG_IGN in its place Python complains of a signal that came a moment before."""
