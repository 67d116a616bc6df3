"""An S3 server on loopback: moto's, behind a layer that refuses, delays and breaks requests when a test wants it."""
import contextlib
import functools
import io
import threading
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import boto3
from botocore.loaders import JSONFileLoader
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.datastructures import EnvironHeaders
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

from sdbench.stores.s3 import make_client


class LocalS3:
    """The server, with a bucket named bucket. Tests set its errors while it runs.

    Attributes:
        delay: seconds that each request takes at least.
        refusals: status and error code for each of the next requests.
        cuts: number of bytes after which each of the next longer answers breaks off.
        access_key: access key with which requests must be signed, if it is given; moto checks no signatures.
        requests: path and headers of each request so far.
        waiting: paths of the requests that wait for `lock`.
        is_read_only: whether requests that write an object are refused.
        unknown_headers: for each refused header, the status of the answer.
    """

    def __init__(self):
        self.delay = 0.
        self.refusals: list[tuple[int, str]] = []
        self.cuts: list[int] = []
        self.access_key: str | None = None
        self.requests: list[tuple[str, EnvironHeaders]] = []
        self.waiting: list[str] = []
        self.is_read_only = False
        self.unknown_headers: dict[str, int] = {}
        self.lock = threading.Lock()
        self.moto = DomainDispatcherApplication(create_backend_app)
        s3_backends.reset()
        self.backend = s3_backends['123456789012']['aws']  # moto's default account
        self.backend.create_bucket('bucket', 'us-east-1')

    @property
    def objects(self) -> dict[str, bytes]:
        """Objects in the bucket, in the order of their creation."""
        return {name: key.value for name, key in list(self.backend.buckets['bucket'].keys.items())}

    def put(self, key: str, content: bytes) -> None:
        self.backend.put_object('bucket', key, content)

    def refusal(self, request: Request) -> Response | None:
        """Return the answer that refuses a request, or None if the request is accepted."""
        refusal = self.refusals.pop(0) if self.refusals else None
        if self.access_key and f'Credential={self.access_key}/' not in request.headers.get('Authorization', ''):
            refusal = (403, 'InvalidAccessKeyId')
        if self.is_read_only and request.method in ('PUT', 'POST'):
            refusal = (403, 'AccessDenied')
        for name in self.unknown_headers.keys() & {header.lower() for header in request.headers.keys()}:
            refusal = (self.unknown_headers[name], 'NotImplemented')
        if refusal is None:
            return None
        status, code = refusal
        return Response(f'<Error><Code>{code}</Code><Message>none</Message></Error>', status)

    def __call__(self, environ: dict, start_response) -> Iterable[bytes]:
        """Answer a request, as a WSGI application."""
        request = Request(environ)
        environ['wsgi.input'] = io.BytesIO(request.get_data())  # unread data would count as the next request
        self.requests.append((environ['RAW_URI'], request.headers))
        time.sleep(self.delay)
        self.waiting.append(request.path)
        with self.lock:  # moto lets two concurrent requests both create an object that must be new
            self.waiting.remove(request.path)
            response = self.refusal(request) or Response.from_app(self.moto, environ, buffered=True)
            if request.method == 'GET' and self.cuts and self.cuts[0] < len(response.data):
                response.response = broken_after(response.data[:self.cuts.pop(0)])
        return response(environ, start_response)


class Handler(MotoRequestHandler):
    def log(self, *args):
        pass

    def connection_dropped(self, *args):
        self.close_connection = True  # otherwise the client waits for the rest of the answer


def broken_after(content: bytes) -> Iterator[bytes]:
    yield content
    raise ConnectionError


@contextlib.contextmanager
def served(application) -> Iterator[str]:
    """Serve a WSGI application in a thread of this process, and yield its URL."""
    server = make_server('127.0.0.1', 0, application, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f'http://127.0.0.1:{server.server_port}'
    finally:
        server.shutdown()


read_json = functools.cache(JSONFileLoader().load_file)


@contextlib.contextmanager
def local_s3(monkeypatch) -> Iterator[LocalS3]:
    """Run a server, let the environment variables point to it, and give it a boto3 `client`."""
    store = LocalS3()
    make_client.cache_clear()  # clients depend on the environment variables
    monkeypatch.setattr('botocore.endpoint.time', SimpleNamespace(sleep=lambda seconds: None))
    # Cache the large JSON files that boto3 reads for each client, which takes a second.
    monkeypatch.setattr(JSONFileLoader, 'load_file', lambda _, path: read_json(path))
    with served(store) as url:
        environment = {'S3_ENDPOINT_URL': url, 'AWS_ACCESS_KEY_ID': 'a', 'AWS_SECRET_ACCESS_KEY': 'b',
                       'AWS_DEFAULT_REGION': 'us-east-1', 'AWS_EC2_METADATA_DISABLED': 'true'}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        store.client = boto3.session.Session().client('s3', endpoint_url=url)
        yield store
