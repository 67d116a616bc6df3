"""How much other programs used the machine while a run was measured on CPUs."""
import subprocess
import sys
import time

import psutil
import pytest

from measuring.caution import doubt
from measuring.other_load import CpuSeconds, OtherLoad, cores_used_by_others, cpu_seconds_until_now, gather_other_load


@pytest.mark.parametrize('ranks, ranks_per_node, load', [
    ([CpuSeconds(20.0, 19.0, 3.0)], 1, 1.6),  # 10 s of two cores, in which others used 16 s of CPU time
    ([CpuSeconds(20.0, 19.0, 3.0), CpuSeconds(20.0, 19.0, 6.0)], 2, 1.0),
    ([CpuSeconds(20.0, 19.0, 19.0), CpuSeconds(20.0, 19.0, 9.0)], 1, 1.0),  # the second machine is the busy one
    ([CpuSeconds(20.0, 10.0, 10.02)], 1, 0.0),
    ([CpuSeconds(0.9, 0.9, 0.0)], 1, None),
    ([None], 1, None)])
def test_the_load_of_others_is_what_the_ranks_of_a_machine_did_not_use(ranks, ranks_per_node, load):
    assert cores_used_by_others(ranks, ranks_per_node, cores=2) == pytest.approx(load)


def test_what_this_process_and_those_that_it_started_use_is_its_own():
    before = cpu_seconds_until_now()
    use_up_a_second = 'import time\nwhile time.process_time() < 1: pass'
    subprocess.run([sys.executable, '-c', use_up_a_second], check=True)
    used = cpu_seconds_until_now().since(before)
    assert used.own >= 0.9 and used.had >= used.busy >= 0.9


def test_a_process_that_still_runs_is_its_own_and_a_window_has_an_end():
    load = OtherLoad()
    load.start()
    child = subprocess.Popen([sys.executable, '-c', 'while True: pass'])
    try:
        while psutil.Process(child.pid).cpu_times().user < 0.5:
            time.sleep(0.05)
        used = load.stop()
    finally:
        child.kill()
        child.wait()
    assert used.own >= 0.4 and load.stop() is used


def test_on_a_gpu_nothing_is_asked(as_on_a_gpu):
    as_on_a_gpu(count=1)
    load = OtherLoad()
    load.start()
    assert gather_other_load(load)['other_load'] is None


@pytest.mark.parametrize('load, words', [(None, ''), (0.5, ''), (1.6, 'other programs used 1.6 of the 2 cores')])
def test_a_speed_of_a_busy_machine_is_in_doubt(load, words):
    assert doubt({'measured_batches': 20, 'other_load': load, 'cpu_cores': 2}) == words
