"""Learning rate schedules, Min-SNR loss weights, gradient clipping, and protection from steps that are not finite."""
import torch
from composer import Callback, optim
from composer.core import Precision
from composer.utils import dist

from sdbench.errors import DataError

MOST_SKIPS_IN_A_ROW = 10  # after more skipped steps the weights will not recover
GRADIENT_NORM = 'l2_norm/grad/global'  # the name in Composer's OptimizerMonitor
SCHEDULES = {  # each without and with a warm-up
    'constant': (optim.ConstantScheduler, optim.ConstantWithWarmupScheduler),
    'cosine': (optim.CosineAnnealingScheduler, optim.CosineAnnealingWithWarmupScheduler),
    'linear': (optim.LinearScheduler, optim.LinearWithWarmupScheduler),
}


def build_schedule(name: str, warmup: str | None, final: float = 0.0) -> optim.ComposerScheduler:
    """Build a schedule of multiples of --learning_rate. `final` is the last multiple of cosine and linear."""
    plain, with_warmup = SCHEDULES[name]
    end = {'alpha_f': final} if final else {}  # the constant schedules do not take this argument
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
    """Stops the run at a loss or gradient that is inf or NaN, or skips the step, and clips the gradients of all others.

    Gradients can be inf or NaN even if the loss is finite, and one such step ruins the weights and the EMA. In fp16
    such gradients are expected: Composer's GradScaler skips the step and lowers its scale.

    Args:
        on_nan: 'stop' ends the run at a loss or gradient that is not finite; 'skip' skips the step, up to
            MOST_SKIPS_IN_A_ROW times.
        clip_grad_norm: largest allowed norm of all gradients of a step; None for no limit.

    Logs `l2_norm/grad/global`, the norm of all gradients of a step before clipping.
    """

    def __init__(self, on_nan: str = 'stop', clip_grad_norm: float | None = None):
        self.on_nan = on_nan
        self.clip_grad_norm = clip_grad_norm
        self.skipped_batches = 0
        self._skips_in_a_row = 0
        self._loss: float | torch.Tensor = 0.0  # sum over the microbatches of this batch so far

    def before_train_batch(self, state, logger) -> None:
        self._loss = 0.0

    def after_loss(self, state, logger) -> None:
        self._loss = self._loss + state.loss.detach()

    def after_train_batch(self, state, logger) -> None:
        """Agree with the other ranks on whether the optimizer steps, and clip the gradients."""
        # Compute the norm of the gradients. The optimizer has a list of its parameters, which is faster than a search
        # through all modules of the model.
        parameters = []
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                parameters += group['params']
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)

        # All ranks must make the same decision, because their gradients are averaged. With one tensor for all three
        # values, the CPU waits for the GPU only once.
        agreed = torch.stack([torch.isfinite(self._loss), torch.isfinite(norm), norm])  # float32
        dist.all_reduce(agreed, 'MIN')
        loss_is_finite, gradients_finite, norm_in_log = agreed.tolist()
        logger.log_metrics({GRADIENT_NORM: norm_in_log})
        # In fp16 the GradScaler handles such gradients itself. Ask for the precision and not for an enabled scaler:
        # Composer 0.32.1 has an enabled one in every precision.
        gradients_finite = gradients_finite or state.precision == Precision.AMP_FP16

        # Clip here. Composer's own GradientClipping runs before callbacks and turns gradients with an infinite norm to
        # zeros, which would hide them.
        if loss_is_finite and gradients_finite:
            self._skips_in_a_row = 0
            if self.clip_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_grad_norm, norm)
        else:
            self._stop_or_skip(state, 'a gradient' if loss_is_finite else 'the loss')

    def _stop_or_skip(self, state, what: str) -> None:
        """Skip the step, or raise DataError."""
        found = f'{what} of batch {state.timestamp.batch.value + 1} is not finite'
        if self.on_nan == 'stop':
            raise DataError(f'{found}, at microbatch size {state.device_train_microbatch_size}; --on_nan skip skips '
                            'such steps')
        self.skipped_batches += 1
        self._skips_in_a_row += 1
        if self._skips_in_a_row > MOST_SKIPS_IN_A_ROW:
            raise DataError(f'{found}, and the {MOST_SKIPS_IN_A_ROW} steps before it were skipped for the same reason; '
                            'resume from an earlier checkpoint with another --precision')
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)  # without gradients the optimizer changes nothing

    def state_dict(self) -> dict:
        return {'skipped_batches': self.skipped_batches}

    def load_state_dict(self, state: dict) -> None:
        self.skipped_batches = state.get('skipped_batches', 0)

    def metrics_for_record(self, all_ranks: bool) -> dict:
        return self.state_dict()  # the same on all ranks
