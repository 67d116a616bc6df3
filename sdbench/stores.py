"""Object stores: what an address, an endpoint, credentials and an answer mean, and how files are read and written.

    s3://BUCKET/KEY      at S3_ENDPOINT_URL where that is set; credentials of all kinds that boto3 finds, or none
    gs://BUCKET/KEY      GCS_KEY and GCS_SECRET (HMAC keys), else Google's default credentials, or none
    azure://ACCOUNT.blob.core.windows.net/CONTAINER/KEY
                         at that host, also of another cloud (blob.core.chinacloudapi.cn); AZURE_ACCOUNT_ACCESS_KEY,
                         else Azure's default credentials

boto3 asks each store that speaks S3; Google's does with HMAC keys, or without any credentials. Google and Azure are
otherwise asked by their own clients. From other stores Streaming's clients download. A process makes one client for
each account, and each has the same number of tries: whole keys are given to it, and never parsed as URLs, because `#`
and `?` may be part of a key.
"""
import functools
import http
import itertools
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from sdbench.errors import UserError, one_line

OURS = ('s3://', 'gs://', 'azure://')
AZURE_HOST = 'blob.core.windows.net'  # of the public cloud
GOOGLE_S3 = 'https://storage.googleapis.com'  # where Google speaks S3
# Environment variables with which this module, or a client that it makes, asks a store, and which are no secrets.
SETTINGS = ('S3_ENDPOINT_URL', 'S3_CANNED_ACL', 'AWS_ENDPOINT_URL', 'AWS_ENDPOINT_URL_S3', 'AWS_REGION',
            'AWS_DEFAULT_REGION', 'AWS_PROFILE', 'AWS_REQUEST_CHECKSUM_CALCULATION', 'AWS_RESPONSE_CHECKSUM_VALIDATION',
            'MOSAICML_STREAMING_AWS_REQUESTER_PAYS', 'AZURE_ACCOUNT_NAME', 'AZURE_AUTHORITY_HOST',
            'GOOGLE_CLOUD_PROJECT')
TRIES = 4  # of a request whose error may pass: up to 1, 2, 4, 8, 16, then 20 seconds apart, by chance
LONGEST_PAUSE = 15  # seconds between two tries of Azure's and of Google's client, whose pauses are not by chance
SILENCE = 20  # seconds without a byte, after which a request is tried again
SENDING = {'tries': 8, 'silence': 60}  # of a checkpoint, whose last piece takes a store long to put together
PATIENT = {'tries': 20, 'silence': 60}  # of commands that make datasets, for which a server may be away for minutes
IN_ONE = 64 << 20  # bytes that are sent in one request, as a shard is: some stores know no other
CONNECTIONS = 64  # that a client keeps, since a command may ask as many things at once


class Address(NamedTuple):
    """What an address of a store names."""
    scheme: str
    host: str | None  # of Azure
    bucket: str  # of Azure the container
    key: str  # without outer slashes


class StoredFile(NamedTuple):
    """What a store says of a file."""
    key: str
    size: int  # in bytes
    changed: str  # its ETag, which is another once it was written again


def parse_address(address: str, label: str, ours_only: bool = False) -> Address:
    """Return what an address of a store names.

    Raises UserError, which begins with `label`, if it names no bucket, or one that no store can have, or where
    `ours_only` if it is none of s3://, gs:// and azure://.
    """
    if ours_only and not address.startswith(OURS):
        raise UserError(f'{label}: of stores, s3://, gs:// and azure:// can be used; use an S3-compatible address '
                        'with S3_ENDPOINT_URL')
    scheme, _, rest = address.partition('://')

    # the bucket; an address of Azure without a host is of the public cloud
    bucket, _, key = rest.partition('/')
    host = None
    if scheme == 'azure':
        host = bucket
        if '.' not in host:
            host = f'{os.environ.get("AZURE_ACCOUNT_NAME", host)}.{AZURE_HOST}'
        bucket, _, key = key.lstrip('/').partition('/')
    if not bucket:
        raise UserError(f'{label} names no bucket; write s3://BUCKET/folder, gs://BUCKET/folder or '
                        f'azure://ACCOUNT.{AZURE_HOST}/CONTAINER/folder')
    for name in filter(None, (host, bucket)):
        if not re.fullmatch(r'[A-Za-z0-9$][\w.-]*', name, re.ASCII):
            raise UserError(f'{label}: {name} can be no name of a bucket or an account; these have letters, digits, '
                            'dots, - and _')
    return Address(scheme, host, bucket, key.strip('/'))


def connect(scheme: str, label: str, tries: int = TRIES, silence: float = SILENCE) -> Any | None:
    """Return boto3's client for the stores of a scheme, with credentials where there are any; None if they speak no S3.

    Args:
        scheme: s3, gs or another.
        label: of error messages.
        tries: of each request.
        silence: seconds without a byte, after which a request is tried again.

    Raises UserError if the endpoint is no URL, a profile is missing, or the like.
    """
    if scheme not in ('s3', 'gs'):
        return None
    try:
        endpoint = os.environ.get('S3_ENDPOINT_URL', '').strip() or None  # docker's --env-file keeps blanks
        return make_client(scheme, endpoint, tries, silence, os.getpid())
    except Exception as error:  # each kind of credentials has its own
        raise UserError(f'{label}: no client can be made with these credentials and settings ({type(error).__name__}: '
                        f'{one_line(error, 300)}); check them, and S3_ENDPOINT_URL') from None


@functools.cache
def make_client(scheme: str, endpoint: str | None, tries: int, silence: float, process: int) -> Any | None:
    """Make what `connect` returns, once in each process: a connection that is forked would be read by two."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    # the credentials
    session = boto3.session.Session()
    if scheme == 'gs':
        endpoint = GOOGLE_S3
        session = boto3.session.Session(os.environ.get('GCS_KEY'), os.environ.get('GCS_SECRET'), region_name='auto')
        if 'GCS_KEY' not in os.environ or 'GCS_SECRET' not in os.environ:
            if google_credentials_exist():
                return None
            session = None
    elif session.get_credentials() is None:
        session = None

    # Checksums that boto3 sends by default since 1.36 are refused by R2, B2, OCI and older MinIO and Ceph.
    checksums = {}
    for name in ('request_checksum_calculation', 'response_checksum_validation'):
        checksums[name] = os.environ.get(f'AWS_{name.upper()}', 'when_required')
    config = Config(signature_version=UNSIGNED if session is None else None, read_timeout=silence, connect_timeout=20,
                    retries={'mode': 'standard', 'total_max_attempts': tries}, max_pool_connections=CONNECTIONS,
                    **checksums)
    maker = session or boto3.session.Session(region_name='auto' if scheme == 'gs' else None)
    client = maker.client('s3', endpoint_url=endpoint, config=config)
    client.meta.events.register('after-call.s3', keep_words)
    return client


def google_credentials_exist() -> bool:
    """Tell whether Google's default credentials are to be found."""
    import google.auth
    try:
        google.auth.default()
        return True
    except google.auth.exceptions.DefaultCredentialsError:
        return False


def keep_words(http_response, parsed: dict, **_) -> None:
    """Keep what a server says in an error that is no XML, which boto3 drops. boto3 calls this at each answer."""
    if http_response.status_code >= 300 and not re.match(r'\s*<(\?xml|Error)', http_response.text):
        parsed['Error']['Message'] = re.sub('<[^>]*>', ' ', http_response.text)  # of a page, without its tags


def download(address: str, path: str, label: str, tries: int = TRIES, silence: float = SILENCE,
             in_threads: bool = True) -> None:
    """Download a file of any store that Streaming knows; a file of this machine is copied.

    Args:
        address: of the file.
        path: to write it to.
        label: begins what is said of an error.
        tries: of each request, as `connect` has it; Streaming's clients of other stores have their own.
        silence: seconds without a byte, after which a request is tried again.
        in_threads: whether several pieces are downloaded at once, where the store speaks S3.

    Raises FileNotFoundError if there is no such file, OSError if it cannot be read, and UserError if the address or
    the settings are wrong.
    """
    place = None
    s3 = None
    if address.startswith(OURS):
        place = parse_address(address, label)
        s3 = connect(place.scheme, label, tries, silence)
    try:
        if s3 is not None:
            download_from_s3(s3, place, path, in_threads)
        elif place is None:
            streaming_downloader('/'.join(address.split('/')[:3]), os.getpid()).download(address, path, silence)
        else:
            with open(path, 'wb') as file:
                if place.scheme == 'azure':
                    azure_container(place, tries, silence).download_blob(place.key).readinto(file)
                else:
                    google_bucket(place).blob(place.key).download_to_file(file, **google_options(tries, silence))
    except Exception as error:  # every storage client has its own
        raise store_error(error, label) from None


def download_from_s3(s3: Any, place: Address, path: str, in_threads: bool) -> None:
    """Download a file of a store that speaks S3."""
    from boto3.s3.transfer import TransferConfig
    from botocore.exceptions import ClientError
    payer = payer_of(place)
    try:
        s3.download_file(place.bucket, place.key, path, payer, Config=TransferConfig(use_threads=in_threads))
    except ClientError:  # boto3 asks for the size by HEAD, whose answer has no words
        s3.get_object(Bucket=place.bucket, Key=place.key, **payer)
        raise


def payer_of(place: Address) -> dict:
    """Return the arguments with which the one who asks pays, where Streaming's variable names the bucket."""
    if place.bucket in os.environ.get('MOSAICML_STREAMING_AWS_REQUESTER_PAYS', '').replace(' ', '').split(','):
        return {'RequestPayer': 'requester'}
    return {}


@functools.cache
def streaming_downloader(bucket: str, process: int) -> Any:
    """Return Streaming's client for a bucket, or for files of this machine, once in each process."""
    from streaming.base.storage import CloudDownloader
    return CloudDownloader.get(bucket)


def upload(path: str, address: str, label: str) -> None:
    """Write a file into a store. Raises OSError or UserError as `download` does."""
    with open(path, 'rb') as file:
        write(file, address, label, **SENDING)


def write(file: BinaryIO, address: str, label: str, tries: int = TRIES, silence: float = SILENCE) -> None:
    """Write what an open file holds into a store. Raises OSError or UserError as `download` does."""
    from boto3.s3.transfer import TransferConfig
    place = parse_address(address, label)
    s3 = connect(place.scheme, label, tries, silence)
    try:
        if s3 is not None:
            acl = {'ACL': os.environ['S3_CANNED_ACL']} if 'S3_CANNED_ACL' in os.environ else {}  # as Composer has it
            s3.upload_fileobj(file, place.bucket, place.key, acl, Config=TransferConfig(multipart_threshold=IN_ONE))
        elif place.scheme == 'azure':
            azure_container(place, tries, silence).upload_blob(place.key, file, overwrite=True)
        elif place.scheme == 'gs':
            google_bucket(place).blob(place.key).upload_from_file(file, **google_options(tries, silence))
        else:
            composer_store(address).upload_object(place.key, file.name)
    except Exception as error:  # every storage client has its own
        raise store_error(error, label) from None


def addresses_in(folder: str, label: str) -> list[str]:
    """Return the addresses of the files directly in a folder of a store. Raises OSError or UserError as above."""
    key = parse_address(folder, label).key
    prefix = f'{key}/' if key else ''
    names = [file.key.removeprefix(prefix) for file in files_from(folder, prefix, label)]
    return [f'{folder.rstrip("/")}/{name}' for name in names if name and '/' not in name]


def files_below(address: str, label: str, tries: int = TRIES, silence: float = SILENCE) -> list[StoredFile]:
    """Return all files below an address, or else the file of that address. Raises OSError or UserError as above."""
    key = parse_address(address, label).key
    if not key:
        return list(files_from(address, '', label, tries, silence))
    first = itertools.islice(files_from(address, key, label, tries, silence), 1)  # it comes before what begins with it
    return list(files_from(address, f'{key}/', label, tries, silence)) or [file for file in first if file.key == key]


def files_from(address: str, prefix: str, label: str, tries: int = TRIES, silence: float = SILENCE
               ) -> Iterator[StoredFile]:
    """Yield the files in the bucket of an address whose keys begin with a prefix, in the order of their keys.

    Raises OSError or UserError as above.
    """
    place = parse_address(address, label)
    s3 = connect(place.scheme, label, tries, silence)
    try:
        if s3 is not None:
            pages = s3.get_paginator('list_objects_v2')
            for page in pages.paginate(Bucket=place.bucket, Prefix=prefix, **payer_of(place)):
                for entry in page.get('Contents', ()):
                    yield StoredFile(entry['Key'], entry['Size'], entry.get('ETag') or str(entry['LastModified']))
        elif place.scheme in ('azure', 'gs'):
            if place.scheme == 'azure':
                found = azure_container(place, tries, silence).list_blobs(name_starts_with=prefix)
            else:
                found = google_bucket(place).list_blobs(prefix=prefix, **google_options(tries, silence))
            for blob in found:
                yield StoredFile(blob.name, blob.size, blob.etag)
        else:
            for key in composer_store(address).list_objects(prefix):
                yield StoredFile(key, 0, '')
    except Exception as error:  # every storage client has its own
        raise store_error(error, label) from None


def azure_container(place: Address, tries: int, silence: float) -> Any:
    """Return the client of a container of Azure."""
    return azure_service(place.host, tries, silence, os.getpid()).get_container_client(place.bucket)


@functools.cache
def azure_service(host: str, tries: int, silence: float, process: int) -> Any:
    """Return the client of an account of Azure, once in each process, with the credentials that Streaming finds."""
    from azure.storage.blob import BlobServiceClient, ExponentialRetry
    from streaming.base.storage import AzureDownloader

    class ShortPauses(ExponentialRetry):  # its own pauses are 18, 24 and 42 seconds, also if a connection is refused
        def get_backoff_time(self, settings: dict) -> float:
            return min(2 ** (settings['count'] - 1), LONGEST_PAUSE)

    kinds = ('retry_total', 'retry_connect', 'retry_read', 'retry_status')  # of errors
    return BlobServiceClient(f'https://{host}', AzureDownloader().credential, connection_timeout=20,
                             read_timeout=silence, retry_policy=ShortPauses(**dict.fromkeys(kinds, tries - 1)))


def google_bucket(place: Address) -> Any:
    """Return the client of a bucket of Google."""
    return google_client(os.getpid()).bucket(place.bucket)


@functools.cache
def google_client(process: int) -> Any:
    """Return Google's client, once in each process, with its default credentials."""
    from google.cloud.storage import Client
    return Client()


def google_options(tries: int, silence: float) -> dict:
    """Return the arguments of a request to Google: how long it is tried, which by default is two minutes."""
    from google.cloud.storage.retry import DEFAULT_RETRY
    seconds = sum(min(2 ** number, LONGEST_PAUSE) for number in range(tries - 1))
    return {'retry': DEFAULT_RETRY.with_delay(maximum=LONGEST_PAUSE).with_timeout(seconds), 'timeout': (20, silence)}


def composer_store(address: str) -> Any:
    """Return Composer's client of a store."""
    from composer.utils import maybe_create_object_store_from_uri
    return maybe_create_object_store_from_uri(address)


def store_error(error: BaseException, label: str) -> OSError:
    """Make an error of any client of a store one line that begins with `label`, without what may be secret.

    It has the server's own words. That of a file which is not there is a FileNotFoundError.
    """
    status, words = answer_of(error)
    if 'NoSuchBucket' in words or 'ContainerNotFound' in words:
        return OSError(f'{label}: there is no such bucket; check its name and S3_ENDPOINT_URL')
    if status in (401, 403):
        return OSError(f'{label}: access is denied; check the name and the credentials, which may lack the permission '
                       f'({words})')
    if status == 404 or isinstance(error, FileNotFoundError):
        return FileNotFoundError(f'{label}: there is no such file ({words})')
    if status is not None:
        return OSError(f'{label} cannot be read or written ({words})')

    # no server has answered, or it is this machine's disk; botocore's error has its cause apart
    text = f'{type(error).__name__} {error} {getattr(error, "kwargs", "")}'
    advice = 'check the address, S3_ENDPOINT_URL and the network'
    if re.search('refused', text, re.IGNORECASE):
        return OSError(f'{label}: the connection is refused; {advice}')
    if re.search('resolve|Name or service|Timeout|Connect|SSL|HTTPClient', text):
        return OSError(f'{label}: no server answers there; {advice}')
    return OSError(f'{label} cannot be read or written ({type(error).__name__}: {words})')


def answer_of(error: BaseException) -> tuple[int | None, str]:
    """Return the status that a server has answered, if any, and in one line what it has said, or the error's words."""
    text = str(error)
    status = None
    if isinstance(getattr(error, 'response', None), dict):  # of boto3
        status = error.response['ResponseMetadata']['HTTPStatusCode']
        said = error.response['Error']
        text = f'{said.get("Code", "")} {said.get("Message", "")}'.removeprefix(f'{status} ')
    else:
        for name in ('status_code', 'code'):  # of Azure's client and of Google's
            if isinstance(getattr(error, name, None), int):
                status = int(getattr(error, name))

    words = one_line(Exception(re.sub(r'https?://\S*', '', text)), 300)  # without URLs, which may have passwords
    if status is not None:
        words = f'{status} {words or http.HTTPStatus(status).phrase}'
    return status, words


if __name__ == '__main__':  # python -m sdbench.stores FILE ADDRESS, by which a training sends a checkpoint
    _, path, address = sys.argv
    upload(path, address, os.path.basename(path))
