"""benchmark.py with a line for each batch, for tests that wait until it trains.

    composer -n 2 tests/training/talking_run.py [flags of benchmark.py]
"""
from functools import partial

import benchmark

if __name__ == '__main__':
    benchmark.Progress = partial(benchmark.Progress, seconds_to_first_line=0, seconds_between_lines=0)
    benchmark.main()
