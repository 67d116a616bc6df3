"""Stores are opened with the environment that Streaming takes, and what goes wrong there is one line."""
import contextlib
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import boto3
import obstore
import pytest

from settings.ends import one_line_errors
from inputs import stores
from inputs.errors import DataError
from inputs.places import is_address
from inputs.stores import (
    ObjectLost,
    StoredFile,
    answer_of,
    open_store,
    parse_address,
    store_error,
    streaming_address,
)
from parts.output import StoreOutput
from parts.sources import find_files
from tests.forks import status_of_child
from tests.local_s3 import local_s3

SECRET = 'c2VjcmV0LWtleQ=='


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    """None but those of a test, and no questions to the metadata server of a cloud."""
    for name in list(os.environ):
        if stores.SETTINGS.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
    monkeypatch.setenv('NO_GCE_CHECK', 'true')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(tmp_path / 'credentials'))
    monkeypatch.setenv('AWS_CONFIG_FILE', str(tmp_path / 'config'))


def test_what_is_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 's3:/a').mkdir(parents=True)
    assert [is_address(place) for place in ('s3://b/a', 'dbfs:/a', 'oci://b', 's3://a', 'laion', '/a')] == [
        True, True, True, False, False, False]


@pytest.mark.parametrize('address, words', [
    ('oci://b/a', 'S3_ENDPOINT_URL'), ('dbfs:/a', 'S3_ENDPOINT_URL'), ('hf://o/n', 'S3_ENDPOINT_URL'),
    ('nowhere://b/a', 'S3_ENDPOINT_URL'), ('s3://', 'names no bucket; write s3://BUCKET'),
    ('gs:///a', 'names no bucket'),
    ('azure://account.blob.core.windows.net', 'names no bucket; write azure://ACCOUNT.blob.core.windows.net/CONTAINER'),
    ('az://container/a', 'AZURE_ACCOUNT_NAME')])
def test_what_cannot_be_opened_is_refused_in_one_line(address, words):
    with pytest.raises(ValueError, match=f'^OUT {address}.*{words}') as error:
        open_store(address, 'OUT')
    assert '\n' not in str(error.value)


def test_a_profile_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv('AWS_PROFILE', 'nobody')
    with pytest.raises(ValueError, match=r'OUT s3://b/a: no client .* profile \(nobody\) could not be found'):
        open_store('s3://b/a', 'OUT')


def test_endpoint_region_and_keys_are_those_that_boto3_finds(tmp_path, monkeypatch):
    (tmp_path / 'config').write_text('[profile mine]\nregion = eu-north-1\naws_access_key_id = FROMPROFILE\n'
                                     'aws_secret_access_key = x\n')
    monkeypatch.setenv('AWS_PROFILE', 'mine')
    monkeypatch.setenv('AWS_ENDPOINT_URL_S3', 'http://127.0.0.1:1')
    with local_s3(monkeypatch) as server:
        for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_DEFAULT_REGION'):
            monkeypatch.delenv(name)
        server.put('folder/a.tar', b'1')
        obstore.head(*open_store('s3://bucket/folder/a.tar/', 'SOURCE'))
    path, headers = server.requests[-1]
    assert path == '/bucket/folder/a.tar'
    assert 'FROMPROFILE/' in headers['Authorization'] and '/eu-north-1/s3/' in headers['Authorization']


def test_without_credentials_requests_are_not_signed(monkeypatch):
    monkeypatch.setenv('MOSAICML_STREAMING_AWS_REQUESTER_PAYS', 'other, bucket')
    with local_s3(monkeypatch) as server:
        server.put('a', b'1')
        obstore.head(*open_store('s3://bucket/a', 'SOURCE'))
        _, headers = server.requests[-1]
        assert headers['Authorization'].startswith('AWS4-HMAC') and headers['x-amz-request-payer'] == 'requester'
        for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
            monkeypatch.delenv(name)
        obstore.head(*open_store('s3://bucket/a', 'SOURCE'))
        _, headers = server.requests[-1]
        assert headers['Authorization'] is None
        assert open_store('s3://bucket/a', 'SOURCE').store is open_store('s3://bucket/b', 'SOURCE').store


def test_the_region_of_a_bucket_of_aws_is_asked_for(monkeypatch):
    with local_s3(monkeypatch) as server:
        server.headers = {'x-amz-bucket-region': 'ap-south-2'}
        client = boto3.session.Session().client('s3', endpoint_url=os.environ['S3_ENDPOINT_URL'])
        assert stores.region_of(client, 'bucket') == 'ap-south-2'
        server.refusals = [(403, 'AccessDenied')]
        assert stores.region_of(client, 'bucket') == 'ap-south-2'


def test_googles_hmac_keys_go_to_its_s3_address(monkeypatch):
    monkeypatch.setenv('GCS_KEY', 'GOOG1')
    monkeypatch.setenv('GCS_SECRET', SECRET)
    store, key = open_store('gs://bucket/a/b', 'OUT')
    assert key == 'a/b' and isinstance(store, obstore.store.S3Store)
    assert store.config['endpoint_url_s3'] == 'https://storage.googleapis.com'
    assert store.config['access_key_id'] == 'GOOG1'


def test_google_without_keys_is_read_unsigned():
    assert open_store('gs://bucket/a', 'SOURCE').store.config['skip_signature'] == 'true'


@pytest.mark.parametrize('address, account', [
    ('azure://me.blob.core.windows.net/container/a/b', None),
    ('azure://me.blob.core.windows.net/container/a/b', 'other'),
    ('az://container/a/b', 'other')])
def test_azure_takes_account_container_and_key_as_streaming_reads_them(monkeypatch, address, account):
    monkeypatch.setenv('AZURE_ACCOUNT_ACCESS_KEY', SECRET)
    if account:
        monkeypatch.setenv('AZURE_ACCOUNT_NAME', account)
    store, key = open_store(address, 'OUT')
    assert key == 'a/b' and store.config['container_name'] == 'container'
    assert store.config['account_name'] == (account or 'me')
    assert parse_address(streaming_address(address), 'OUT') == parse_address(address, 'OUT')


REMEDY = '; check its name, the network and, for a store beside AWS, S3_ENDPOINT_URL'


def test_errors_of_a_store_are_one_line_without_secrets(monkeypatch):
    monkeypatch.setattr(stores, 'RETRY_TIMEOUT', timedelta(milliseconds=50))

    def error_of(status: int, code: str) -> tuple[str, bool]:
        server.refusals = [(status, code)] * 100
        with pytest.raises((obstore.exceptions.BaseError, OSError)) as caught:
            obstore.get(*open_store('s3://bucket/a', 'SOURCE'))
        text = store_error(caught.value, 's3://bucket/a')
        assert '\n' not in text and 'PASSWORD' not in text and 'Debug' not in text
        return text, stores.is_of_one_object(caught.value)
    with local_s3(monkeypatch) as server:
        monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'PASSWORD')
        assert error_of(404, 'NoSuchKey') == ('s3://bucket/a is not there (404 NoSuchKey)', True)
        assert error_of(404, 'NoSuchBucket') == (
            's3://bucket/a: there is no such bucket (404 NoSuchBucket); check its name and S3_ENDPOINT_URL', False)
        assert error_of(403, 'AccessDenied') == (
            's3://bucket/a: access is denied (403 AccessDenied); check the name and the credentials, which may lack '
            'the permission', False)
        assert error_of(403, 'InvalidObjectState') == (
            's3://bucket/a lies in an archive (403 InvalidObjectState); restore it first', True)
        assert error_of(416, 'InvalidRange')[1]
        assert error_of(503, 'SlowDown') == (f's3://bucket/a is out of reach (503 SlowDown){REMEDY}', False)
    assert error_of(0, '') == (f's3://bucket/a is out of reach (HTTP error: error sending request){REMEDY}', False)


def test_a_file_of_a_store_is_read_in_pieces_over_connections_that_break(monkeypatch):
    monkeypatch.setattr(stores, 'PIECE_BYTES', 1000)
    content = bytes(range(256)) * 20
    with local_s3(monkeypatch) as store:
        store.put('a.tar', content)
        store.cuts = [10, 500, 1]
        with io.BufferedReader(StoredFile('s3://bucket/a.tar', len(content)), 64) as file:
            assert file.read(700) == content[:700]
            file.seek(2990)
            assert file.read(20) == content[2990:3010]
            file.seek(2500)
            assert file.read() == content[2500:]
        assert not store.cuts


def test_an_object_that_changed_is_lost_and_a_store_that_is_away_is_an_error_of_the_moment(monkeypatch):
    monkeypatch.setattr(stores, 'PIECE_BYTES', 1000)
    monkeypatch.setattr(stores, 'RETRY_TIMEOUT', timedelta(milliseconds=50))
    with local_s3(monkeypatch) as store:
        store.put('a.tar', bytes(3000))
        for size, words in ((2000, 'was replaced'), (9000, 'was replaced')):
            with pytest.raises(ObjectLost, match=words), StoredFile('s3://bucket/a.tar', size) as file:
                file.read(10)
        with pytest.raises(ObjectLost, match='is not there'), StoredFile('s3://bucket/b.tar', 10) as file:
            file.read(10)
        with pytest.raises(DataError, match='no such bucket'), StoredFile('s3://nobody/b.tar', 10) as file:
            file.read(10)
        for status, words in ((503, 'out of reach'), (403, 'access is denied')):
            store.refusals = [(status, 'Word')] * 100
            with pytest.raises(DataError, match=words), StoredFile('s3://bucket/a.tar', 3000) as file:
                file.read(10)


def test_a_store_that_is_away_for_a_moment_is_waited_for(monkeypatch):
    with local_s3(monkeypatch) as store:
        store.put('a.tar', bytes(10))
        store.refusals = [(503, 'SlowDown'), (500, 'InternalError')]
        with StoredFile('s3://bucket/a.tar', 10) as file:
            assert file.read(10) == bytes(10)
        assert not store.refusals


def test_a_forked_process_is_told_instead_of_waiting_for_ever(monkeypatch):
    with local_s3(monkeypatch):
        open_store('s3://bucket/a', 'SOURCE')

        def open_again() -> int:
            with pytest.raises(AssertionError):
                open_store('s3://bucket/a', 'SOURCE')
            return 7
        assert status_of_child(open_again) == 7


def test_a_store_that_does_not_answer_is_said_to_be_waited_for(monkeypatch, capfd):
    assert answer_of(lambda: 7, 'asking') == 7
    assert capfd.readouterr().err == ''
    monkeypatch.setattr(stores, 'SECONDS_TO_SPEAK', 0)
    is_said = threading.Event()
    monkeypatch.setattr('builtins.print', lambda *words, **_: (sys.stderr.write(*words), is_said.set()))
    assert answer_of(lambda: is_said.wait(60), 'asking for OUT s3://bucket')
    # a request that begins when the two minutes of trying are nearly over may last a minute and a half
    assert 'asking for OUT s3://bucket, which can take 4 minutes' in capfd.readouterr().err


@contextlib.contextmanager
def silent_server(when_asked: Callable[[], None]) -> Iterator[tuple[str, threading.Event]]:
    """A server that takes one connection and says nothing, until the event is set or 10 seconds are over."""
    is_over = threading.Event()
    with socket.create_server(('127.0.0.1', 0)) as listener:
        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                listener.close()
                when_asked()
                is_over.wait(10)
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield f'http://127.0.0.1:{listener.getsockname()[1]}', is_over
        is_over.set()
        server.join()


@pytest.mark.parametrize('ask', [
    lambda: find_files(['s3://bucket/a/']), lambda: StoreOutput('s3://bucket/a', '--out').require_new_or_begun()],
    ids=['SOURCE', 'OUT'])
def test_sigterm_ends_the_wait_for_a_store_that_does_not_answer(monkeypatch, ask):
    monkeypatch.setattr(stores, 'RETRY_TIMEOUT', timedelta(milliseconds=50))
    is_waiting = []

    def send_sigterm() -> None:
        is_waiting.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
        if not is_over.wait(10):
            is_waiting.append('after the signal')
    with silent_server(send_sigterm) as (endpoint, is_over):
        monkeypatch.setenv('S3_ENDPOINT_URL', endpoint)
        with pytest.raises(SystemExit, match='143'), one_line_errors('convert.py'):
            ask()
        is_over.set()
    assert is_waiting == [True]
