"""What the launcher of several processes asks of each: to end with it. Nothing here needs torch."""
import os
import signal
import sys


def end_with_launcher() -> None:
    """SIGTERM for this process when the launcher that started it is gone, so that no rank runs on alone (Linux)."""
    if 'LOCAL_RANK' in os.environ and sys.platform == 'linux':
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
