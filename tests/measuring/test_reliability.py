"""What a summary says of a speed that is not to be relied on."""
import pytest

from sdbench.measuring.reliability import busy_cores


@pytest.mark.parametrize('waited, said', [(900, None), (9_000, 'waited 90% of the time for a core')])
def test_a_process_that_waits_for_a_core_most_of_its_time_says_so_with_the_remedy(tmp_path, monkeypatch, waited, said):
    monkeypatch.delenv('OMP_NUM_THREADS')
    schedstat = tmp_path / 'schedstat'
    schedstat.write_text(f'1000 {waited} 12\n')
    reason = busy_cores(str(schedstat))
    if said is None:
        assert reason is None
    else:
        assert reason.startswith(said)
        assert 'OMP_NUM_THREADS=1' in reason
        monkeypatch.setenv('OMP_NUM_THREADS', '1')
        assert 'OMP_NUM_THREADS' not in busy_cores(str(schedstat))


def test_a_machine_that_does_not_say_how_long_a_process_waits_is_not_asked(tmp_path):
    assert busy_cores(str(tmp_path / 'nothing')) is None
