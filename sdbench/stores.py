"""Object stores: what an address, an endpoint, credentials and an answer mean, and how files are read and written.

    s3://BUCKET/KEY      at S3_ENDPOINT_URL where that is set; credentials of all kinds that boto3 finds, or none
    gs://BUCKET/KEY      GCS_KEY and GCS_SECRET (HMAC keys), else Google's default credentials, or none
    azure://ACCOUNT.blob.core.windows.net/CONTAINER/KEY
                         AZURE_ACCOUNT_ACCESS_KEY, else Azure's default credentials

boto3 asks each store that speaks S3; Google's does with HMAC keys, or without any credentials. From the others
Streaming's clients download, and their own clients write and list.
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
AZURE_HOST = 'blob.core.windows.net'
GOOGLE_S3 = 'https://storage.googleapis.com'  # where Google speaks S3
TRIES = 4  # of a request whose error may pass: up to 1, 2, 4, 8, 16, then 20 seconds apart, by chance
SILENCE = 20  # seconds without a byte, after which a request is tried again
SENDING = {'tries': 8, 'silence': 60}  # of a checkpoint, whose last piece takes a store long to put together
PATIENT = {'tries': 20, 'silence': 60}  # of commands that make datasets, for which a server may be away for minutes
IN_ONE = 64 << 20  # bytes that are sent in one request, as a shard is: some stores know no other
CONNECTIONS = 64  # that a client keeps, since a command may ask as many things at once


class Address(NamedTuple):
    """What an address of a store names."""
    scheme: str
    account: str | None  # of Azure
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

    # the bucket; Azure's account comes from AZURE_ACCOUNT_NAME or the host, as Streaming has it
    bucket, _, key = rest.partition('/')
    account = None
    if scheme == 'azure':
        account = os.environ.get('AZURE_ACCOUNT_NAME') or bucket.partition('.')[0]
        bucket, _, key = key.lstrip('/').partition('/')
    if not bucket:
        raise UserError(f'{label} names no bucket; write s3://BUCKET/folder, gs://BUCKET/folder or '
                        f'azure://ACCOUNT.{AZURE_HOST}/CONTAINER/folder')
    for name in filter(None, (account, bucket)):
        if not re.fullmatch(r'[A-Za-z0-9$][\w.-]*', name, re.ASCII):
            raise UserError(f'{label}: {name} can be no name of a bucket or an account; these have letters, digits, '
                            'dots, - and _')
    return Address(scheme, account, bucket, key.strip('/'))


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
        tries: of each request, as `connect` has it; clients of stores that do not speak S3 have their own.
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
        else:
            streaming_downloader(os.path.dirname(address), os.getpid()).download(address, path, silence)
    except Exception as error:  # every storage client has its own
        raise store_error(error, label) from None


def download_from_s3(s3: Any, place: Address, path: str, in_threads: bool) -> None:
    """Download a file of a store that speaks S3, at the cost of the one who asks where Streaming's variable says so."""
    from boto3.s3.transfer import TransferConfig
    from botocore.exceptions import ClientError
    payer = {}
    if place.bucket in os.environ.get('MOSAICML_STREAMING_AWS_REQUESTER_PAYS', '').replace(' ', '').split(','):
        payer = {'RequestPayer': 'requester'}
    try:
        s3.download_file(place.bucket, place.key, path, payer, Config=TransferConfig(use_threads=in_threads))
    except ClientError:  # boto3 asks for the size by HEAD, whose answer has no words
        s3.get_object(Bucket=place.bucket, Key=place.key, **payer)
        raise


@functools.cache
def streaming_downloader(folder: str, process: int) -> Any:
    """Return Streaming's client for a folder, once in each process."""
    from streaming.base.storage import CloudDownloader
    return CloudDownloader.get(folder)


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
            azure_container(place).upload_blob(place.key, file, overwrite=True)
        elif place.scheme == 'gs':
            google_bucket(place).blob(place.key).upload_from_file(file)
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
            for page in s3.get_paginator('list_objects_v2').paginate(Bucket=place.bucket, Prefix=prefix):
                for entry in page.get('Contents', ()):
                    yield StoredFile(entry['Key'], entry['Size'], entry.get('ETag') or str(entry['LastModified']))
        elif place.scheme in ('azure', 'gs'):
            if place.scheme == 'azure':
                found = azure_container(place).list_blobs(name_starts_with=prefix)
            else:
                found = google_bucket(place).list_blobs(prefix=prefix)
            for blob in found:
                yield StoredFile(blob.name, blob.size, blob.etag)
        else:
            for key in composer_store(address).list_objects(prefix):
                yield StoredFile(key, 0, '')
    except Exception as error:  # every storage client has its own
        raise store_error(error, label) from None


def azure_container(place: Address) -> Any:
    """Return the client of a container of Azure, with the credentials that Streaming finds."""
    from azure.storage.blob import BlobServiceClient
    from streaming.base.storage import AzureDownloader
    service = BlobServiceClient(f'https://{place.account}.{AZURE_HOST}', AzureDownloader().credential)
    return service.get_container_client(place.bucket)


def google_bucket(place: Address) -> Any:
    """Return the client of a bucket of Google, with its default credentials."""
    from google.cloud.storage import Client
    return Client().bucket(place.bucket)


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
