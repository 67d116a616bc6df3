"""Workers that are actors of a Ray cluster."""
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from inputs.errors import one_line
from parts.engine import Answering, Part, WorkerDied, WorkerFailed, unpacked

SECONDS_TO_CONNECT = 20
ROOMS = ('fitting', 'inputs', 'models', 'parts')  # what a worker is made of
ROOT = Path(__file__).parent.parent
# What the machines of a cluster need to know to reach a store, and is no secret; they have credentials of their own.
SETTINGS_OF_STORES = ('S3_ENDPOINT_URL', 'AWS_REGION', 'AWS_DEFAULT_REGION', 'AWS_PROFILE', 'AZURE_ACCOUNT_NAME')


class RayWorkers:
    """Actors of a Ray cluster, as many as it has GPUs, or CPUs where it has none or the work needs none.

    Args:
        make: as for LocalWorkers; each actor has place 0.
        address: of the cluster, as `ray.init` takes it.
        for_gpus: whether the work needs GPUs.
        most: actors that there may be.

    Raises ValueError if there is no cluster at that address.
    """

    def __init__(self, make: Callable, address: str, for_gpus: bool = False,
                 most: int = sys.maxsize):
        os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # Ray reports how it is used unless it is told not to
        try:
            import ray
        except ModuleNotFoundError:
            raise ValueError(f'--ray {address} needs the package ray; pip install -r requirements.txt') from None
        self.ray = ray
        self.make = make
        self.most = most
        refuse_silent_address(address)
        try:
            ray.init(address, runtime_env=environment_of_workers(), logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f'--ray {address}: no Ray cluster answers there ({one_line(error)[:200]}); start one with '
                             '"ray start --head"') from None
        self.kind = 'CPU'
        if for_gpus and ray.cluster_resources().get('GPU'):
            self.kind = 'GPU'
        self.needs = {'num_gpus': 1} if self.kind == 'GPU' else {'num_cpus': 1}
        self.actor = ray.remote(Answering).options(max_restarts=0, **self.needs)

    def __enter__(self) -> 'RayWorkers':
        return self

    def __exit__(self, *error) -> None:
        self.ray.shutdown()

    def places(self) -> int:
        """How many workers there may be, now."""
        return min(self.most, int(self.ray.cluster_resources().get(self.kind, 0)))

    def start(self):
        """A new worker."""
        return self.actor.remote(self.make)

    def call(self, worker, parts: list[Part]):
        """Give a worker parts to make."""
        return worker.__call__.remote(parts)

    def wait(self, calls: list, seconds: float) -> list:
        """The calls that have an answer, at the latest after that many seconds."""
        if not calls:
            time.sleep(seconds)  # until a machine comes
            return []
        return self.ray.wait(calls, timeout=seconds)[0]

    def result(self, call) -> list:
        """The answer to a call. Raises WorkerDied, and what the worker raised."""
        try:
            return unpacked(self.ray.get(call))
        except (self.ray.exceptions.RayTaskError, self.ray.exceptions.RuntimeEnvSetupError) as error:
            raise WorkerFailed(str(error)) from None
        except self.ray.exceptions.RayError:
            raise WorkerDied from None

    def end(self, worker) -> None:
        """End a worker, whatever it is at."""
        self.ray.kill(worker)


def refuse_silent_address(address: str) -> None:
    """Raises ValueError if nothing listens at HOST:PORT, which Ray would call for minutes."""
    place = re.fullmatch(r'(?:ray://)?([^/]+):(\d+)', address)
    if not place:
        return  # such as auto
    try:
        socket.create_connection((place[1], int(place[2])), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f'--ray {address}: no Ray cluster answers there ({one_line(error)}); start one with '
                         '"ray start --head"') from None


def environment_of_workers() -> dict:
    """What a worker finds on any machine of a cluster: this program's rooms, and where stores are."""
    settings = {name: os.environ[name] for name in SETTINGS_OF_STORES if name in os.environ}
    return {'py_modules': [str(ROOT / room) for room in ROOMS], 'env_vars': settings}
