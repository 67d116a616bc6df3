"""Object stores: list, read and write the files behind an address.

    s3://BUCKET/KEY      at S3_ENDPOINT_URL if it is set; with any credentials that boto3 finds, or unsigned
    gs://BUCKET/KEY      with the HMAC keys GCS_KEY and GCS_SECRET, or Google's default credentials, or none; with
                         GS_USER_PROJECT always with the default ones, because that project pays for reading
    azure://ACCOUNT.blob.core.windows.net/CONTAINER/KEY
                         at exactly that host, which may belong to another cloud (blob.core.chinacloudapi.cn);
                         with AZURE_ACCOUNT_ACCESS_KEY, or Azure's default credentials

Each kind of store is a class with the methods `download`, `upload` and `files`: s3.py, google.py and azure.py. From any
other store Streaming's clients can download. Keys are passed to the clients as they are and never parsed as URLs,
because a key may contain # or ?. A `label`, such as `--remote s3://bucket/mds`, begins each error message.
"""
import contextlib
import io
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sdbench.errors import one_line
from sdbench.files import atomic_write, is_url
from sdbench.stores.addresses import PATIENT, QUICK, SUPPORTED, Retry, StoredFile, parse_address

# Environment variables that configure the clients and that are not secret. Ray passes them to other machines.
SETTINGS = ('S3_ENDPOINT_URL', 'S3_CANNED_ACL', 'AWS_ENDPOINT_URL', 'AWS_ENDPOINT_URL_S3', 'AWS_REGION',
            'AWS_DEFAULT_REGION', 'AWS_PROFILE', 'AWS_REQUEST_CHECKSUM_CALCULATION', 'AWS_RESPONSE_CHECKSUM_VALIDATION',
            'MOSAICML_STREAMING_AWS_REQUESTER_PAYS', 'AZURE_ACCOUNT_NAME', 'AZURE_AUTHORITY_HOST',
            'GOOGLE_CLOUD_PROJECT', 'GS_USER_PROJECT')


@contextlib.contextmanager
def opened(address: str, label: str, retry: Retry = QUICK) -> Iterator[Any]:
    """Yield the client for the address of a file or a folder: an S3Store, a GoogleStore or an AzureStore.

    Raises UserError if the address is not supported. Any error of a client becomes a FileNotFoundError if there is no
    such file, and otherwise an OSError of one line that begins with `label`.
    """
    place = parse_address(address, label)
    has_google_keys = {'GCS_KEY', 'GCS_SECRET'} <= os.environ.keys() and 'GS_USER_PROJECT' not in os.environ
    with client_errors(label):
        if place.scheme == 'azure':
            from sdbench.stores.azure import AzureStore
            yield AzureStore(place, retry)
        elif place.scheme == 'gs' and not has_google_keys:
            from sdbench.stores.google import GoogleStore
            yield GoogleStore(place, retry)
        else:
            from sdbench.stores.s3 import S3Store
            yield S3Store(place, retry)


@contextlib.contextmanager
def client_errors(label: str) -> Iterator[None]:
    """Turn any error of a client into one line with the server's own message, but without URLs, which may hold keys."""
    try:
        yield
    except Exception as error:  # each client has its own exceptions
        if isinstance(error, OSError) and error.filename:  # a file of this machine
            raise
        # Find the status and the text of the server's answer, if it has answered.
        status = None
        text = f'{type(error).__name__}: {error}'
        if isinstance(getattr(error, 'response', None), dict):  # boto3
            status = error.response['ResponseMetadata']['HTTPStatusCode']
            text = '{Code} {Message}'.format_map({'Code': '', 'Message': '', **error.response['Error']})
        for name in ('status_code', 'code'):  # Azure's client, and Google's
            if isinstance(getattr(error, name, None), int):
                status = int(getattr(error, name))
                text = str(error)
        text = re.sub('https?://[^ ]*', '', text).removeprefix(f'{status} ')  # some texts begin with the status
        message = one_line(Exception(f'{status or ""} {text}'), 300)

        if status == 404 and not re.search('NoSuchBucket|ContainerNotFound|bucket does not exist', message):
            raise FileNotFoundError(f'{label}: there is no such file ({message})') from None
        raise OSError(f'{label} cannot be read or written ({message}); check the address, the credentials, '
                      'S3_ENDPOINT_URL and the network as in docs/stores.md') from None


def download(address: str, path: str, label: str, retry: Retry = QUICK, in_threads: bool = True) -> None:
    """Download a file from any store that Streaming knows, or copy a file of this machine.

    If the store speaks S3 and `in_threads` is True, parts of a large file are downloaded concurrently. Streaming's
    clients use their own number of tries.

    Raises FileNotFoundError if there is no such file, OSError if it cannot be read, and UserError if the address is
    wrong.
    """
    if address.startswith(SUPPORTED):
        with opened(address, label, retry) as store:
            store.download(path, in_threads)
        return
    from streaming.base.storage import CloudDownloader
    with client_errors(label):
        CloudDownloader.get(address).download(address, path, retry.timeout)


def upload(file: BinaryIO, address: str, label: str, retry: Retry = PATIENT) -> None:
    """Write the content of an open file to an address. Raises OSError or UserError as `download` does."""
    with opened(address, label, retry) as store:
        store.upload(file)


def read_file(path: str, label: str, retry: Retry = QUICK) -> bytes | None:
    """Return the content of a small file on this machine or in a store; None if there is no such file.

    Raises OSError if it cannot be read, and UserError if the address is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = Path(path)
        try:
            if is_url(path):
                here = Path(folder, 'copy')
                download(path, str(here), label, retry, in_threads=False)
            return here.read_bytes()
        except FileNotFoundError:
            return None


def write_file(path: str, content: bytes | BinaryIO, label: str) -> None:
    """Write bytes, or the content of an open file, to a file on this machine or in a store, atomically.

    Raises OSError if it cannot be written, and UserError if the address is wrong.
    """
    if isinstance(content, bytes):
        content = io.BytesIO(content)
    if is_url(path):
        upload(content, path, label)
        return
    with atomic_write(path) as file:
        shutil.copyfileobj(content, file)


def files_below(address: str, label: str, retry: Retry = QUICK) -> list[StoredFile]:
    """Return all files below an address, or the file at that address if it is not a folder.

    Raises OSError or UserError as `download` does.
    """
    key = parse_address(address, label).key
    with opened(address, label, retry) as store:
        below = list(store.files(f'{key}/' if key else ''))
        if below or not key:
            return below
        # A listing is sorted, so the file with exactly this key would be its first entry.
        return [file for file in itertools.islice(store.files(key), 1) if file.key == key]


def addresses_in(folder: str, label: str) -> list[str]:
    """Return the addresses of the files directly in a folder. Raises OSError or UserError as `download` does."""
    key = parse_address(folder, label).key
    names = [file.key.removeprefix(key).removeprefix('/') for file in files_below(folder, label)]
    return [f'{folder.rstrip("/")}/{name}' for name in names if name and '/' not in name]
