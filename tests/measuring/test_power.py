"""What a GPU says of itself at the end of the measured batches; nothing of it without a GPU."""
import pytest
import torch
from composer.utils import dist

from sdbench.measuring import power
from sdbench.measuring.power import GIB, QUANTITIES, GpuMonitor, gather_gpu_figures


@pytest.fixture
def watts(as_on_a_gpu, monkeypatch) -> list:
    """What a GPU answers that is asked for its power, each once; an error is raised."""
    answers = []

    def power_draw() -> float:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer * 1000

    as_on_a_gpu()
    monkeypatch.setitem(QUANTITIES, 'gpu_power_watts', (power_draw, 1000))
    monkeypatch.setitem(QUANTITIES, 'gpu_sm_clock_mhz', (lambda: 1755, 1))
    monkeypatch.setattr(torch.cuda, 'memory_stats', lambda: {'allocated_bytes.all.peak': 20 * GIB,
                                                             'num_alloc_retries': 4})
    return answers


def test_a_gpu_is_asked_at_most_once_a_second_an_error_leaves_out_one_value_and_a_part_has_no_power(
        watts, as_on_a_gpu, monkeypatch):
    watts += [300, RuntimeError('no driver'), 350]
    ends = iter((10.0, 10.4, 10.9, 11.5, 13.0, 14.0))  # of batches
    monkeypatch.setattr(power.time, 'monotonic', lambda: next(ends))
    monitor = GpuMonitor()
    for _ in range(5):
        monitor.batch_end()
    assert monitor.figures() == {'gpu_power_watts_mean': 325, 'gpu_power_watts_max': 350, 'gpu_sm_clock_mhz_mean': 1755,
                                 'gpu_sm_clock_mhz_max': 1755, 'peak_memory_allocated_gib': 20, 'allocator_retries': 4}
    assert len(monitor.samples['gpu_sm_clock_mhz']) == 3

    as_on_a_gpu(name='NVIDIA H100 80GB HBM3 MIG 3g.40gb')  # others use the rest of this GPU
    of_a_part = GpuMonitor()
    of_a_part.batch_end()
    assert of_a_part.samples == {'gpu_power_watts': [], 'gpu_sm_clock_mhz': [1755]}


def test_figures_are_over_all_gpus_and_joules_need_the_power_of_each(monkeypatch):
    def of_rank(watts: float | None, megahertz: float, gib: float, retries: int) -> dict:
        return {'gpu_power_watts_mean': watts, 'gpu_power_watts_max': watts, 'gpu_sm_clock_mhz_mean': megahertz,
                'gpu_sm_clock_mhz_max': megahertz, 'peak_memory_allocated_gib': gib, 'allocator_retries': retries}

    ranks = [of_rank(350, 1700, 20.0, 1), of_rank(500, 1600, 22.0, 2)]
    monkeypatch.setattr(dist, 'all_gather_object', lambda mine: ranks)
    monkeypatch.setattr(dist, 'get_world_size', lambda: 2)
    assert gather_gpu_figures(GpuMonitor(), images_per_sec=17) == {
        'gpu_power_watts_mean': 425, 'gpu_power_watts_max': 500,
        'gpu_sm_clock_mhz_mean': 1650, 'gpu_sm_clock_mhz_max': 1700,
        'joules_per_image': 850 / 17,  # 850 W make 17 images in a second
        'peak_memory_allocated_gib': 22.0, 'allocator_retries': 3}
    ranks[1] = of_rank(None, 1600, 22.0, 2)
    assert gather_gpu_figures(GpuMonitor(), images_per_sec=17)['joules_per_image'] is None
