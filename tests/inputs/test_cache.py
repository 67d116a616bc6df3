"""Where shards are cached, and that each remote has a cache of its own."""
from data import StreamingLAIONDataset
from tests.runs import TINY, one_error_line
from tests.samples import write_shards


def test_a_local_remote_is_read_in_place_and_a_given_cache_is_filled(shards, tmp_path):
    in_place = StreamingLAIONDataset(shards, batch_size=1)
    assert in_place.streams[0].local == shards and in_place.streams[0].remote is None
    cached = StreamingLAIONDataset(shards, str(tmp_path / 'cache'), batch_size=1)
    assert cached.sample(0)['caption'] == in_place.sample(0)['caption']
    assert (tmp_path / 'cache' / 'index.json').exists()


def test_a_cache_of_another_remote_is_refused(shards, samples, tmp_path, results, capfd):
    other, cache = write_shards(tmp_path / 'other', samples), tmp_path / 'cache'
    StreamingLAIONDataset(shards, str(cache), batch_size=1)
    error = one_error_line(['--remote', other, *TINY, '--local', cache, '--results', results], capfd)
    assert f'--local {cache} caches {shards}' in error
