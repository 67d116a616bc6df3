"""Trace every step of Stable Diffusion 2 that a forecast may need, and write the file of the package.

    python -m benchmarks.forecast.traces     # about 20 minutes on a CPU core

It is needed after a change to the code that makes or counts a step (TRACED_CODE in sdbench/forecast/stored.py). Until
then, forecasts trace each step that they need again, which takes half a minute. Steps of the same code that are already
in the file are kept.
"""
import gzip
import itertools
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from sdbench.flags.train import SD2_BASE
from sdbench.forecast.stored import PACKAGED, USUAL, hash_of_code, hash_of_model, name_of, read_packaged, traced_now
from sdbench.setup import Setup

# 128 pixels are for the change that a dry run at 256 pixels proposes
VALUES = {'image_size': (512, 256, 128), 'precision': ('amp_bf16', 'fp32'), 'encoder_precision': ('bf16', 'fp32'),
          'channels_last': (False, True), 'half_precision_norms': (False, True),
          'gradient_checkpointing': (False, True), 'attention': ('sdpa', 'math')}


def setups() -> list[Setup]:
    """List the setups of all steps: every combination of VALUES."""
    return [Setup(**(vars(USUAL) | dict(zip(VALUES, values, strict=True))))
            for values in itertools.product(*VALUES.values())]


def trace_to_json(setup: Setup) -> tuple[str, dict]:
    """Return the name and the trace of a step, as they are stored."""
    step = traced_now(setup)
    print(name_of(setup), file=sys.stderr, flush=True)
    return name_of(setup), json.loads(step.to_json())


def main() -> None:
    identity = [hash_of_model(SD2_BASE), hash_of_code()]
    packaged = read_packaged()
    steps = packaged['steps'] if packaged['identity'] == identity else {}
    missing = [setup for setup in setups() if name_of(setup) not in steps]
    with ProcessPoolExecutor(2, get_context('spawn')) as processes:
        steps |= processes.map(trace_to_json, missing)
    stored = {'identity': identity, 'steps': dict(sorted(steps.items()))}
    PACKAGED.write_bytes(gzip.compress(json.dumps(stored).encode(), mtime=0))


if __name__ == '__main__':
    main()
