"""Progress bars: Composer's, where a run resumes, and that of an encoding."""
from composer import Callback
from composer.core import State
from composer.loggers import ProgressBarLogger
from composer.utils import dist
from tqdm import tqdm

from harness.ranks import SharedCount


class RenewedProgressBar(Callback):
    """A resumed run counts to its own --max_duration.

    Without this: Composer 0.32.1 restores the bar of the checkpoint with the total of that run, and once past it shows
    4551/?. Test: test_a_resumed_run_counts_to_its_own_end.
    """

    def fit_start(self, state, logger) -> None:
        """Put a bar of this run in the place of the restored one."""
        for bar_logger in state.callbacks:
            if isinstance(bar_logger, ProgressBarLogger) and bar_logger.train_pbar:
                bar_logger.train_pbar.close()
                bar_logger.train_pbar = bar_logger._build_pbar(state, is_train=True)
                bar_logger.train_pbar.update_to_timestamp(state.timestamp)


def drop_evaluation_bar(state: State) -> None:
    """Where a run ended within an evaluation, leave its bar out of the checkpoint.

    Without this: Composer 0.32.1 cannot load a checkpoint with such a bar (KeyError: 'n').
    Test: test_a_signal_within_an_evaluation_leaves_a_checkpoint_of_the_live_weights.
    """
    for bar_logger in state.callbacks:
        if isinstance(bar_logger, ProgressBarLogger) and bar_logger.eval_pbar:
            bar_logger.eval_pbar.close()
            bar_logger.eval_pbar = None


class Progress:
    """A context with a bar of the images that all ranks have done, how many in a second, and the time that is left.

    Rank 0 draws it, and only on a terminal.

    Args:
        count: of what is done.
        total: images that there are to do.
    """

    def __init__(self, count: SharedCount, total: int):
        self.count = count
        self.total = total

    def __enter__(self) -> 'Progress':
        is_silent = None if dist.get_global_rank() == 0 else True  # None: only where there is no terminal
        self.bar = tqdm(total=self.total, unit=' images', disable=is_silent)
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    def advance(self, images: int) -> None:
        """This rank has done so many more."""
        self.bar.update(self.count.add(images) - self.bar.n)
