"""obstore's clients of object stores, for the commands that make datasets. `sdbench.stores` says what addresses mean.

obstore's threads do not survive a fork: a process that has opened a store may start others by spawn or forkserver only.
"""
import contextlib
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from itertools import islice
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from sdbench.errors import DataError
from sdbench.paths import CLAIM, is_url
from sdbench.stores import OURS, S3, Address, answer_of, connect, entries_below, no_client, parse_address, store_error

PIECE_BYTES = 8 << 20  # of a request for a piece of a file
BUFFER_BYTES = 1 << 20  # of a file that is read
# A server that is away for a minute is waited for; one that is gone ends the run after two to four.
RETRIES = {'max_retries': 1000, 'retry_timeout': timedelta(minutes=2),
           'backoff': {'init_backoff': timedelta(milliseconds=100), 'max_backoff': timedelta(seconds=10), 'base': 2}}
# Of the first request of a command, which also finds out whether there is a server at all.
FIRST_RETRIES = RETRIES | {'max_retries': 5, 'retry_timeout': timedelta(seconds=5)}
# The second is for a request with its content, which is up to 64 MiB.
TIMEOUTS = {'connect_timeout': timedelta(seconds=20), 'timeout': timedelta(seconds=90)}


def open_store(address: str, flag: str, is_first: bool = False) -> tuple[ObjectStore, str]:
    """Return a client for an address, and the key in its bucket, without outer slashes.

    Args:
        address: s3://, gs:// or azure://, as `sdbench.stores` lists them.
        flag: its name in error messages.
        is_first: whether requests give up early, as FIRST_RETRIES says.

    Raises ValueError if such a store cannot be reached, no bucket is named, its key is no path, or a profile is
    missing.
    """
    label = f'{flag} {address}'
    if not address.startswith(OURS):
        raise ValueError(f'{label}: of stores, s3://, gs:// and azure:// can be used; use an S3-compatible address '
                         'with S3_ENDPOINT_URL')
    place = parse_address(address, label)
    if has_odd_key(place.key):
        raise ValueError(f'{label} has //, /./ or /../ in its key, which no client opens; copy it to another')
    s3 = connect(place.scheme, label)  # which looks at the endpoint, too: one that is no URL makes obstore panic
    try:
        return client(place._replace(key=''), s3, is_first), place.key
    except Exception as error:  # each kind of credentials has its own
        raise no_client(error, label) from None


def has_odd_key(key: str) -> bool:
    """Tell whether a key has an empty part, . or .. in it, so that it is no path: obstore does not open it."""
    return key != '' and not {'', '.', '..'}.isdisjoint(key.split('/'))


def reach(address: str, flag: str) -> None:
    """Raise ValueError if no server answers at an address, or one that fails, as FIRST_RETRIES and TIMEOUTS say.

    That is within ten seconds if its host is not known or refuses the connection.
    """
    store, key = open_store(address, flag, is_first=True)

    # in a thread, so that this one hears Ctrl-C meanwhile, as obstore does not
    answer = Future()

    def ask() -> None:
        try:
            answer.set_result(obstore.get(store, f'{key}/{CLAIM}'.strip('/')))
        except BaseException as error:  # a panic of Rust is no Exception
            answer.set_exception(error)
    threading.Thread(target=ask, daemon=True).start()
    while not answer.done():  # a signal that another thread was given is heard when this one wakes
        wait([answer], timeout=0.5)
    error = answer.exception()
    if error is None or isinstance(error, FileNotFoundError):
        return
    status, _ = answer_of(error)
    if status is None or status >= 500:  # what is refused by a status of 400 may be that file alone
        raise ValueError(store_error(error, f'{flag} {address}'))


class StoredObject(NamedTuple):
    """What a store says of an object."""
    key: str
    size: int  # in bytes
    changed: str  # its ETag, or the time of its last change


def objects_below(address: str, flag: str) -> list[StoredObject]:
    """Return the object of an address, or all objects below it; nothing if there are none.

    Raises DataError if the store cannot be read.
    """
    label = f'{flag} {address}'
    place = parse_address(address, label)
    s3 = connect(place.scheme, label)
    folder = f'{place.key}/' if place.key else ''
    try:
        if s3 is not None:  # obstore ends at a key with // in it
            found = list(entries_below(s3, place.bucket, folder))
            if not found:  # a key itself comes before all that begin with it
                found = [entry for entry in islice(entries_below(s3, place.bucket, place.key), 1)
                         if entry['Key'] == place.key]
            return [StoredObject(entry['Key'], entry['Size'], entry.get('ETag') or str(entry['LastModified']))
                    for entry in found]
        store, key = open_store(address, flag)
        found = [entry for page in obstore.list(store, key or None) for entry in page]
        if not found and key:
            found = [obstore.head(store, key)]
    except FileNotFoundError:
        return []
    except Exception as error:  # of boto3 and of obstore
        raise DataError(store_error(error, label)) from None
    return [StoredObject(entry['path'], entry['size'], entry['e_tag'] or str(entry['last_modified']))
            for entry in found]


@functools.cache
def client(bucket: Address, s3: S3 | None, is_first: bool) -> ObjectStore:
    """Make obstore's client for a bucket, with the endpoint and the credentials of `s3` where it speaks that."""
    options = {'client_options': TIMEOUTS, 'retry_config': FIRST_RETRIES if is_first else RETRIES}
    if s3 is not None:
        url = s3.client.meta.endpoint_url  # S3_ENDPOINT_URL, or that of a profile
        settings = {'region': s3.client.meta.region_name or 'us-east-1'}
        if '.amazonaws.com' not in url:
            settings['aws_endpoint_url_s3'] = url  # which goes before all that obstore itself finds
        if s3.session is None:
            settings['skip_signature'] = True
        else:
            from obstore.auth.boto3 import Boto3CredentialProvider
            settings['credential_provider'] = Boto3CredentialProvider(s3.session)

        # plain HTTP only where the endpoint asks for it, and a certificate authority of one's own
        options['client_options'] = {**TIMEOUTS, 'allow_http': urlsplit(url).scheme == 'http'}
        if os.environ.get('AWS_CA_BUNDLE'):
            with open(os.environ['AWS_CA_BUNDLE'], 'rb') as file:
                options['client_options']['root_certificate'] = file.read()
        return S3Store(bucket.bucket, virtual_hosted_style_request=False, **options, **settings)

    # Google with its default credentials, and Azure with the key of the environment, or else its default credentials
    if bucket.scheme == 'gs':
        from obstore.auth.google import GoogleCredentialProvider
        return GCSStore(bucket.bucket, credential_provider=GoogleCredentialProvider(), **options)
    options['account_name'] = bucket.account
    if 'AZURE_ACCOUNT_ACCESS_KEY' in os.environ:
        return AzureStore(bucket.bucket, account_key=os.environ['AZURE_ACCOUNT_ACCESS_KEY'], **options)
    from obstore.auth.azure import AzureCredentialProvider
    return AzureStore(bucket.bucket, credential_provider=AzureCredentialProvider(), **options)


@contextlib.contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """Open a file of this machine, or for an address in a store a copy, which is gone at the end.

    Raises DataError if a store cannot be read.
    """
    if not is_url(path):
        with open(path, 'rb', BUFFER_BYTES) as file:
            yield file
        return
    # Tars and Parquet files are read back and forth, which in a store would be a request each time.
    with tempfile.TemporaryFile() as copy:
        try:
            reader = obstore.open_reader(*open_store(path, 'SOURCE'), buffer_size=PIECE_BYTES)
            shutil.copyfileobj(reader, copy, PIECE_BYTES)
        except (BaseError, OSError) as error:
            raise DataError(store_error(error, path)) from None
        copy.seek(0)
        yield copy
