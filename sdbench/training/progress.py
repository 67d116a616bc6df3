"""Show the progress of a training, and what it has learned by the loss on held-out samples."""
import math
import sys

from composer import Callback
from composer.core import State
from composer.utils import dist
from torch.utils.data import Dataset
from tqdm import tqdm

from sdbench.process import progress_bar
from sdbench.training.compatibility import SameRun, was_trained_on
from sdbench.training.spending import Spending

METRIC = 'MeanSquaredError'  # of an evaluation; Composer logs it as metrics/eval/MeanSquaredError


class Progress(Callback):
    """Shows on rank 0 the progress of the whole training: images, speed, time left, the batch, its loss and dollars.

    Composer's own bar counts the batches of an epoch only, and in a log it writes a line for each batch.

    Args:
        batch_size: images of a batch, over all ranks.
    """

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self.bar: tqdm | None = None

    def fit_start(self, state: State, logger) -> None:
        images = state.max_duration.value * self.batch_size
        self.bar = progress_bar(images, ' images', state.timestamp.sample.value, hidden=dist.get_global_rank() > 0)

    def batch_end(self, state: State, logger) -> None:
        """Show the batch with its loss, unless it was skipped, and the dollars until now, where a price is given."""
        parts = [f'batch {state.timestamp.batch.value}']
        loss = state.total_loss_dict.get('loss/train/total')
        if loss is not None:
            parts.append(f'loss {float(loss):.3f}')
        for callback in state.callbacks:
            if isinstance(callback, Spending):
                dollars = callback.so_far()['dollars']
                if dollars is not None:
                    parts.append(f'${dollars:,.2f}')
        self.bar.set_postfix_str(', '.join(parts), refresh=False)
        self.bar.update(self.batch_size)

    def close(self, state: State, logger) -> None:
        """Close the bar, so that what is printed next begins a new line."""
        if self.bar is not None:
            self.bar.close()


def is_held_out(state: State, samples: Dataset) -> bool:
    """Tell whether the samples of an evaluation are known to be held out from all that the weights were trained on.

    In a program without SameRun, which keeps what they were trained on, that is never known.
    """
    for callback in state.callbacks:
        if isinstance(callback, SameRun):
            return was_trained_on(callback.flags, samples.index) is False
    return False


class HeldOutLoss(Callback):
    """Says the loss on held-out samples at each evaluation on rank 0, and remembers what the record says of them."""

    def __init__(self):
        self.found = {'evaluations': [], 'eval_loss': None, 'eval_batch': None, 'eval_samples': None,
                      'eval_held_out': None}

    def eval_end(self, state: State, logger) -> None:
        # what the record has, which all ranks know
        loss = float(state.eval_metrics[state.dataloader_label][METRIC].compute())  # over all ranks
        batch = state.timestamp.batch.value
        samples = state.dataloader.dataset
        is_known = is_held_out(state, samples)
        kept = loss if math.isfinite(loss) else None
        self.found['evaluations'].append([state.timestamp.sample.value, kept])
        self.found |= {'eval_loss': kept, 'eval_batch': batch, 'eval_samples': len(samples),
                       'eval_held_out': is_known}

        # what people see, over the bar
        which = 'the held-out samples'
        if not is_known:
            which = 'samples that are not known to be held out'
        if dist.get_global_rank() == 0:
            tqdm.write(f'batch {batch}: loss {loss:.4g} on {which}', file=sys.stderr)

    def state_dict(self) -> dict:
        return self.found  # so that the record of a resumed training has the evaluations of all of it

    def load_state_dict(self, state: dict) -> None:
        self.found = state

    def figures(self, all_ranks: bool) -> dict:
        return self.found
