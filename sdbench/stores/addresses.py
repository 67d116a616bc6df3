"""Addresses in object stores, and what the classes of all kinds of stores share."""
import os
import re
from typing import NamedTuple

from sdbench.errors import UserError

SUPPORTED = ('s3://', 'gs://', 'azure://')


class Address(NamedTuple):
    """The parts of an address in a store."""
    scheme: str
    host: str | None  # Azure only
    bucket: str  # for Azure the container
    key: str  # without leading and trailing slashes


class Retry(NamedTuple):
    """How often a request is tried if its error may be temporary."""
    tries: int  # attempts per request, with pauses in between that get longer
    timeout: float  # seconds without a byte after which a request is tried again


QUICK = Retry(tries=4, timeout=20)  # for the start of a command, when a wrong address or name must show soon
PATIENT = Retry(tries=20, timeout=60)  # for work that has begun, which survives an outage of a few minutes
CONNECT_SECONDS = 20  # after which a server that does not answer is tried again


class StoredFile(NamedTuple):
    """A file as a store lists it."""
    key: str
    size: int  # in bytes
    changed: str  # ETag or time of the last change: another text if the file is written again


def parse_address(address: str, label: str) -> Address:
    """Return the parts of an address such as s3://BUCKET/KEY.

    Raises UserError, which begins with `label`, if the scheme is not supported, or a name is missing or malformed.
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
            host = f'{os.environ.get("AZURE_ACCOUNT_NAME", host)}.blob.core.windows.net'
        bucket, _, key = key.lstrip('/').partition('/')
    for name in (bucket, host or bucket):
        if not re.fullmatch(r'[A-Za-z0-9$][\w.-]*', name, re.ASCII):
            raise UserError(f'{label}: "{name}" cannot be the name of a bucket or an account; use letters, digits, '
                            'dots, - and _')
    return Address(scheme, host, bucket, key.strip('/'))
