"""What a GPU says of itself at the end of the measured batches; nothing of it without a GPU."""
from composer.utils import dist

from sdbench.measuring.power import QUANTITIES, GpuMonitor, gather_gpu_figures


def test_a_gpu_is_asked_for_its_power_and_a_part_of_one_which_others_use_as_well_is_not(as_on_a_gpu, monkeypatch):
    monkeypatch.setitem(QUANTITIES, 'gpu_power_watts', (lambda: 300_000, 1000))  # milliwatts
    monkeypatch.setitem(QUANTITIES, 'gpu_sm_clock_mhz', (lambda: 1755, 1))
    for name, watts in (('NVIDIA H100 80GB HBM3', [300]), ('NVIDIA H100 80GB HBM3 MIG 3g.40gb', [])):
        as_on_a_gpu(name=name)
        monitor = GpuMonitor()
        monitor.batch_end()
        assert monitor.samples == {'gpu_power_watts': watts, 'gpu_sm_clock_mhz': [1755]}


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
