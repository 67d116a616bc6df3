"""What a summary says of a speed that is not to be relied on."""
import pytest

from sdbench.measuring.reliability import busy_cores, remedy


@pytest.mark.parametrize('content, said', [
    (None, None),  # a machine that does not say how long a process waits
    ('1000 900 12', None), ('1000 9000 12', 'waited 90% of the time for a core')])
def test_a_process_that_waits_for_a_core_most_of_its_time_is_to_be_measured_again(tmp_path, content, said):
    schedstat = tmp_path / 'schedstat'
    if content is not None:
        schedstat.write_text(content)
    caution = busy_cores(str(schedstat))
    if said is None:
        assert caution is None
    else:
        assert said in caution
        assert 'fewer programs' in caution
        assert remedy({'measured_batches': 20, 'drift': 0.4}, caution) == caution
