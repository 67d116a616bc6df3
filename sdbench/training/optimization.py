"""Build the schedule of the learning rate, and weigh the losses of a batch."""
import torch
from composer import optim

ADAM_MOMENTS = 2  # that the optimizer keeps of each weight
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
