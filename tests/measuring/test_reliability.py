"""What a summary says of a speed that is not to be relied on."""
import pytest

from sdbench.measuring.reliability import busy_cores, remedy


@pytest.mark.parametrize('waited, said', [(900, None), (9_000, 'waited 90% of the time for a core')])
def test_a_process_that_waits_for_a_core_most_of_its_time_is_to_be_measured_again(tmp_path, waited, said):
    schedstat = tmp_path / 'schedstat'
    schedstat.write_text(f'1000 {waited} 12\n')
    caution = busy_cores(str(schedstat))
    if said is None:
        assert caution is None
    else:
        assert said in caution
        assert 'fewer programs' in caution
        assert remedy({'measured_batches': 20, 'drift': 0.4}, caution) == caution


def test_a_machine_that_does_not_say_how_long_a_process_waits_is_not_asked(tmp_path):
    assert busy_cores(str(tmp_path / 'nothing')) is None
