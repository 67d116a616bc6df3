"""Workers that are actors of a Ray cluster."""
import logging
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from inputs.errors import one_line
from parts.engine import Answering, Part, WorkerDied, WorkerFailed, unpacked

SECONDS_TO_CONNECT = 20
SECONDS_BETWEEN_LINES = 60  # that say what is waited for
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
            raise ValueError(f'{name_of(address)} needs the package ray; pip install -r requirements.txt') from None
        self.ray = ray
        self.make = InFolder(make, os.getcwd())
        self.most = most
        self.name = name_of(address)
        refuse_silent_address(address)
        try:
            ray.init(address, runtime_env=environment_of_workers(), logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f'{self.name}: no Ray cluster answers there ({one_line(error)[:200]}); start one with '
                             '"ray start --head"') from None
        leave_out_state_of_lost_machines()
        self.kind = 'CPU'
        if for_gpus and ray.cluster_resources().get('GPU'):
            self.kind = 'GPU'
        self.needs = {'num_gpus': 1} if self.kind == 'GPU' else {'num_cpus': 1}
        self.actor = ray.remote(Answering).options(max_restarts=0, **self.needs)
        self.next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def __enter__(self) -> 'RayWorkers':
        return self

    def __exit__(self, *error) -> None:
        self.ray.shutdown()

    def places(self) -> int:
        """How many workers there may be, now. At least one, for which a cluster that grows by itself starts a machine.
        """
        return max(1, min(self.most, self._devices()))

    def _devices(self) -> int:
        return int(self.ray.cluster_resources().get(self.kind, 0))

    def start(self):
        """A new worker."""
        return self.actor.remote(self.make)

    def call(self, worker, parts: list[Part]):
        """Give a worker parts to make."""
        return worker.__call__.remote(parts)

    def wait(self, calls: list, seconds: float) -> list:
        """The calls that have an answer, at the latest after that many seconds."""
        answered = self.ray.wait(calls, timeout=seconds)[0]
        if time.monotonic() > self.next_line:
            self.next_line += SECONDS_BETWEEN_LINES
            if self._devices() == 0:
                print(f'{self.name}: waiting for a machine with a {self.kind}; the cluster has none', file=sys.stderr)
        return answered

    def result(self, call) -> list:
        """The answer to a call. Raises WorkerDied, and what the worker raised."""
        try:
            return unpacked(self.ray.get(call))
        except (self.ray.exceptions.RayTaskError, self.ray.exceptions.RuntimeEnvSetupError) as error:
            raise WorkerFailed(str(error)) from None
        except self.ray.exceptions.RayError:
            print(f'{self.name}: a worker or its machine was lost; what it was at is made again', file=sys.stderr)
            raise WorkerDied from None

    def end(self, worker) -> None:
        """End a worker, whatever it is at."""
        self.ray.kill(worker)


class InFolder:
    """Makes workers in the folder that the command was started in, from which relative names lead on.

    Ray starts its workers where the cluster was started, in which other files can have these names. Where a machine has
    no such folder, an empty one takes its place, so that none is found.
    """

    def __init__(self, make: Callable, folder: str):
        self.make = make
        self.folder = folder
        self.empty: tempfile.TemporaryDirectory | None = None  # in its place, as long as this lives

    def __call__(self, place: int) -> Callable:
        try:
            os.chdir(self.folder)
        except OSError:
            self.empty = tempfile.TemporaryDirectory(prefix='no-such-folder-')
            os.chdir(self.empty.name)
        return self.make(place)


def leave_out_state_of_lost_machines() -> None:
    """Ray 2.60 prints pages of the state of a lost machine among our own lines, and has no option for that."""
    from ray._private import worker
    worker.print_to_stdstream = lambda *data, **options: None


def name_of(address: str) -> str:
    """How the user gave the address of a cluster."""
    if address == os.environ.get('RAY_ADDRESS'):
        return f'RAY_ADDRESS={address}'
    return f'--ray {address}'


def refuse_silent_address(address: str) -> None:
    """Raises ValueError if nothing listens at HOST:PORT, which Ray would call for minutes."""
    place = re.fullmatch(r'(?:ray://)?([^/]+):(\d+)', address)
    if not place:
        return  # such as auto
    try:
        socket.create_connection((place[1], int(place[2])), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f'{name_of(address)}: no Ray cluster answers there ({one_line(error)}); start one with '
                         '"ray start --head"') from None


def environment_of_workers() -> dict:
    """What a worker finds on any machine of a cluster: this program's rooms, and where stores are."""
    settings = {name: os.environ[name] for name in SETTINGS_OF_STORES if name in os.environ}
    return {'py_modules': [str(ROOT / room) for room in ROOMS], 'env_vars': settings}
