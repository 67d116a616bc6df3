"""Import and compute, once in the fork server, everything that the processes forked from it would repeat."""
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
StableDiffusion(SMALLEST, 16).flops_per_image  # noqa: B018, computes and caches it
get_composer_env_dict()  # needed for every checkpoint
gc.freeze()

# Let the forked processes use this server as well. Python would start another server, which has imported nothing.
forkserver._forkserver.ensure_running = resource_tracker.ensure_running

# Discard stdout and stderr. Otherwise messages of killed processes would appear below the results of pytest.
for number in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
