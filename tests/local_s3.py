"""An S3 server on loopback: moto's, behind a layer that refuses, delays and breaks connections where a test says so."""
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
    """The server, with a bucket called bucket, whose faults are set while it runs.

    Attributes:
        delay: seconds that each request takes at least.
        refusals: status and code that the next requests get.
        cuts: bytes after which the next answers that are longer break off.
        access_key: that requests must be signed with, where it is given; moto looks at no signature.
        requests: path and headers of each that came.
        waiting: paths of those that only its `lock` keeps from an answer.
        is_read_only: whether it refuses what would write an object.
        unknown_headers: names of headers with which no request is answered, each with the status that it gets.
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
        self.backend = s3_backends['123456789012']['aws']  # moto's account
        self.backend.create_bucket('bucket', 'us-east-1')

    @property
    def objects(self) -> dict[str, bytes]:
        """What the bucket holds, in the order in which it came."""
        return {name: key.value for name, key in list(self.backend.buckets['bucket'].keys.items())}

    def put(self, key: str, content: bytes) -> None:
        self.backend.put_object('bucket', key, content)

    def refusal(self, request: Request) -> Response | None:
        """Return the answer that refuses a request, or None if it is to be answered."""
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
        environ['wsgi.input'] = io.BytesIO(request.get_data())  # what nobody reads would be taken for the next request
        self.requests.append((environ['RAW_URI'], request.headers))
        time.sleep(self.delay)
        self.waiting.append(request.path)
        with self.lock:  # moto writes an object that is to be new twice, where two ask at once
            self.waiting.remove(request.path)
            response = self.refusal(request) or Response.from_app(self.moto, environ, buffered=True)
            if request.method == 'GET' and self.cuts and self.cuts[0] < len(response.data):
                response.response = broken_after(response.data[:self.cuts.pop(0)])
        return response(environ, start_response)


class Handler(MotoRequestHandler):
    def log(self, *args):
        pass

    def connection_dropped(self, *args):
        self.close_connection = True  # or the client would wait for the rest of the answer


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
    """Run a server that the environment points to, with a boto3 `client`."""
    store = LocalS3()
    make_client.cache_clear()  # which is made of the environment
    monkeypatch.setattr('botocore.endpoint.time', SimpleNamespace(sleep=lambda seconds: None))
    # each client is made of large files of JSON, which take a second to read
    monkeypatch.setattr(JSONFileLoader, 'load_file', lambda _, path: read_json(path))
    with served(store) as url:
        environment = {'S3_ENDPOINT_URL': url, 'AWS_ACCESS_KEY_ID': 'a', 'AWS_SECRET_ACCESS_KEY': 'b',
                       'AWS_DEFAULT_REGION': 'us-east-1', 'AWS_EC2_METADATA_DISABLED': 'true'}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        store.client = boto3.session.Session().client('s3', endpoint_url=url)
        yield store
