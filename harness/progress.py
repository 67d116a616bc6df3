"""Composer's progress bar, where a run resumes."""
from composer import Callback
from composer.loggers import ProgressBarLogger


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
