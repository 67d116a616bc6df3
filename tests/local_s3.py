"""A small S3 server on loopback: as much as is needed to write, list and read, to break connections
and to refuse.

    python tests/local_s3.py PORT
"""
import contextlib
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from urllib.parse import parse_qs, unquote, urlparse
from xml.sax.saxutils import escape, unescape

KEYS_A_PAGE = 1000
NO_TIME = '1970-01-01T00:00:00.000Z'


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def answer(self, status: int, body: bytes = b'', **headers):
        self.send_response(status)
        for name, value in {'Content-Length': len(body), 'ETag': '"0"', **self.server.headers,
                            'Last-Modified': 'Thu, 01 Jan 1970 00:00:00 GMT', **headers}.items():
            self.send_header(name.replace('_', '-'), str(value))
        self.end_headers()
        if self.command != 'HEAD':
            cut = self.server.cut_after(len(body)) if status == 206 else len(body)
            self.wfile.write(body[:cut])
            if cut < len(body):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()  # else boto3 waits for a second before it sends the body
        return True

    def is_refused(self) -> bool:
        """Whether this request gets the next refusal instead of an answer."""
        self.server.requests.append((self.path, self.headers))
        with self.server.lock:
            refusal = self.server.refuse()
        key = self.server.access_key
        if key and f'Credential={key}/' not in self.headers.get('Authorization', ''):
            refusal = (403, 'InvalidAccessKeyId')
        if refusal is None:
            return False
        status, code = refusal
        self.body()
        self.answer(status, f'<Error><Code>{code}</Code><Message>none</Message></Error>'.encode())
        return True

    def asked(self) -> tuple[str, str, dict]:
        """Bucket, key and query, after the delay."""
        time.sleep(self.server.delay)
        address = urlparse(self.path)
        _, bucket, key = (unquote(address.path) + '/').split('/', 2)
        return bucket, key[:-1], parse_qs(address.query, keep_blank_values=True)

    def missing(self, code: str):
        self.answer(404, f'<Error><Code>{code}</Code><Message>none</Message></Error>'.encode())

    def do_GET(self):
        bucket, key, query = self.asked()
        store = self.server
        if self.is_refused():
            return
        if bucket != 'bucket':
            self.missing('NoSuchBucket')
        elif not key and 'list-type' in query:
            store.count('list')
            self.answer(200, store.page(query))
        elif not key:
            store.count('head')
            self.answer(200)
        elif key in store.answers:
            self.answer(store.answers[key], b'<Error><Code>AccessDenied</Code></Error>')
        elif key not in store.objects:
            store.count('get')
            self.missing('NoSuchKey')
        else:
            store.count('get')
            self.send_object(store.objects[key])

    do_HEAD = do_GET

    def send_object(self, content: bytes):
        wanted = re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range', ''))
        if not wanted:
            self.answer(200, content)
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if first > last:
            self.answer(416, b'<Error><Code>InvalidRange</Code></Error>')
            return
        self.answer(206, content[first:last + 1], Content_Range=f'bytes {first}-{last}/{len(content)}')

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get('Content-Length', 0)))

    def do_PUT(self):
        _, key, query = self.asked()
        if self.is_refused():
            return
        body = self.body()
        self.server.count('put')
        if 'uploadId' in query:
            self.server.uploads[key][int(query['partNumber'][0])] = body
        elif not self.server.put(key, body, is_new=self.headers.get('If-None-Match') == '*'):
            self.answer(412, b'<Error><Code>PreconditionFailed</Code></Error>')
            return
        self.answer(200)

    def delete(self, keys: list[str]):
        self.server.count('delete')
        for key in keys:
            self.server.remove(unescape(key))
        found = ''.join(f'<Deleted><Key>{key}</Key></Deleted>' for key in keys)
        self.answer(200, f'<DeleteResult>{found}</DeleteResult>'.encode())

    def do_POST(self):
        _, key, query = self.asked()
        if self.is_refused():
            return
        body = self.body()
        if 'delete' in query:
            self.delete(re.findall('<Key>(.*?)</Key>', body.decode()))
            return
        self.server.count('post')
        if 'uploads' in query:
            self.server.uploads[key] = {}
            self.answer(200, b'<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>')
        else:
            pieces = self.server.uploads.pop(key)
            self.server.put(key, b''.join(piece for _, piece in sorted(pieces.items())))
            self.answer(200, b'<CompleteMultipartUploadResult><ETag>"0"</ETag></CompleteMultipartUploadResult>')

    def log_message(self, *args):
        pass


class LocalS3(http.server.ThreadingHTTPServer):
    """The server, with a bucket called bucket.

    Args:
        port: of loopback; 0 is any free one.
        delay: seconds that each request takes at least.
    """
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int = 0, delay: float = 0):
        super().__init__(('127.0.0.1', port), Handler)
        self.delay = delay
        self.objects: dict[str, bytes] = {}
        self.keys: list[str] = []  # sorted
        self.order: list[str] = []  # of the writes
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.counts: Counter = Counter()
        self.answers: dict[str, int] = {}  # the status of requests for some objects
        self.cuts: list[int] = []  # bytes after which the next answers that are pieces of an object break off
        self.refusals: list[tuple[int, str]] = []  # status and code that the next requests get
        self.access_key: str | None = None  # that requests must be signed with
        self.headers: dict[str, str] = {}  # of each answer, beside the usual ones
        self.requests: deque = deque(maxlen=8)  # path and headers of the last ones
        self.lock = threading.Lock()

    def handle_error(self, request, client_address):
        """Print what went wrong, but not that a client was killed in the middle of a request."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def refuse(self) -> tuple[int, str] | None:
        """The status and code to refuse a request with, or None to answer it."""
        return self.refusals.pop(0) if self.refusals else None

    def count(self, kind: str):
        self.counts[kind] += 1

    def put(self, key: str, content: bytes, is_new: bool = False) -> bool:
        """Keep an object; False, and nothing is kept, where it is to be new and there is one."""
        with self.lock:
            if is_new and key in self.objects:
                return False
            if key not in self.objects:
                if self.keys and key < self.keys[-1]:
                    self.keys.insert(bisect_left(self.keys, key), key)
                else:
                    self.keys.append(key)
            self.objects[key] = content
            self.order.append(key)
            return True

    def remove(self, key: str):
        with self.lock:
            if self.objects.pop(key, None) is not None:
                self.keys.remove(key)

    def cut_after(self, length: int) -> int:
        """How much of a piece is sent before the connection breaks."""
        with self.lock:
            if self.cuts and length > self.cuts[0]:
                return self.cuts.pop(0)
        return length

    def page(self, query: dict) -> bytes:
        """ListObjectsV2, in the order of the keys."""
        prefix = query.get('prefix', [''])[0]
        after = query.get('continuation-token', [''])[0]
        start = bisect_right(self.keys, after) if after else bisect_left(self.keys, prefix)
        found = [key for key in self.keys[start:start + KEYS_A_PAGE] if key.startswith(prefix)]
        is_cut = len(found) == KEYS_A_PAGE
        entries = ''.join(f'<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>'
                          f'<LastModified>{NO_TIME}</LastModified></Contents>' for key in found)
        token = f'<NextContinuationToken>{escape(found[-1])}</NextContinuationToken>' if is_cut else ''
        return (f'<ListBucketResult><IsTruncated>{str(is_cut).lower()}</IsTruncated>{token}<KeyCount>{len(found)}'
                f'</KeyCount>{entries}</ListBucketResult>').encode()


def environment(port: int) -> dict[str, str]:
    """What lets boto3 and Streaming find the server."""
    return {'S3_ENDPOINT_URL': f'http://127.0.0.1:{port}', 'AWS_ACCESS_KEY_ID': 'a', 'AWS_SECRET_ACCESS_KEY': 'b',
            'AWS_DEFAULT_REGION': 'us-east-1', 'AWS_REQUEST_CHECKSUM_CALCULATION': 'when_required',
            'AWS_EC2_METADATA_DISABLED': 'true'}


@contextlib.contextmanager
def local_s3(monkeypatch) -> Iterator[LocalS3]:
    """A server in a thread of this process, that the environment points to."""
    with LocalS3() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        for name, value in environment(server.server_port).items():
            monkeypatch.setenv(name, value)
        try:
            yield server
        finally:
            server.shutdown()


@contextlib.contextmanager
def s3_process(monkeypatch) -> Iterator[subprocess.Popen]:
    """A server in a process of its own, which can be killed, with a boto3 `client`; the environment points to it."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port = listener.getsockname()[1]
    for name, value in environment(port).items():
        monkeypatch.setenv(name, value)
    process = subprocess.Popen([sys.executable, __file__, str(port)], stderr=subprocess.PIPE)
    try:
        process.client = client()
        assert process.stderr.readline() == b'listening\n'
        yield process
    finally:
        process.kill()
        process.wait()


def client():
    """boto3's, for the server that the environment points to."""
    import boto3
    return boto3.session.Session().client('s3', endpoint_url=os.environ['S3_ENDPOINT_URL'])


if __name__ == '__main__':
    with LocalS3(int(sys.argv[1])) as server:
        print('listening', file=sys.stderr, flush=True)
        server.serve_forever()
