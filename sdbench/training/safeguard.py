"""What lets a run of days survive: an exact resume, and a finite loss."""
import numpy as np
import torch
from composer import Callback
from composer.core import Precision
from composer.utils import dist

from sdbench.errors import DataError
from sdbench.inputs.stream import VerifiedDataset
from sdbench.training.compatibility import require_same_run

MOST_SKIPS_IN_A_ROW = 10  # after so many steps that were left out the weights will not recover
GRADIENT_NORM = 'l2_norm/grad/global'  # as Composer's OptimizerMonitor calls it


class NonFiniteStep(DataError):
    """The loss of a batch, or a gradient of it, is infinite or not a number."""


def lay_out_as_weights(optimizer: torch.optim.Optimizer) -> None:
    """Bring an optimizer's moments into the memory format of their weights, and out of the file that they lie in.

    A checkpoint has them in the format of its run, and a fused optimizer pairs weights and moments as they lie in
    memory. On a CPU they are still mapped from the checkpoint, which may be removed.
    """
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            if moment.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter).copy_(moment)
            else:
                moments[name] = moment.clone()  # the number of the step


def trained_parameters(state) -> list[torch.nn.Parameter]:
    """Return what the optimizer moves. It has a list; a model would be searched through all its modules."""
    parameters = []
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            parameters += group['params']
    return parameters


class Safeguard(Callback):
    """Makes each batch's noise depend on its number alone, and stops or leaves out a step that is not finite.

    A loss can be finite where a gradient is not, and one such step ruins weights and average. With fp16, gradients that
    are not finite are expected: Composer's GradScaler leaves such a step out and lowers its scale.

    Composer restores the random state in the middle of an epoch only where it spins the loader itself, so every batch
    has a seed of its own, by run, batch and rank.

    Args:
        seed: of the run.
        on_nan: 'stop' ends the run at a loss or gradient that is not finite, 'skip' leaves that step out, up to
            MOST_SKIPS_IN_A_ROW.
        flags: of `flags_to_keep`, which a run that resumes compares with those in the checkpoint. Without any it
            compares none.
        clip_grad_norm: what the norm of all gradients of a step is scaled down to, where it is larger; None: it stays.

    Logs `l2_norm/grad/global`, the norm of all gradients of a step before they are clipped.
    """

    def __init__(self, seed: int, on_nan: str = 'stop', flags: dict | None = None,
                 clip_grad_norm: float | None = None):
        self.seed = seed
        self.on_nan = on_nan
        self.flags = flags or {}
        self.clip_grad_norm = clip_grad_norm
        self.skipped_batches = 0
        self.first_batch = 0  # of this process: more than 0 where it resumed
        self._skips_in_a_row = 0
        self._loss: float | torch.Tensor = 0.0  # of the microbatches of this batch so far

    def fit_start(self, state, logger) -> None:
        """Let the data and the optimizer go on where the weights are."""
        self.first_batch = state.timestamp.batch.value
        dataset = state.train_dataloader.dataset
        if self.first_batch and isinstance(dataset, VerifiedDataset):
            dataset.resume_at(state.timestamp.epoch.value, state.timestamp.sample_in_epoch.value)
        for optimizer in state.optimizers:
            lay_out_as_weights(optimizer)

    def batch_start(self, state, logger) -> None:
        """Seed the batch's noise and timesteps."""
        seeds = np.random.SeedSequence((self.seed, state.timestamp.batch.value, dist.get_global_rank()))
        torch.manual_seed(int(seeds.generate_state(1)[0]))

    def before_train_batch(self, state, logger) -> None:
        self._loss = 0.0

    def after_loss(self, state, logger) -> None:
        self._loss = self._loss + state.loss.detach()

    def after_train_batch(self, state, logger) -> None:
        """Agree with the other ranks, before the optimizer steps, on whether it does, and clip the gradients.

        A GPU is waited for once. The norm that tells whether the gradients are finite is the one that they are clipped
        by: Composer's own GradientClipping comes before callbacks, and makes zeros of gradients whose norm is infinite.
        """
        parameters = trained_parameters(state)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        agreed = torch.stack([torch.isfinite(self._loss), torch.isfinite(norm), norm])  # float32
        dist.all_reduce(agreed, 'MIN')  # the ranks' gradients are one: all step, or none
        loss_is_finite, gradients_finite, norm_in_log = agreed.tolist()
        logger.log_metrics({GRADIENT_NORM: norm_in_log})
        # the GradScaler of fp16 looks itself; Composer 0.32.1 makes one in every precision, on a GPU always enabled
        gradients_finite = gradients_finite or state.precision == Precision.AMP_FP16
        if loss_is_finite and gradients_finite:
            self._skips_in_a_row = 0
            if self.clip_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_grad_norm, norm)
        else:
            self._stop_or_skip(state, 'a gradient' if loss_is_finite else 'the loss')

    def _stop_or_skip(self, state, what: str) -> None:
        """Leave the step out, or raise NonFiniteStep."""
        label = f'of batch {state.timestamp.batch.value + 1}'
        if self.on_nan == 'stop':
            raise NonFiniteStep(f'{what} {label} is not finite, at microbatch size '
                                f'{state.device_train_microbatch_size}; --on_nan skip leaves such steps out')
        self.skipped_batches += 1
        self._skips_in_a_row += 1
        if self._skips_in_a_row > MOST_SKIPS_IN_A_ROW:
            raise NonFiniteStep(f'{what} {label} is not finite, and {MOST_SKIPS_IN_A_ROW} steps before it were left '
                                'out for that; go on from an earlier checkpoint, in another precision or with '
                                'another seed')
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)  # without gradients the step changes nothing

    def figures(self, all_ranks: bool) -> dict:
        """Return the record's figures of steps that were left out, which all ranks agree on."""
        return {'first_batch': self.first_batch, 'skipped_batches': self.skipped_batches}

    def state_dict(self) -> dict:
        return {'flags': self.flags}

    def load_state_dict(self, state: dict) -> None:
        """Raise ValueError if a flag of the run that is resumed had another value, DatasetChanged if the data had."""
        if self.flags:
            require_same_run(state['flags'], self.flags)
