"""Numbers of things, in words."""
from inputs.words import counted


def test_one_of_a_thing_is_no_plural():
    assert [counted(number, 'batch', 'batches') for number in (0, 1, 2000)] == ['0 batches', '1 batch', '2,000 batches']
    assert [counted(number, 'shard') for number in (1, 2)] == ['1 shard', '2 shards']
