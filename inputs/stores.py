"""Object stores: which addresses they have, a client of obstore for each, and its errors in one line.

    s3://BUCKET/KEY      at S3_ENDPOINT_URL where that is set; credentials of all kinds that boto3 finds, or none
    gs://BUCKET/KEY      GCS_KEY and GCS_SECRET (HMAC keys), else Google's default credentials, or none
    azure://ACCOUNT.blob.core.windows.net/CONTAINER/KEY
                         AZURE_ACCOUNT_ACCESS_KEY, else Azure's command line or default credentials
    az://CONTAINER/KEY   the same, in the account AZURE_ACCOUNT_NAME

A training reads all of these again but az://, which Streaming 0.13.0 does not know: `streaming_address` has its other
name. Of azure:// it takes the account from AZURE_ACCOUNT_NAME or else from the host, and the container from the path.

obstore's threads do not survive a fork: a process that has opened a store may start others by spawn or forkserver only.
"""
import concurrent.futures
import functools
import io
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, InvalidPathError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from inputs.errors import DataError, one_line

SCHEMES = ('s3', 'gs', 'az', 'azure')
AZURE_HOST = 'blob.core.windows.net'
GOOGLE_S3 = 'https://storage.googleapis.com'  # which takes HMAC keys
GOOGLE_SCOPE = 'https://www.googleapis.com/auth/devstorage.read_write'
# What clients are made from; one is made anew where any of these has changed.
SETTINGS = re.compile('AWS_|S3_|GCS_|GOOGLE_|CLOUDSDK_|AZURE_|MOSAICML_STREAMING_')
# A server that is away for a minute is waited for; one that is gone ends the run after two to four.
RETRY_TIMEOUT = timedelta(minutes=2)
LONGEST_PAUSE = timedelta(seconds=10)
SECONDS_TO_SPEAK = 5
CONNECT_TIMEOUT = timedelta(seconds=20)
REQUEST_TIMEOUT = timedelta(seconds=90)  # with its content, of which a request takes up to 64 MiB
MAX_RETRIES = 1000  # RETRY_TIMEOUT comes first
PIECE_BYTES = 8 << 20  # that a request of StoredFile asks for
# Errors of one object of a store that else works: not there, shorter than it was, or put into an archive.
OF_ONE_OBJECT = ('404', '416', 'NoSuchKey', 'InvalidRange', 'InvalidObjectState', 'BlobArchived', 'BlobNotFound')
Answer = TypeVar('Answer')


class Place(NamedTuple):
    """An object, or a beginning that objects have in common."""
    store: ObjectStore  # the client of its bucket or container
    key: str  # without a / at its ends; '' is the whole bucket


class ObjectLost(Exception):
    """An object of a store that else works is gone, in an archive, or not the one that was listed."""


class Address(NamedTuple):
    """What an address is made of."""
    scheme: str  # s3, gs or az
    account: str | None  # of Azure
    bucket: str  # or container
    key: str


def open_store(address: str, flag: str) -> Place:
    """A client for an address and the key in it. It asks AWS for the bucket's region, and no other store for anything.

    Args:
        address: one of those above.
        flag: what errors call it.

    Raises ValueError if such a store cannot be reached, no bucket is named, or a profile or account is missing.
    """
    parts = parse_address(address, flag)
    assert process_of_clients() == os.getpid(), 'a client of a store hangs in a process that was forked'
    settings = tuple(sorted((name, value) for name, value in os.environ.items() if SETTINGS.match(name)))
    try:
        return Place(client(*parts[:3], settings), parts.key)
    except Exception as error:  # each kind of credentials has its own
        raise ValueError(f'{flag} {address}: no client can be made with these credentials and settings '
                         f'({type(error).__name__}: {short_text(error)})') from None


def streaming_address(address: str) -> str:
    """The name by which Streaming reads what lies at an address: another one only for az://."""
    if not address.startswith('az://'):
        return address
    return f'azure://{os.environ.get("AZURE_ACCOUNT_NAME")}.{AZURE_HOST}/{address.removeprefix("az://")}'


def parse_address(address: str, flag: str) -> Address:
    """Raises ValueError if there is no client for such an address, or it names no bucket."""
    scheme, _, place = address.partition('://')
    if scheme not in SCHEMES:
        raise ValueError(f'{flag} {address}: of stores, s3://, gs://, az:// and azure:// can be used; '
                         'use an S3-compatible address with S3_ENDPOINT_URL')
    bucket, _, key = place.partition('/')
    account = None
    if scheme in ('az', 'azure'):
        account = os.environ.get('AZURE_ACCOUNT_NAME')
        if scheme == 'azure':
            account = account or bucket.partition('.')[0]
            bucket, _, key = key.lstrip('/').partition('/')
        if not account:
            raise ValueError(f'{flag} {address} needs an account; set AZURE_ACCOUNT_NAME')
        scheme = 'az'
    if not bucket:
        example = f'azure://ACCOUNT.{AZURE_HOST}/CONTAINER/folder' if scheme == 'az' else f'{scheme}://BUCKET/folder'
        raise ValueError(f'{flag} {address} names no bucket; write {example}')
    return Address(scheme, account, bucket, key.strip('/'))


@functools.cache
def process_of_clients() -> int:
    """The id of the process that opened the first store, which is another one after a fork."""
    return os.getpid()


@functools.lru_cache(maxsize=32)
def client(scheme: str, account: str | None, bucket: str, settings: tuple) -> ObjectStore:
    """obstore's client for a bucket; `settings` are the environment that it is made from."""
    if scheme == 'az':
        return azure_client(account, bucket)
    if scheme == 'gs':
        return google_client(bucket)
    return s3_client(bucket)


def s3_client(bucket: str) -> S3Store:
    """A bucket where boto3 would look for it: endpoint, region, profile and credentials are those that it finds."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config
    from obstore.auth.boto3 import Boto3CredentialProvider
    session = boto3.session.Session()
    has_credentials = session.get_credentials() is not None
    config = Config(retries={'total_max_attempts': 3}, connect_timeout=20, read_timeout=20,
                    signature_version=None if has_credentials else UNSIGNED)
    boto3_client = session.client('s3', endpoint_url=os.environ.get('S3_ENDPOINT_URL'), config=config)
    endpoint = boto3_client.meta.endpoint_url
    region = boto3_client.meta.region_name or 'us-east-1'
    host = urlsplit(endpoint).netloc
    if host.endswith(('.amazonaws.com', '.amazonaws.com.cn')):
        region = region_of(boto3_client, bucket) or region
        endpoint = None  # obstore has that of the region
    wants_bucket_in_host = (boto3_client.meta.config.s3 or {}).get('addressing_style') == 'virtual'
    if endpoint and wants_bucket_in_host:
        endpoint = endpoint.replace(host, f'{bucket}.{host}', 1)
    requester_pays = os.environ.get('MOSAICML_STREAMING_AWS_REQUESTER_PAYS', '').split(',')
    settings = {}
    if endpoint:
        settings['aws_endpoint_url_s3'] = endpoint  # which goes before all that obstore itself finds
    if has_credentials:
        settings['credential_provider'] = Boto3CredentialProvider(session)
    return S3Store(bucket, region=region, skip_signature=not has_credentials, **settings,
                   virtual_hosted_style_request=bool(endpoint and wants_bucket_in_host),
                   request_payer=bucket in [name.strip() for name in requester_pays],
                   client_options=client_options(endpoint), retry_config=retry_config())


def region_of(boto3_client, bucket: str) -> str | None:
    """Where AWS keeps a bucket; None if it does not say. boto3 goes where AWS sends it, obstore must know before."""
    from botocore.exceptions import BotoCoreError, ClientError
    try:
        answer = boto3_client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response  # a refusal, too, says where
    except BotoCoreError:
        return None  # the first request will say that AWS cannot be reached
    return answer['ResponseMetadata']['HTTPHeaders'].get('x-amz-bucket-region')


def google_client(bucket: str) -> ObjectStore:
    """With the HMAC keys of the environment, else with Google's default credentials, else without any."""
    if 'GCS_KEY' in os.environ and 'GCS_SECRET' in os.environ:
        return S3Store(bucket, region='auto', access_key_id=os.environ['GCS_KEY'],
                       secret_access_key=os.environ['GCS_SECRET'], aws_endpoint_url_s3=GOOGLE_S3,
                       virtual_hosted_style_request=False, skip_signature=False,
                       client_options=client_options(), retry_config=retry_config())
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError
    from obstore.auth.google import GoogleCredentialProvider
    try:
        credentials, _ = google.auth.default(scopes=[GOOGLE_SCOPE])
    except DefaultCredentialsError:
        return GCSStore(bucket, skip_signature=True, client_options=client_options(), retry_config=retry_config())
    return GCSStore(bucket, credential_provider=GoogleCredentialProvider(credentials),
                    client_options=client_options(), retry_config=retry_config())


def azure_client(account: str, container: str) -> AzureStore:
    """With the key of the environment, else with what Azure's command line or its default credentials give."""
    settings = {}
    if 'AZURE_ACCOUNT_ACCESS_KEY' in os.environ:
        settings['account_key'] = os.environ['AZURE_ACCOUNT_ACCESS_KEY']
    else:
        from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential
        from obstore.auth.azure import AzureCredentialProvider
        credential = ChainedTokenCredential(AzureCliCredential(), DefaultAzureCredential())
        settings['credential_provider'] = AzureCredentialProvider(credential)
    return AzureStore(container, account_name=account, client_options=client_options(), retry_config=retry_config(),
                      **settings)


def client_options(endpoint: str | None = None) -> dict:
    """Timeouts, the certificates that boto3 would trust, and http:// where the endpoint says so."""
    options = {'connect_timeout': CONNECT_TIMEOUT, 'timeout': REQUEST_TIMEOUT,
               'allow_http': endpoint is not None and endpoint.startswith('http://')}
    if endpoint and os.environ.get('AWS_CA_BUNDLE'):
        with open(os.environ['AWS_CA_BUNDLE'], 'rb') as file:
            options['root_certificate'] = file.read()
    return options


def retry_config() -> dict:
    return {'max_retries': MAX_RETRIES, 'retry_timeout': RETRY_TIMEOUT,
            'backoff': {'init_backoff': timedelta(milliseconds=100), 'max_backoff': LONGEST_PAUSE, 'base': 2}}


def is_of_one_object(error: BaseException) -> bool:
    """Whether an error of obstore says that one object is gone, shorter or archived, in a store that else works."""
    status, code = status_and_code(error)
    if code == 'NoSuchBucket':
        return False
    return isinstance(error, FileNotFoundError) or bool({status, code} & set(OF_ONE_OBJECT))


def store_error(error: BaseException, place: str) -> str:
    """What an error of obstore says of a place, in one line, without what may be secret."""
    status, code = status_and_code(error)
    answer = ' '.join(filter(None, (status, code)))
    if code in ('NoSuchBucket', 'ContainerNotFound'):
        return f'{place}: there is no such bucket ({answer}); check its name and S3_ENDPOINT_URL'
    if code in ('InvalidObjectState', 'BlobArchived'):
        return f'{place} lies in an archive ({answer}); restore it first'
    if isinstance(error, FileNotFoundError) or status == '404':
        return f'{place} is not there ({answer or "not found"})'
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or status in ('401', '403'):
        return (f'{place}: access is denied ({answer or type(error).__name__}); check the name and the credentials, '
                'which may lack the permission')
    if isinstance(error, InvalidPathError):
        return f'{place} cannot be used ({short_text(error)}); rename that object or give a narrower address'
    if status and status < '500':
        return f'{place} cannot be used ({answer}: {short_text(error)})'
    return (f'{place} is out of reach ({answer or short_text(error)}); check its name, the network and, '
            'for a store beside AWS, S3_ENDPOINT_URL')


def answer_of(call: Callable[[], Answer], sentence: str) -> Answer:
    """What a call to a store returns or raises, while Ctrl-C and SIGTERM are answered.

    obstore waits outside Python, where the main thread would run no handler of a signal: another thread waits there.

    Args:
        call: without arguments.
        sentence: is printed where it lasts, as when a store does not answer.
    """
    answer = Future()
    threading.Thread(target=keep_answer, args=(call, answer), daemon=True).start()  # it does not outlive the program
    answered, _ = concurrent.futures.wait([answer], SECONDS_TO_SPEAK)
    if not answered:
        minutes = math.ceil((RETRY_TIMEOUT + REQUEST_TIMEOUT) / timedelta(minutes=1))  # the last try may begin late
        print(f'{sentence}, which can take {minutes} minutes where a store does not answer', file=sys.stderr,
              flush=True)
    return answer.result()


def keep_answer(call: Callable[[], object], answer: Future) -> None:
    """Put into `answer` what a call returns or raises."""
    try:
        answer.set_result(call())
    except BaseException as error:  # whatever it is, the one that waits raises it
        answer.set_exception(error)


def status_and_code(error: BaseException) -> tuple[str | None, str | None]:
    """The status of the answer that an error tells of, and the store's own word for it."""
    text = str(error)
    status = re.search(r'status code: (\d{3})', text)
    code = re.search(r'<Code>(\w+)</Code>', text)
    return status and status[1], code and code[1]


def short_text(error: BaseException) -> str:
    """What an error says: of obstore's its last cause, without Rust's account of it, queries and passwords."""
    text = str(error).partition('\n\nDebug source:')[0]
    text = re.sub(r'<Message>(.*?)</Message>.*', r'\1', re.sub(r'<\?xml.*?\?>|<Error>|<Code>.*?</Code>', '', text))
    text = re.sub(r'(https?://)[^/@\s]*@', r'\1', text)
    text = re.sub(r'\?[^\s)]*', '', text)
    if isinstance(error, (BaseError, OSError)):
        text = re.sub(r'^.* - ', '', text, flags=re.DOTALL)
    return one_line(Exception(text))[:300]


class StoredFile(io.RawIOBase):
    """An object as a file for one who reads it from start to end: one piece is on its way while another is read.

    Args:
        address: of the object.
        size: that it had in the list, in bytes.

    Reading raises ObjectLost for what concerns this object alone, and DataError if the store is out of reach or denies
    access; the latter also where there is no client to be had.
    """

    def __init__(self, address: str, size: int):
        self.address = address
        self.size = size
        try:
            self.place = open_store(address, 'SOURCE')
        except ValueError as error:  # of this process, since another has listed it
            raise DataError(one_line(error)) from None
        self.version = None  # the tag of the object that the first piece came from
        self.position = 0
        self.pieces: dict[int, Future] = {}  # the one that is read, that behind and that ahead of it
        self.fetcher = ThreadPoolExecutor(1)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = start + offset
        return self.position

    def readinto(self, buffer) -> int:
        if self.position >= self.size:
            return 0
        number, start = divmod(self.position, PIECE_BYTES)
        content = self.piece(number)[start:start + len(buffer)]
        buffer[:len(content)] = content
        self.position += len(content)
        return len(content)

    def piece(self, number: int) -> memoryview:
        """The bytes of a piece; the next one is asked for."""
        for other in list(self.pieces):
            if abs(other - number) > 1:
                self.pieces.pop(other).cancel()
        for wanted in (number, number + 1):
            if wanted not in self.pieces and wanted * PIECE_BYTES < self.size:
                self.pieces[wanted] = self.fetcher.submit(self.fetch, wanted)
        return memoryview(self.pieces[number].result())

    def fetch(self, number: int) -> bytes:
        first = number * PIECE_BYTES
        end = min(first + PIECE_BYTES, self.size)
        try:
            answer = obstore.get(self.place.store, self.place.key, options={'range': (first, end)})
            content = answer.bytes()
        except (BaseError, OSError) as error:
            text = store_error(error, self.address)
            raise (ObjectLost(text) if is_of_one_object(error) else DataError(text)) from None
        self.version = self.version or answer.meta['e_tag']
        if answer.meta['e_tag'] != self.version or answer.meta['size'] != self.size:
            raise ObjectLost(f'{self.address} was replaced while it was read')
        return bytes(content)

    def close(self) -> None:
        if not self.closed:
            self.fetcher.shutdown(wait=False, cancel_futures=True)
            self.pieces.clear()
        super().close()
