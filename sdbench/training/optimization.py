"""What a step learns: at which rate, of which images more, with clipped gradients, and only where all is finite."""
import torch
from composer import Callback, optim
from composer.core import Precision
from composer.utils import dist

from sdbench.errors import DataError

MOST_SKIPS_IN_A_ROW = 10  # after so many steps that were left out the weights will not recover
GRADIENT_NORM = 'l2_norm/grad/global'  # as Composer's OptimizerMonitor calls it
SCHEDULES = {  # without a warm-up, and after one
    'constant': (optim.ConstantScheduler, optim.ConstantWithWarmupScheduler),
    'cosine': (optim.CosineAnnealingScheduler, optim.CosineAnnealingWithWarmupScheduler),
    'linear': (optim.LinearScheduler, optim.LinearWithWarmupScheduler),
}


def build_schedule(name: str, warmup: str | None, final: float = 0.0) -> optim.ComposerScheduler:
    """Build the schedule of the learning rate, as multiples of --learning_rate.

    Args:
        name: one of SCHEDULES.
        warmup: time of the linear warm-up, such as 10000ba; None or empty: there is none.
        final: the multiple at which cosine and linear end.
    """
    plain, with_warmup = SCHEDULES[name]
    end = {'alpha_f': final} if final else {}  # constant has no end
    if warmup:
        return with_warmup(warmup, **end)
    return plain(**end)


def min_snr_weights(alphas_cumprod: torch.Tensor, gamma: float, prediction_type: str) -> torch.Tensor:
    """Return the Min-SNR loss weight of each image (Hang et al. 2023), as in diffusers' training scripts: float (B,).

    Args:
        alphas_cumprod: float (B,), of the timesteps of the images.
        gamma: the signal-to-noise ratio (SNR) above which an image weighs less.
        prediction_type: epsilon or v_prediction.
    """
    snr = alphas_cumprod / (1 - alphas_cumprod)
    if prediction_type == 'epsilon':
        return (gamma / snr).clamp(max=1)  # min(SNR, gamma) / SNR, and 1 where the SNR is 0
    return snr.clamp(max=gamma) / (snr + 1)


class FiniteSteps(Callback):
    """Stops the run at a step that is not finite, or leaves it out, and clips the gradients of the others.

    A loss can be finite where a gradient is not, and one such step ruins weights and average. With fp16, gradients that
    are not finite are expected: Composer's GradScaler leaves such a step out and lowers its scale.

    Args:
        on_nan: 'stop' ends the run at a loss or gradient that is not finite, 'skip' leaves that step out, up to
            MOST_SKIPS_IN_A_ROW.
        clip_grad_norm: what the norm of all gradients of a step is scaled down to, where it is larger; None: it stays.

    Logs `l2_norm/grad/global`, the norm of all gradients of a step before they are clipped.
    """

    def __init__(self, on_nan: str = 'stop', clip_grad_norm: float | None = None):
        self.on_nan = on_nan
        self.clip_grad_norm = clip_grad_norm
        self.skipped_batches = 0
        self._skips_in_a_row = 0
        self._loss: float | torch.Tensor = 0.0  # of the microbatches of this batch so far

    def before_train_batch(self, state, logger) -> None:
        self._loss = 0.0

    def after_loss(self, state, logger) -> None:
        self._loss = self._loss + state.loss.detach()

    def after_train_batch(self, state, logger) -> None:
        """Agree with the other ranks, before the optimizer steps, on whether it does, and clip the gradients."""
        # the norm of what the optimizer moves: it has a list, where a model would be searched through all its modules
        parameters = []
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                parameters += group['params']
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)

        # what all ranks agree on, as their gradients are one: a GPU is waited for once
        agreed = torch.stack([torch.isfinite(self._loss), torch.isfinite(norm), norm])  # float32
        dist.all_reduce(agreed, 'MIN')
        loss_is_finite, gradients_finite, norm_in_log = agreed.tolist()
        logger.log_metrics({GRADIENT_NORM: norm_in_log})
        # the GradScaler of fp16 looks itself; Composer 0.32.1 makes one in every precision, on a GPU always enabled
        gradients_finite = gradients_finite or state.precision == Precision.AMP_FP16

        # Composer's own GradientClipping comes before callbacks, and makes zeros of gradients whose norm is infinite
        if loss_is_finite and gradients_finite:
            self._skips_in_a_row = 0
            if self.clip_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_grad_norm, norm)
        else:
            self._stop_or_skip(state, 'a gradient' if loss_is_finite else 'the loss')

    def _stop_or_skip(self, state, what: str) -> None:
        """Leave the step out, or raise DataError."""
        found = f'{what} of batch {state.timestamp.batch.value + 1} is not finite'
        if self.on_nan == 'stop':
            raise DataError(f'{found}, at microbatch size {state.device_train_microbatch_size}; --on_nan skip leaves '
                            'such steps out')
        self.skipped_batches += 1
        self._skips_in_a_row += 1
        if self._skips_in_a_row > MOST_SKIPS_IN_A_ROW:
            raise DataError(f'{found}, and {MOST_SKIPS_IN_A_ROW} steps before it were left out for that; go on from '
                            'an earlier checkpoint, in another precision or with another seed')
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)  # without gradients the step changes nothing

    def state_dict(self) -> dict:
        return {'skipped_batches': self.skipped_batches}

    def load_state_dict(self, state: dict) -> None:
        self.skipped_batches = state['skipped_batches']

    def figures(self, all_ranks: bool) -> dict:
        """Return the record's figure of steps that were left out, which all ranks agree on."""
        return {'skipped_batches': self.skipped_batches}
