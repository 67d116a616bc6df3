"""Ranks that share parts: each part goes to one, and rank 0 hears of those that fail or fall silent."""
import threading

import pytest
import torch.distributed

from harness import crew as crew_module
from harness.crew import Crew, RankLost, progress_line


def two_ranks(patience: float = 300) -> tuple[Crew, Crew]:
    """Both ends of a run, in one process."""
    store = torch.distributed.HashStore()
    ranks = Crew(store, 0, 2, patience), Crew(store, 1, 2, patience)
    for rank in ranks:
        rank.give_sign(0, 0)
    return ranks


def test_each_number_goes_to_the_rank_that_comes_for_it_first():
    first, second = two_ranks()
    of_first, of_second = first.take_turns([3, 5, 8, 9]), second.take_turns([3, 5, 8, 9])
    assert [next(of_first), next(of_second), next(of_second), next(of_first)] == [3, 5, 8, 9]
    assert list(of_first) == list(of_second) == []


def test_what_is_published_arrives_whole_in_many_pieces(monkeypatch):
    monkeypatch.setattr(crew_module, 'PIECE_BYTES', 10)
    first, second = two_ranks()
    first.publish('plan', [['a\udcff', index] for index in range(100)])
    assert second.receive('plan') == [['a\udcff', index] for index in range(100)]


def test_rank_0_adds_up_what_all_have_done_and_knows_when_all_have_finished():
    first, second = two_ranks()
    second.give_sign(10, 1000, finished=True)
    assert first.look_around() == (False, 10, 1000)
    first.give_sign(5, 500, finished=True)
    assert first.look_around() == (True, 15, 1500)


def test_rank_0_hears_of_a_rank_that_fails_and_of_one_that_falls_silent(monkeypatch):
    monkeypatch.setattr(crew_module.time, 'sleep', lambda seconds: None)
    monkeypatch.setattr(crew_module.signal, 'signal', lambda *args: None)
    first, second = two_ranks(patience=0)
    first.look_around()
    with pytest.raises(RankLost, match='rank 1 has given no sign'):
        first.look_around()
    second.leave_word('a disk is full')
    with pytest.raises(RankLost, match='rank 1: a disk is full'):
        first.look_around()


def test_the_other_ranks_end_without_a_word_when_rank_0_has_said_why():
    first, second = two_ranks()
    ended = []

    def wait():
        try:
            second.wait_for_end()
        except SystemExit as error:
            ended.append(error.code)
    waiting = threading.Thread(target=wait)
    waiting.start()
    with pytest.raises(RankLost), first:
        raise RankLost('a reason')
    waiting.join()
    assert ended == [0]


def test_the_time_left_follows_from_this_runs_own_speed():
    line = progress_line(images=1000, bytes_done=10 ** 9, seconds=10, before=4 * 10 ** 9, total=8 * 10 ** 9)
    assert line == '1,000 images, 100 images/s, 62.5% of 8.0 GB, 0:00:30 left'
    assert progress_line(0, 0, 10, 0, 10 ** 9).endswith('time left not known')
