"""Show the progress of a training, and evaluate the loss on held-out samples."""
import math
import sys

from composer import Callback
from composer.core import State
from composer.utils import dist
from torch.utils.data import Dataset
from tqdm import tqdm

from sdbench.errors import redacted
from sdbench.inputs.shards import index_hash
from sdbench.process import progress_bar
from sdbench.training.compatibility import SameRun, was_trained_on
from sdbench.training.spending import Spending

METRIC = 'MeanSquaredError'  # name of the evaluation's metric, which Composer logs as metrics/eval/MeanSquaredError


class Progress(Callback):
    """Shows a progress bar on rank 0 for the whole training: images, speed, time left, batch, loss and dollars.

    Composer's own bar shows only the current epoch, and it writes one line per batch into a log file.

    Args:
        batch_size: images per batch, over all ranks.
    """

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self.bar: tqdm | None = None

    def fit_start(self, state: State, logger) -> None:
        images = state.max_duration.value * self.batch_size
        self.bar = progress_bar(images, ' images', state.timestamp.sample.value, hidden=dist.get_global_rank() > 0)

    def batch_end(self, state: State, logger) -> None:
        """Show the batch, its loss unless the step was skipped, and the dollars so far if there is a price."""
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
        """Close the bar, so the next output begins on a new line."""
        if self.bar is not None:
            self.bar.close()


def is_held_out(state: State, samples: Dataset) -> bool:
    """Tell whether an evaluation's samples are known to be held out from all data that the weights were trained on.

    The callback SameRun keeps the datasets of the training. In a program without SameRun the answer is always no.
    """
    for callback in state.callbacks:
        if isinstance(callback, SameRun):
            return was_trained_on(callback.flags, samples.index) is False
    return False


class HeldOutLoss(Callback):
    """Prints the loss on held-out samples at each evaluation on rank 0, and keeps the evaluations for the record.

    Losses on different data do not compare. If a resumed training is evaluated on other data, another curve begins, and
    the record has the earlier curves as `other_evaluations`.

    Args:
        eval_remote: the dataset as --eval_remote names it, for the record. None in another program.
    """

    def __init__(self, eval_remote: str | None = None):
        self.eval_remote = redacted(eval_remote) if eval_remote else None
        self.curves: list[dict] = []  # the keys of the record for each dataset; the last one was evaluated last

    def evaluated_batch(self, index: dict) -> int | None:
        """Return the batch of the newest evaluation on the dataset with this index.json; None if there is none."""
        for curve in self.curves:
            if curve['eval_sha256'] == index_hash(index):
                return curve['eval_batch']
        return None

    def eval_end(self, state: State, logger) -> None:
        # Find the curve of these data. It becomes the last one. A dataset of another program has no index.json.
        samples = state.dataloader.dataset
        index = getattr(samples, 'index', None)
        data = {'eval_remote': self.eval_remote, 'eval_sha256': index_hash(index) if isinstance(index, dict) else None}
        evaluations = []
        for curve in self.curves:
            if curve['eval_sha256'] == data['eval_sha256']:
                evaluations = curve['evaluations']
        self.curves = [curve for curve in self.curves if curve['eval_sha256'] != data['eval_sha256']]

        # Keep the result on all ranks, because each makes the record. A loss that is not finite becomes None (JSON).
        loss = float(state.eval_metrics[state.dataloader_label][METRIC].compute())  # over the samples of all ranks
        batch = state.timestamp.batch.value
        is_known = is_held_out(state, samples)
        kept = loss if math.isfinite(loss) else None
        self.curves.append(data | {
            'evaluations': [*evaluations, [state.timestamp.sample.value, kept]], 'eval_loss': kept, 'eval_batch': batch,
            'eval_samples': len(samples), 'eval_held_out': is_known})

        # Print above the progress bar.
        which = 'the held-out samples'
        if not is_known:
            which = 'samples that are not known to be held out'
        if dist.get_global_rank() == 0:
            tqdm.write(f'batch {batch}: loss {loss:.4g} on {which}', file=sys.stderr)

    def state_dict(self) -> dict:
        return {'curves': self.curves}  # the record of a resumed training includes earlier evaluations

    def load_state_dict(self, state: dict) -> None:
        """Take over the curves. Earlier versions kept one, and not on which data; `state` is empty before those."""
        if state.get('evaluations'):
            self.curves = [{'eval_remote': None, 'eval_sha256': None} | state]
        else:
            self.curves = [*state.get('curves', ())]

    def figures(self, all_ranks: bool) -> dict:
        """Return the newest curve with its data, which replaces the flag --eval_remote, and the other curves."""
        nothing = {'evaluations': [], 'eval_loss': None, 'eval_batch': None, 'eval_samples': None,
                   'eval_held_out': None, 'eval_sha256': None}
        *others, newest = self.curves or [nothing]
        return newest | {'other_evaluations': others}
