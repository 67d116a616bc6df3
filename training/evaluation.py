"""What a run says, and its record knows, of its evaluations."""
import math
import sys

from composer import Callback, Evaluator, Event, Trainer
from composer.core import State
from composer.utils import dist
from tqdm import tqdm

from inputs.errors import one_line

LABEL = 'eval'  # of Composer's Evaluator; its loss is logged as metrics/eval/MeanSquaredError
METRIC = 'MeanSquaredError'


class Evaluations(Callback):
    """Remembers the newest evaluation of this process, and says each one's loss on rank 0.

    Attributes:
        count: how many there were.
        loss: mean squared error on the held-out samples; None where it is not finite, or there was none.
        batch: after which it was.
    """

    def __init__(self):
        self.count = 0
        self.loss: float | None = None
        self.batch: int | None = None

    def eval_end(self, state, logger) -> None:
        loss = float(state.eval_metrics[LABEL][METRIC].compute())  # over all ranks
        self.count += 1
        self.loss = loss if math.isfinite(loss) else None
        self.batch = state.timestamp.batch.value
        if dist.get_global_rank() == 0:
            tqdm.write(f'batch {self.batch}: loss {loss:.4g} on the held-out samples', file=sys.stderr)  # over the bar

    def figures(self) -> dict:
        """The record's part."""
        return {'evaluations': self.count, 'eval_loss': self.loss, 'eval_batch': self.batch}


class TolerantTrainer(Trainer):
    """Composer's Trainer, in which an evaluation that fails is warned of, and the training goes on.

    With several ranks it ends the run as in Composer: the others are within the same evaluation and wait.
    """

    def _eval_loop(self, evaluator: Evaluator, *arguments, **named) -> None:
        state = self.state
        before = (state.dataloader, state.dataloader_label, state.dataloader_len)
        try:
            super()._eval_loop(evaluator, *arguments, **named)
        except Exception as error:  # of the data, the network or memory, of many kinds
            if dist.get_world_size() > 1:
                raise
            take_live_weights_back(state, self.logger)
            state.set_dataloader(*before[:2])
            if before[2] is not None:
                state.dataloader_len = before[2]
            tqdm.write(f'warning: the evaluation at batch {state.timestamp.batch.value} failed '
                       f'({type(error).__name__}: {one_line(error)[:200]}); the training goes on', file=sys.stderr)


def take_live_weights_back(state: State, logger) -> None:
    """Where an evaluation was left in its middle, the model holds the averages: exchange them again."""
    for algorithm in state.algorithms:
        if getattr(algorithm, 'ema_weights_active', False):
            algorithm.apply(Event.EVAL_END, state, logger)
