"""Keep and print the loss on held-out samples."""
import math
import sys

from composer import Callback
from composer.core import State
from composer.utils import dist
from tqdm import tqdm

from sdbench.errors import redacted
from sdbench.inputs.shards import index_hash, was_trained_on

METRIC = 'MeanSquaredError'  # name of the evaluation's metric, which Composer logs as metrics/eval/MeanSquaredError


class HeldOutLoss(Callback):
    """Prints the loss on held-out samples at each evaluation on rank 0, and keeps the evaluations for the record.

    Losses on different data do not compare. If a resumed training is evaluated on other data, another curve begins, and
    the record has the earlier curves as `other_evaluations`.

    Args:
        eval_remote: the dataset as --eval_remote names it, for the record. None in another program.
        trained_on: the datasets that the weights were trained on, as `was_trained_on` takes them. Without it, no
            samples are known to be held out.
    """

    def __init__(self, eval_remote: str | None = None, trained_on: list[dict] | None = None):
        self.eval_remote = redacted(eval_remote) if eval_remote else None
        self.trained_on = trained_on
        self.curves: dict[str | None, dict] = {}  # keys of the record by hash of the data; the last was evaluated last

    def evaluated_batch(self, index: dict) -> int | None:
        """Return the batch of the newest evaluation on the dataset with this index.json; None if there is none."""
        return self.curves.get(index_hash(index), {}).get('eval_batch')

    def eval_end(self, state: State, logger) -> None:
        # Continue the curve of these data. It becomes the last one. A dataset of another program has no index.json.
        samples = state.dataloader.dataset
        index = getattr(samples, 'index', None)
        sha256 = index_hash(index) if isinstance(index, dict) else None
        evaluations = self.curves.pop(sha256, {}).get('evaluations', [])

        # Keep the result on all ranks, because each makes the record. A loss that is not finite becomes None (JSON).
        loss = float(state.eval_metrics[state.dataloader_label][METRIC].compute())  # over the samples of all ranks
        kept = loss if math.isfinite(loss) else None
        batch = state.timestamp.batch.value
        is_held_out = self.trained_on is not None and was_trained_on(self.trained_on, index) is False
        self.curves[sha256] = {
            'eval_remote': self.eval_remote, 'eval_sha256': sha256, 'eval_loss': kept, 'eval_batch': batch,
            'eval_samples': len(samples), 'eval_held_out': is_held_out,
            'evaluations': [*evaluations, [state.timestamp.sample.value, kept]]}

        # Print above the progress bar.
        which = 'the held-out samples' if is_held_out else 'samples that are not known to be held out'
        if dist.get_global_rank() == 0:
            tqdm.write(f'batch {batch}: loss {loss:.4g} on {which}', file=sys.stderr)

    def state_dict(self) -> dict:
        return {'curves': [*self.curves.values()]}  # the record of a resumed training includes earlier evaluations

    def load_state_dict(self, state: dict) -> None:
        """Take over the curves. Earlier versions kept one, and not on which data; `state` is empty before those."""
        curves = state.get('curves', [])
        if state.get('evaluations'):
            curves = [{'eval_remote': None, 'eval_sha256': None} | state]
        self.curves = {curve['eval_sha256']: curve for curve in curves}

    def figures(self, all_ranks: bool) -> dict:
        """Return the newest curve with its data, which replaces the flag --eval_remote, and the other curves."""
        nothing = {'evaluations': [], 'eval_loss': None, 'eval_batch': None, 'eval_samples': None,
                   'eval_held_out': None, 'eval_sha256': None}
        *others, newest = self.curves.values() or [nothing]
        return newest | {'other_evaluations': others}
