"""Addresses in object stores, and the interface that each kind of store implements."""
import os
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Protocol

from sdbench.errors import UserError

SUPPORTED = ('s3://', 'gs://', 'azure://')
AZURE_HOST = 'blob.core.windows.net'  # the public cloud


class Address(NamedTuple):
    """The parts of an address in a store."""
    scheme: str
    host: str | None  # Azure only
    bucket: str  # for Azure the container
    key: str  # without leading and trailing slashes


class Retry(NamedTuple):
    """How often a request is tried if its error may be temporary.

    Attributes:
        tries: attempts per request. boto3 waits up to 1, 2, 4, 8, 16, then 20 seconds in between.
        timeout: seconds without a byte after which a request is tried again.
    """
    tries: int
    timeout: float


QUICK = Retry(tries=4, timeout=20)  # for the start of a command, when a wrong address or name must show soon
PATIENT = Retry(tries=20, timeout=60)  # for work that has begun, which survives an outage of a few minutes


class StoredFile(NamedTuple):
    """A file as a store lists it."""
    key: str
    size: int  # in bytes
    changed: str  # ETag or time of the last change: another text if the file is written again


def parse_address(address: str, label: str) -> Address:
    """Return the parts of an address such as s3://BUCKET/KEY.

    Raises UserError, which begins with `label`, if the scheme is not supported, or the bucket is missing or malformed.
    """
    if not address.startswith(SUPPORTED):
        raise UserError(f'{label}: only the stores s3://, gs:// and azure:// can be used; use an S3-compatible address '
                        'with S3_ENDPOINT_URL')
    scheme, _, rest = address.partition('://')
    bucket, _, key = rest.partition('/')
    host = None
    if scheme == 'azure':
        # The account comes first. An account without a host is in the public cloud.
        host = bucket
        if '.' not in host:
            host = f'{os.environ.get("AZURE_ACCOUNT_NAME", host)}.{AZURE_HOST}'
        bucket, _, key = key.lstrip('/').partition('/')
    if not bucket:
        raise UserError(f'{label} names no bucket; write s3://BUCKET/folder, gs://BUCKET/folder or '
                        f'azure://ACCOUNT.{AZURE_HOST}/CONTAINER/folder')
    for name in filter(None, (host, bucket)):
        if not re.fullmatch(r'[A-Za-z0-9$][\w.-]*', name, re.ASCII):
            raise UserError(f'{label}: {name} cannot be the name of a bucket or an account; use letters, digits, '
                            'dots, - and _')
    return Address(scheme, host, bucket, key.strip('/'))


class Store(Protocol):
    """One address in an object store, and the client that reaches it."""

    def download(self, path: str, in_threads: bool) -> None:
        """Download the file at the address to `path`."""

    def upload(self, file: BinaryIO) -> None:
        """Write the content of an open file to the address."""

    def files(self, prefix: str) -> Iterator[StoredFile]:
        """Yield the files in the bucket whose keys begin with `prefix`, sorted by key."""
