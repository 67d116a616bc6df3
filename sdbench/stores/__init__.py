"""Object stores: list, read and write the files behind an address.

    s3://BUCKET/KEY      at S3_ENDPOINT_URL if it is set; with any credentials that boto3 finds, or unsigned
    gs://BUCKET/KEY      with the HMAC keys GCS_KEY and GCS_SECRET, or Google's default credentials, or none; with
                         GS_USER_PROJECT always with the default ones, because that project pays for reading
    azure://ACCOUNT.blob.core.windows.net/CONTAINER/KEY
                         at exactly that host, which may belong to another cloud (blob.core.chinacloudapi.cn);
                         with AZURE_ACCOUNT_ACCESS_KEY, or Azure's default credentials

Each kind of store is a class with the methods of `Store` (addresses.py): s3.py, google.py and azure.py. From any other
store Streaming's clients can download. Every error of a client becomes one line (answers.py). Keys are passed to the
clients as they are and never parsed as URLs, because a key may contain # or ?. A `label`, such as
`--remote s3://bucket/mds`, begins each error message.
"""
import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from sdbench.errors import UserError, one_line
from sdbench.stores.addresses import PATIENT, QUICK, SUPPORTED, Retry, Store, StoredFile, parse_address
from sdbench.stores.answers import store_error

# Environment variables that configure the clients and that are not secret. Ray passes them to other machines.
SETTINGS = ('S3_ENDPOINT_URL', 'S3_CANNED_ACL', 'AWS_ENDPOINT_URL', 'AWS_ENDPOINT_URL_S3', 'AWS_REGION',
            'AWS_DEFAULT_REGION', 'AWS_PROFILE', 'AWS_REQUEST_CHECKSUM_CALCULATION', 'AWS_RESPONSE_CHECKSUM_VALIDATION',
            'MOSAICML_STREAMING_AWS_REQUESTER_PAYS', 'AZURE_ACCOUNT_NAME', 'AZURE_AUTHORITY_HOST',
            'GOOGLE_CLOUD_PROJECT', 'GS_USER_PROJECT')


def open_store(address: str, label: str, retry: Retry = QUICK) -> Store:
    """Return the client for the address of a file or a folder: an S3Store, a GoogleStore or an AzureStore.

    Raises UserError if the address is malformed, or if the credentials or settings are invalid.
    """
    place = parse_address(address, label)
    try:
        if place.scheme == 'azure':
            from sdbench.stores.azure import AzureStore
            return AzureStore(place, retry)
        has_google_keys = {'GCS_KEY', 'GCS_SECRET'} <= os.environ.keys() and 'GS_USER_PROJECT' not in os.environ
        if place.scheme == 'gs' and not has_google_keys:
            from sdbench.stores.google import GoogleStore
            return GoogleStore(place, retry)
        from sdbench.stores.s3 import S3Store
        return S3Store(place, retry)
    except Exception as error:  # each kind of credentials has its own exceptions
        raise UserError(f'{label}: no client can be made with these credentials and settings ({type(error).__name__}: '
                        f'{one_line(error, 300)}); check the credentials, and S3_ENDPOINT_URL if it is set') from None


@contextlib.contextmanager
def client_errors(label: str) -> Iterator[None]:
    """Turn any error of a storage client into an OSError of one line that begins with `label`."""
    try:
        yield
    except Exception as error:  # each client has its own exceptions
        raise store_error(error, label) from None


def download(address: str, path: str, label: str, retry: Retry = QUICK, in_threads: bool = True) -> None:
    """Download a file from any store that Streaming knows, or copy a file of this machine.

    If the store speaks S3 and `in_threads` is True, parts of a large file are downloaded concurrently. Streaming's
    clients use their own number of tries.

    Raises FileNotFoundError if there is no such file, OSError if it cannot be read, and UserError if the address or
    the settings are wrong.
    """
    if not address.startswith(SUPPORTED):
        bucket = '/'.join(address.split('/')[:3])
        with client_errors(label):
            streaming_downloader(bucket, os.getpid()).download(address, path, retry.timeout)
        return
    store = open_store(address, label, retry)
    with client_errors(label):
        store.download(path, in_threads)


@functools.cache
def streaming_downloader(bucket: str, process: int) -> Any:
    """Return Streaming's client for a bucket, or for files of this machine, once per process."""
    from streaming.base.storage import CloudDownloader
    return CloudDownloader.get(bucket)


def upload(path: str, address: str, label: str, retry: Retry = PATIENT) -> None:
    """Upload a file of this machine. Raises OSError or UserError as `download` does."""
    with open(path, 'rb') as file:
        write(file, address, label, retry)


def write(file: BinaryIO, address: str, label: str, retry: Retry = QUICK) -> None:
    """Write the content of an open file to an address. Raises OSError or UserError as `download` does."""
    store = open_store(address, label, retry)
    with client_errors(label):
        store.upload(file)


def addresses_in(folder: str, label: str) -> list[str]:
    """Return the addresses of the files directly in a folder. Raises OSError or UserError as `download` does."""
    key = parse_address(folder, label).key
    prefix = f'{key}/' if key else ''
    with client_errors(label):
        names = [file.key.removeprefix(prefix) for file in open_store(folder, label).files(prefix)]
    return [f'{folder.rstrip("/")}/{name}' for name in names if name and '/' not in name]


def files_below(address: str, label: str, retry: Retry = QUICK) -> list[StoredFile]:
    """Return all files below an address, or the file at that address if it is not a folder.

    Raises OSError or UserError as `download` does.
    """
    key = parse_address(address, label).key
    store = open_store(address, label, retry)
    with client_errors(label):
        if not key:
            return list(store.files(''))
        below = list(store.files(f'{key}/'))
        if below:
            return below
        # A listing is sorted, so the file with exactly this key would be its first entry.
        return [file for file in itertools.islice(store.files(key), 1) if file.key == key]
