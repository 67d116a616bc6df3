"""How the threads of a program wait for one another. It is asked before torch is imported, and needs nothing of it."""
import os

GPU_DEVICES = ('/dev/nvidiactl', '/dev/kfd')  # of NVIDIA's driver, and of AMD's


def sleep_while_waiting() -> None:
    """Let the threads of torch sleep while they wait for one another, on a machine without a GPU.

    By default OpenMP's threads spin while they wait. Where another program has taken the core of the one that they wait
    for, they keep it from coming back, and a training is ten times slower. OpenMP reads this when torch is imported.
    """
    if not any(os.path.exists(device) for device in GPU_DEVICES):
        os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
