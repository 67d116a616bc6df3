"""Stores are opened with the same environment variables as Streaming, and each error is reported in one line."""
import contextlib
import io
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from azure.storage.blob import BlobServiceClient
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Client
from werkzeug.wrappers import Request, Response

from sdbench.datasets.output import OutputFolder, PartWriter, join_parts, write_index
from sdbench.datasets.readers import open_file
from sdbench.files import CLAIM
from sdbench.stores import addresses_in, download, files_below, upload
from sdbench.stores.azure import azure_service
from sdbench.stores.google import google_client
from sdbench.stores.s3 import make_client
from tests.local_s3 import local_s3, served
from tests.samples import read_back, write_files

SECRET = 'c2VjcmV0LWtleQ=='


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    """Remove all credentials except the ones that a test sets, and do not ask the metadata server of a cloud."""
    for name in list(os.environ):
        if re.match('AWS_|S3_|GCS_|GS_|GOOGLE_|CLOUDSDK_|AZURE_|MOSAICML_STREAMING_', name):
            monkeypatch.delenv(name)
    monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
    monkeypatch.setenv('NO_GCE_CHECK', 'true')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(tmp_path / 'credentials'))
    monkeypatch.setenv('AWS_CONFIG_FILE', str(tmp_path / 'config'))
    monkeypatch.setenv('CLOUDSDK_CONFIG', str(tmp_path))
    for made_of_environment in (make_client, azure_service, google_client):
        made_of_environment.cache_clear()


@pytest.fixture
def server(no_credentials, monkeypatch):
    """The S3 server on loopback, which also accepts requests without a signature."""
    with local_s3(monkeypatch) as server:
        yield server


@pytest.mark.parametrize('profile', [None, 'mine'])
def test_keys_and_region_come_from_boto3_and_without_keys_requests_are_unsigned(server, monkeypatch, profile):
    server.client.put_object(Bucket='bucket', Key='folder/a.tar', ACL='public-read')
    for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_DEFAULT_REGION'):
        monkeypatch.delenv(name)
    monkeypatch.setenv('AWS_ENDPOINT_URL_S3', 'http://127.0.0.1:1')  # S3_ENDPOINT_URL has precedence
    if profile:
        monkeypatch.setenv('AWS_PROFILE', profile)
        write_files('.', {'config': '[profile mine]\nregion = eu-north-1\naws_access_key_id = MYKEY\n'
                                    'aws_secret_access_key = x\n'})
    server.requests = []
    download('s3://bucket/folder/a.tar/', 'a.tar', '--remote')
    path, headers = server.requests[-1]
    assert path == '/bucket/folder/a.tar'
    if profile:
        assert re.match('AWS4-HMAC.*Credential=MYKEY/.*/eu-north-1/s3/', headers['Authorization'])
    else:
        assert 'Authorization' not in headers


def test_google_is_read_and_written_with_hmac_keys(server, monkeypatch):
    monkeypatch.setenv('GCS_KEY', 'GOOG1')
    monkeypatch.setenv('GCS_SECRET', SECRET)
    monkeypatch.setattr('sdbench.stores.s3.GOOGLE_S3', os.environ['S3_ENDPOINT_URL'])  # it answers there as S3 does
    monkeypatch.delenv('AWS_ACCESS_KEY_ID')
    upload(io.BytesIO(b'1'), 'gs://bucket/a/b', 'OUT')
    download('gs://bucket/a/b', 'copy', '--remote')
    assert Path('copy').read_bytes() == b'1'
    assert addresses_in('gs://bucket/a', '--save_folder') == ['gs://bucket/a/b']
    assert server.objects == {'a/b': b'1'}
    assert all('Credential=GOOG1/' in headers['Authorization'] for _, headers in server.requests)


@contextlib.contextmanager
def google_answering(application, monkeypatch) -> Iterator[None]:
    """Let a WSGI application answer Google's client without credentials."""
    with served(application) as url:
        client = Client('none', AnonymousCredentials(), client_options={'api_endpoint': url})
        monkeypatch.setattr('google.cloud.storage.Client.create_anonymous_client', lambda: client)
        yield


@pytest.mark.parametrize('payer', [None, 'my-project'])
def test_a_bucket_of_google_is_read_without_keys_and_for_the_project_that_pays(monkeypatch, payer):
    if payer:  # it needs Google's own client, not the one for HMAC keys
        for name, value in (('GS_USER_PROJECT', payer), ('GCS_KEY', 'GOOG1'), ('GCS_SECRET', SECRET)):
            monkeypatch.setenv(name, value)
    requests = []

    @Request.application
    def public_bucket(request: Request) -> Response:
        requests.append(request)
        if request.path.endswith('/o'):  # a listing
            listing = {'items': [{'name': 'a/b', 'size': '1', 'etag': 'x'}]}
            return Response(json.dumps(listing), content_type='application/json')
        return Response(b'1')

    with google_answering(public_bucket, monkeypatch):
        assert addresses_in('gs://bucket/a', '--save_folder') == ['gs://bucket/a/b']
        download('gs://bucket/a/b', 'copy', '--remote')
    assert Path('copy').read_bytes() == b'1'
    assert not any('Authorization' in request.headers for request in requests)
    # Newer versions of the client also ask for the bucket itself.
    of_objects = [request for request in requests if '/o' in request.path]
    assert {request.args.get('userProject') for request in of_objects} == {payer}


def test_a_bucket_that_google_does_not_have_is_not_a_missing_file(monkeypatch):
    with (google_answering(Response('The specified bucket does not exist.', 404), monkeypatch),
          pytest.raises(OSError, match=r'^--remote cannot be read or written \(404 GET .*bucket does not exist')):
        download('gs://nobody/a', 'copy', '--remote')


LISTED = ('<Blob><Name>{}</Name><Properties><Last-Modified>Tue, 01 Sep 2026 00:00:00 GMT</Last-Modified>'
          '<Etag>"1"</Etag><Content-Length>{}</Content-Length><Content-Type>x</Content-Type>'
          '<BlobType>BlockBlob</BlobType></Properties></Blob>')


class LocalAzure:
    """A blob store like Azure's, with the part of its REST interface that a dataset needs.

    It answers requests for /ACCOUNT/CONTAINER/BLOB that are signed with a key of that account.
    """

    def __init__(self):
        self.blobs: dict[str, bytes] = {}

    def answer(self, request: Request) -> Response:
        _, account, _, *folders = request.path.split('/')
        name = '/'.join(folders)
        if not request.headers.get('Authorization', '').startswith(f'SharedKey {account}:'):
            return Response(status=403)
        if request.method == 'PUT':
            self.blobs[name] = request.get_data()
            return Response(status=201)
        if request.args.get('comp') == 'list':
            found = [blob for blob in sorted(self.blobs) if blob.startswith(request.args['prefix'])]
            listed = ''.join(LISTED.format(blob, len(self.blobs[blob])) for blob in found)
            listing = f'<EnumerationResults><Blobs>{listed}</Blobs><NextMarker/></EnumerationResults>'
            return Response(listing, content_type='application/xml')
        if name not in self.blobs:
            return Response(status=404)
        if 'x-ms-range' in request.headers:
            request.environ['HTTP_RANGE'] = request.headers['x-ms-range']
        return Response(self.blobs[name]).make_conditional(request, True, len(self.blobs[name]))

    def __call__(self, environ: dict, start_response) -> Iterable[bytes]:
        """Answer a request, as a WSGI application."""
        response = self.answer(Request(environ))
        response.last_modified = datetime(2026, 9, 1, tzinfo=UTC)
        response.set_etag('1')
        return response(environ, start_response)


def use_azure_at(url: str, monkeypatch) -> list[str]:
    """Point Azure's clients to a server on loopback, and return a list that collects their account addresses."""
    made = []

    def client_of_emulator(account_url: str, credential: str, **options) -> BlobServiceClient:
        made.append(account_url)
        return BlobServiceClient(f'{url}/me', credential, **options)

    monkeypatch.setattr('azure.storage.blob.BlobServiceClient', client_of_emulator)
    monkeypatch.setenv('AZURE_ACCOUNT_ACCESS_KEY', SECRET)
    return made


@pytest.mark.parametrize('host', ['me.blob.core.windows.net', 'me.blob.core.chinacloudapi.cn'])
def test_azures_store_is_read_and_written_by_all_that_make_datasets_and_checkpoints(monkeypatch, host):
    container = f'azure://{host}/container'
    store = LocalAzure()
    with served(store) as url:
        made = use_azure_at(url, monkeypatch)
        output = OutputFolder(f'{container}/mds', 'OUT')
        with output.begun({'program': 'convert.py'}):
            part = PartWriter(output, 'one', {'jpg': 'bytes', 'caption': 'str'})
            part.write({'jpg': b'1', 'caption': 'a'})
            part.finish()
            write_index(output, join_parts(output, ['one']))
        assert output.parts() == {'one': True}
        assert [file.size for file in files_below(f'{container}/mds/claim.json', 'SOURCE')] == [len(output.read(CLAIM))]
        upload(io.BytesIO(b'0'), f'{container}/run/0.pt', '--save_folder')
        with open_file(f'{container}/run/0.pt') as file:
            assert file.read() == store.blobs['run/0.pt'] == b'0'
        assert addresses_in(f'{container}/run', '--save_folder') == [f'{container}/run/0.pt']
        assert set(made) == {f'https://{host}'}
        assert len(made) <= 2  # one with few tries and one with many, although a dataset may have thousands of parts
        assert read_back('cache', remote=f'{container}/mds') == [(b'1', 'a')]  # by Streaming's own client


@pytest.mark.parametrize('key', ['a#b/0.tar', 'a?b=c/0.tar', 'a%20b/0 1.tar', 'a'])
@pytest.mark.parametrize('bucket', ['s3://bucket', 'azure://me.blob.core.windows.net/container'])
def test_an_object_is_read_by_its_whole_key_whatever_characters_it_contains(server, monkeypatch, key, bucket):
    with served(LocalAzure()) as url:
        use_azure_at(url, monkeypatch)
        for name in ('a', key):
            upload(io.BytesIO(name.encode()), f'{bucket}/{name}', 'OUT')
        download(f'{bucket}/{key}', 'copy', 'SOURCE')
        assert Path('copy').read_text() == key
        assert [file.key for file in files_below(f'{bucket}/{key}', 'SOURCE')] == [key]


@pytest.mark.parametrize('address', ['s3://bucket/a', 'gs://bucket/a', 'azure://me.blob.core.windows.net/container/a'])
def test_a_refused_connection_is_reported_after_at_most_ten_seconds_of_pauses(monkeypatch, address):
    use_azure_at('http://127.0.0.1:1', monkeypatch)
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:1')
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', 'http://127.0.0.1:1')  # of Google's client
    monkeypatch.setattr('google.auth.default', lambda: (AnonymousCredentials(), 'project'))
    this_thread = threading.current_thread()
    now = time.monotonic
    pauses = []

    def sleep(seconds: float) -> None:
        if threading.current_thread() is this_thread:  # others are of earlier tests, or of newer clients of Google
            pauses.append(seconds)
    monkeypatch.setattr('time.sleep', sleep)
    monkeypatch.setattr('time.monotonic', lambda: now() + sum(pauses))
    with pytest.raises(OSError, match='^SOURCE cannot be read or written .*onnect'):
        download(address, 'copy', 'SOURCE', in_threads=False)
    assert 0 < sum(pauses) <= 10


@pytest.mark.parametrize('status, code, words', [
    (403, 'AccessDenied', '403 AccessDenied none'), (404, 'NoSuchBucket', '404 NoSuchBucket none'),
    (500, 'InternalError', '500 InternalError none'), (0, '', 'Connection')])
def test_every_request_reports_an_error_answer_in_the_same_words_without_secrets(
        server, monkeypatch, status, code, words):
    address = 's3://bucket/a'
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'PASSWORD')
    server.refusals = [(status, code)] * 1000
    for ask in (lambda: files_below(address, address), lambda: download(address, 'copy', address),
                lambda: upload(io.BytesIO(b'1'), address, address)):
        with pytest.raises(OSError) as caught:
            ask()
        assert str(caught.value).startswith(f'{address} cannot be read or written (')
        assert words in str(caught.value) and 'PASSWORD' not in str(caught.value)
    server.refusals = [(404, 'NoSuchKey')] * 2
    with pytest.raises(FileNotFoundError):
        download(address, 'copy', address)
    assert not Path('copy').exists()


def test_files_are_written_to_a_store_that_does_not_support_checksums(server):
    server.unknown_headers = {'x-amz-checksum-crc32': 501, 'x-amz-sdk-checksum-algorithm': 400}
    upload(io.BytesIO(b'1'), 's3://bucket/run/a', '--save_folder')
    assert server.objects == {'run/a': b'1'}
