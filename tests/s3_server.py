"""An S3 server on loopback that checks credentials."""
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import boto3
import requests

from tests.runs import free_port


@contextlib.contextmanager
def s3_server(monkeypatch) -> Iterator[subprocess.Popen]:
    """The server's process, with a bucket and a `client` for it; the environment has the right credentials."""
    port = free_port()
    url = f'http://127.0.0.1:{port}'
    server = subprocess.Popen([sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', str(port)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    answer_to(lambda: requests.post(f'{url}/moto-api/reset-auth', data=b'3'))  # three calls to make credentials with
    for name, value in {'S3_ENDPOINT_URL': url, 'AWS_DEFAULT_REGION': 'us-east-1', 'AWS_ACCESS_KEY_ID': 'x',
                        'AWS_SECRET_ACCESS_KEY': 'y', 'AWS_EC2_METADATA_DISABLED': 'true'}.items():
        monkeypatch.setenv(name, value)
    iam = boto3.session.Session().client('iam', endpoint_url=url)
    iam.create_user(UserName='user')
    iam.put_user_policy(UserName='user', PolicyName='all', PolicyDocument=json.dumps({
        'Version': '2012-10-17', 'Statement': [{'Effect': 'Allow', 'Action': 's3:*', 'Resource': '*'}]}))
    key = iam.create_access_key(UserName='user')['AccessKey']
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', key['AccessKeyId'])
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', key['SecretAccessKey'])
    server.client = boto3.session.Session().client('s3', endpoint_url=url)
    server.client.create_bucket(Bucket='bucket')
    yield server
    server.kill()
    server.wait()


def answer_to(request: Callable[[], requests.Response]) -> requests.Response:
    """The answer of a server that may not listen yet."""
    end = time.monotonic() + 60
    while True:
        try:
            return request()
        except requests.ConnectionError:
            assert time.monotonic() < end
            time.sleep(0.05)
