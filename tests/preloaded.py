"""What a server of processes imports and finds out once, before it forks."""
import gc
import os
from multiprocessing import forkserver, resource_tracker

from composer.utils.collect_env import get_composer_env_dict

import convert  # noqa: F401
import encode  # noqa: F401
import evaluate  # noqa: F401
from benchmark import StableDiffusion
from tests import forked_runs, shortcuts  # noqa: F401
from tests.runs import SMALLEST

shortcuts.take()
shortcuts.clip_tokenizer()
StableDiffusion(SMALLEST, 16).flops_per_image  # noqa: B018, which is known from now on
get_composer_env_dict()  # Composer asks for it with every checkpoint
gc.freeze()

# What it forks lets it fork, too: Python would start another server, which has imported nothing.
forkserver._forkserver.ensure_running = resource_tracker.ensure_running

# What they print elsewhere than into files, as where they are killed, would stand below all tests.
for number in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
