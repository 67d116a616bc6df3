"""What is wrong with data, said in one line."""


class DataError(Exception):
    """A run cannot go on with this data."""


def one_line(error: BaseException) -> str:
    """What an error says, in one line; of a worker's traceback, what the DataError says that it ends with."""
    text = ' '.join(str(error).split())
    _, _, last = text.rpartition('DataError: ')
    return last


def unreadable_shard(error: BaseException, place: str | None = None) -> DataError:
    """An error of a storage client or a disk as ours, with the remedy where it is known; `place` is the shard's."""
    which = f'a shard, {place},' if place else 'a shard'
    text = f'{which} could not be read ({type(error).__name__}: {one_line(error)})'
    if 'No space left' in str(error):
        text += '; free some of the disk, or bound the cache with --cache_limit'
    return DataError(text)
