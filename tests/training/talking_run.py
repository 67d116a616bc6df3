"""benchmark.py with a line for each batch, for tests that wait until it trains.

    composer -n 2 tests/training/talking_run.py [flags of benchmark.py]
"""
import benchmark
from sdbench.training import progress

if __name__ == '__main__':
    progress.SECONDS_BETWEEN_LINES = 0
    benchmark.main()
