"""What a run says, and what its record keeps, of evaluations on samples that are held out."""
import math
import sys

from composer import Callback
from composer.utils import dist
from tqdm import tqdm

LABEL = 'eval'  # of Composer's Evaluator; its loss is logged as metrics/eval/MeanSquaredError
METRIC = 'MeanSquaredError'


class Evaluations(Callback):
    """Remembers the evaluations of this process, and says each one's loss on rank 0.

    Attributes:
        losses: of each the images seen, and the mean squared error on the held-out samples, None where not finite.
        batch: after which the last one was.
    """

    def __init__(self):
        self.losses: list[tuple[int, float | None]] = []
        self.batch: int | None = None

    def eval_end(self, state, logger) -> None:
        loss = float(state.eval_metrics[LABEL][METRIC].compute())  # over all ranks
        self.losses.append((state.timestamp.sample.value, loss if math.isfinite(loss) else None))
        self.batch = state.timestamp.batch.value
        which = 'the held-out samples'
        if not state.dataloader.dataset.is_known:
            which = 'the samples of --eval_remote, not known to be held out'
        if dist.get_global_rank() == 0:
            tqdm.write(f'batch {self.batch}: loss {loss:.4g} on {which}', file=sys.stderr)  # over the bar

    def figures(self, all_ranks: bool) -> dict:
        """Return the record's figures of evaluations, which all ranks know."""
        last = self.losses[-1][1] if self.losses else None
        return {'evaluations': [list(pair) for pair in self.losses], 'eval_loss': last, 'eval_batch': self.batch}
