"""The exceptions of this program, and the errors of libraries in one line for users. Nothing here imports torch."""
import errno
import re
import textwrap

# Messages of torch on CUDA, of torch on a CPU, of cuBLAS and cuDNN, and of cuDNN if no algorithm's workspace fits
OUT_OF_MEMORY = "out of memory|can't allocate memory|STATUS_ALLOC_FAILED|unable to find an engine"
FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk, and a user's full quota of it

# For example ;AccountKey=... in a connection string of Azure. A value of fewer than six characters is not a secret, but
# may be a number: --caption_weights key=2.
SECRET_SETTING = re.compile(r"\b(\w*(?:key|secret|password|token|signature|credential))=[^;&\s'\"]{6,}", re.IGNORECASE)


class UserError(ValueError):
    """Something that the user gave cannot be used: a flag, a file or the content of a file.

    Its message is one line with the flag or file, its value and the fix. A command prints it and exits with status 2. A
    plain ValueError is a bug in this program or in a library, and keeps its traceback.
    """


class BadSample(UserError):
    """A sample cannot be used. A training replaces it by another one; a conversion skips it and logs the reason."""


class DataError(Exception):
    """A run cannot continue with this data. Its command prints the message and exits with status 1."""


def one_line(error: BaseException, most: int | None = None) -> str:
    """Return the message of an error in one line, cut after `most` characters unless that is None."""
    if isinstance(error, OSError) and error.filename:
        return f'{error.filename}: {error.strerror}'
    text = ' '.join(str(error).split())
    return text if most is None else textwrap.shorten(text, most, placeholder=' ...')


def redacted(text: str) -> str:
    """Return a text without the passwords, keys and signatures in addresses and connection strings."""
    without_users = re.sub(r'://([^/@:\s]*:\S*|[^/@\s]+)@', '://***@', text)  # a password may contain a /
    without_queries = re.sub(r"\?[^\s']*=[^\s']*", '?***', without_users)
    return re.sub(SECRET_SETTING, r'\1=***', without_queries)


def unreadable_shard(error: BaseException, path: str | None = None) -> DataError:
    """Return the DataError for a shard that cannot be read, with the fix if the disk is full."""
    shard = f'a shard, {path},' if path else 'a shard'
    text = f'{shard} could not be read ({type(error).__name__}: {one_line(error)})'
    if disk_is_full(error):
        text += '; free some of the disk, or bound the cache with --cache_limit'
    return DataError(text)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out. CUDA and its libraries have no exception type for it, so the text is searched."""
    if isinstance(error, MemoryError):
        return True
    return type(error).__name__ == 'OutOfMemoryError' or re.search(OUT_OF_MEMORY, str(error)) is not None


def disk_is_full(error: BaseException | None) -> bool:
    """Tell whether an error, or one in its context, means a full disk or quota. torch raises its own error on top."""
    while error is not None:
        if getattr(error, 'errno', None) in FULL or re.search('No space left|quota exceeded', str(error)):
            return True
        error = error.__context__
    return False


def known_reason(error: BaseException, less_memory: str = 'use a smaller --batch_size or --image_size') -> str | None:
    """Return in one line why a command failed, with the fix; None if the error is a bug and needs its traceback."""
    # These errors already name the file, the disk or the package.
    if isinstance(error, DataError | ImportError):
        return one_line(error)

    # Libraries raise plain RuntimeErrors for most failures of the machine, so the text of the error decides.
    for raised in (error.__cause__, error):  # if there is a cause, it names the signal that ended the worker
        if 'DataLoader worker' in str(raised):
            return (f'{one_line(raised).rstrip(".")}; use fewer --num_workers if memory ran out, and a larger /dev/shm '
                    '(docker run --shm-size) if that is full')
    if is_out_of_memory(error):
        return f'out of memory; {less_memory}'
    if type(error).__name__ == 'FailOnRecompileLimitHit':  # torch
        return ('--compile: a part of the model was compiled as often as torch allows, and would run uncompiled from '
                'here on; use --no-compile')
    if disk_is_full(error):
        return f'a disk is full: free some of it ({one_line(error)})'
    if isinstance(error, OSError):
        return one_line(error)
    return None


def plural(number: int, one: str, several: str | None = None) -> str:
    """Return a number with its noun, such as '1 batch' and '2,000 batches'. By default the plural only adds an s."""
    if number == 1:
        return f'1 {one}'
    return f'{number:,} {several or one + "s"}'
