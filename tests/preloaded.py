"""What a server of processes imports and finds out once, before it forks: the name of the CPU alone takes a second."""
from composer.utils.collect_env import get_composer_env_dict

import convert  # noqa: F401
import encode  # noqa: F401
import evaluate  # noqa: F401
from sdbench.records.record import processor_name
from tests import forked_runs  # noqa: F401

processor_name()
get_composer_env_dict()  # Composer asks for it with every checkpoint
