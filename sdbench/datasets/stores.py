"""Object stores: their addresses, a client of obstore for each, and its errors in one line.

    s3://BUCKET/KEY      at S3_ENDPOINT_URL where that is set; credentials of all kinds that boto3 finds, or none
    gs://BUCKET/KEY      GCS_KEY and GCS_SECRET (HMAC keys), else Google's default credentials, or none
    azure://ACCOUNT.blob.core.windows.net/CONTAINER/KEY
                         AZURE_ACCOUNT_ACCESS_KEY, else Azure's default credentials

A training reads all of these again. As Streaming does, the account of azure:// comes from AZURE_ACCOUNT_NAME or else
from the host, and the container from the path.

obstore's threads do not survive a fork: a process that has opened a store may start others by spawn or forkserver only.
"""
import contextlib
import functools
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import BinaryIO

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from sdbench.errors import DataError, one_line
from sdbench.paths import CLAIM, is_url

AZURE_HOST = 'blob.core.windows.net'
GOOGLE_S3 = 'https://storage.googleapis.com'  # which takes HMAC keys
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
        address: s3://, gs:// or azure://, as the module's docstring lists them.
        flag: its name in error messages.
        is_first: whether requests give up early, as FIRST_RETRIES says.

    Raises ValueError if such a store cannot be reached, no bucket is named, or a profile is missing.
    """
    scheme, _, rest = address.partition('://')
    if scheme not in ('s3', 'gs', 'azure'):
        raise ValueError(f'{flag} {address}: of stores, s3://, gs:// and azure:// can be used; '
                         'use an S3-compatible address with S3_ENDPOINT_URL')

    # the bucket, or of azure://HOST/CONTAINER/KEY the container
    bucket, _, key = rest.partition('/')
    account = None
    if scheme == 'azure':
        account = os.environ.get('AZURE_ACCOUNT_NAME') or bucket.partition('.')[0]
        bucket, _, key = key.lstrip('/').partition('/')
    if not bucket:
        raise ValueError(f'{flag} {address} names no bucket; write s3://BUCKET/folder, gs://BUCKET/folder or '
                         f'azure://ACCOUNT.{AZURE_HOST}/CONTAINER/folder')

    try:
        return client(scheme, account, bucket, os.environ.get('S3_ENDPOINT_URL'), is_first), key.strip('/')
    except Exception as error:  # each kind of credentials has its own
        raise ValueError(f'{flag} {address}: no client can be made with these credentials and settings '
                         f'({type(error).__name__}: {short_text(error)})') from None


def reach(address: str, flag: str) -> None:
    """Raise ValueError if no server answers at an address, not even with an error, as FIRST_RETRIES and TIMEOUTS say.

    That is within ten seconds if its host is not known or refuses the connection.
    """
    store, key = open_store(address, flag, is_first=True)

    # in a thread, so that this one hears Ctrl-C meanwhile, as obstore does not
    answer = Future()

    def ask() -> None:
        try:
            answer.set_result(obstore.head(store, f'{key}/{CLAIM}'.strip('/')))
        except Exception as error:
            answer.set_exception(error)
    threading.Thread(target=ask, daemon=True).start()
    try:
        while not answer.done():  # a signal that another thread was given is heard when this one wakes
            wait([answer], timeout=0.5)
        answer.result()
    except (BaseError, OSError) as error:
        text = str(error)
        if 'HTTP error' not in text:
            return  # an answer, such as that there is no such file
        why = 'no server answers there'
        if 'ConnectionRefused' in text:
            why = 'the connection is refused'
        elif 'dns error' in text:
            why = 'its host is not known'
        raise ValueError(f'{flag} {address}: {why}; check the address, S3_ENDPOINT_URL and the network') from None


@functools.cache
def client(scheme: str, account: str | None, bucket: str, endpoint: str | None, is_first: bool) -> ObjectStore:
    """Make obstore's client for a bucket. `endpoint` is the URL of an S3 server that is not Amazon's, or None."""
    retries = FIRST_RETRIES if is_first else RETRIES
    if scheme == 'azure':  # with the key of the environment, else with Azure's default credentials
        options = {'account_name': account, 'client_options': TIMEOUTS, 'retry_config': retries}
        if 'AZURE_ACCOUNT_ACCESS_KEY' in os.environ:
            return AzureStore(bucket, account_key=os.environ['AZURE_ACCOUNT_ACCESS_KEY'], **options)
        from obstore.auth.azure import AzureCredentialProvider
        return AzureStore(bucket, credential_provider=AzureCredentialProvider(), **options)
    if scheme == 's3':
        return s3_client(bucket, endpoint, retries)

    # of Google with the HMAC keys of the environment, else with Google's default credentials, else without any
    options = {'client_options': TIMEOUTS, 'retry_config': retries}
    if 'GCS_KEY' in os.environ and 'GCS_SECRET' in os.environ:
        return S3Store(bucket, region='auto', access_key_id=os.environ['GCS_KEY'],
                       secret_access_key=os.environ['GCS_SECRET'], aws_endpoint_url_s3=GOOGLE_S3,
                       virtual_hosted_style_request=False, **options)
    from google.auth.exceptions import DefaultCredentialsError
    from obstore.auth.google import GoogleCredentialProvider
    try:
        return GCSStore(bucket, credential_provider=GoogleCredentialProvider(), **options)
    except DefaultCredentialsError:
        return GCSStore(bucket, skip_signature=True, **options)


def s3_client(bucket: str, endpoint: str | None, retries: dict) -> S3Store:
    """Make a client with the endpoint, region, profile and credentials that boto3 finds."""
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    # endpoint and region
    session = boto3.session.Session()
    boto3_client = session.client('s3', endpoint_url=endpoint)
    endpoint = boto3_client.meta.endpoint_url  # which may also come from a profile
    settings = {'region': boto3_client.meta.region_name or 'us-east-1'}
    if '.amazonaws.com' not in endpoint:
        settings['aws_endpoint_url_s3'] = endpoint  # which goes before all that obstore itself finds

    # credentials: of any kind, or none for a public bucket
    if session.get_credentials() is None:
        settings['skip_signature'] = True
    else:
        settings['credential_provider'] = Boto3CredentialProvider(session)

    # connection: plain HTTP only where the endpoint asks for it, and a certificate authority of one's own
    options = {**TIMEOUTS, 'allow_http': endpoint.startswith('http://')}
    if os.environ.get('AWS_CA_BUNDLE'):
        with open(os.environ['AWS_CA_BUNDLE'], 'rb') as file:
            options['root_certificate'] = file.read()
    return S3Store(bucket, virtual_hosted_style_request=False, client_options=options, retry_config=retries, **settings)


def store_error(error: BaseException, label: str) -> str:
    """Say in one line why a folder or file (`label`) of a store failed, without what may be secret."""
    text = short_text(error)
    if 'NoSuchBucket' in text or 'ContainerNotFound' in text:
        return f'{label}: there is no such bucket; check its name and S3_ENDPOINT_URL'
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or re.search('status code: 40[13]', text):
        return f'{label}: access is denied; check the name and the credentials, which may lack the permission ({text})'
    return f'{label} cannot be read or written ({text})'


def short_text(error: BaseException) -> str:
    """Return the last cause that an error of obstore names, in one line.

    Rust's debug output, XML and URLs are left out: URLs may hold passwords.
    """
    text = str(error).partition('\n\nDebug source:')[0]
    text = re.sub(r'<[^>]*>', ' ', text)
    text = re.sub(r'^.* - ', '', text, flags=re.DOTALL)
    text = re.sub(r'https?://\S*', '', text)
    return one_line(Exception(text), 300)


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
