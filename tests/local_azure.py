"""A store of Azure's blobs on loopback: as much of its REST interface as a dataset needs."""
import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

DATE = 'Tue, 01 Sep 2026 00:00:00 GMT'  # of all blobs
LISTED = ('<Blob><Name>{}</Name><Properties><Last-Modified>' + DATE + '</Last-Modified><Etag>"1"</Etag>'
          '<Content-Length>{}</Content-Length><Content-Type>x</Content-Type></Properties></Blob>')


class BlobHandler(BaseHTTPRequestHandler):
    """Answers requests for /ACCOUNT/CONTAINER/BLOB that are signed with a key of that account."""
    protocol_version = 'HTTP/1.1'

    @property
    def blob(self) -> str:
        """The name of the blob, without account and container."""
        return unquote(urlsplit(self.path).path).split('/', 3)[3]

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers['Content-Length']))
        if self.headers.get('If-None-Match') == '*' and self.blob in self.server.blobs:
            self.answer(409)
        else:
            self.server.blobs[self.blob] = content
            self.answer(201)

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if query.get('comp') == ['list']:
            names = [name for name in sorted(self.server.blobs) if name.startswith(query['prefix'][0])]
            found = ''.join(LISTED.format(name, len(self.server.blobs[name])) for name in names)
            self.answer(200, f'<EnumerationResults><Blobs>{found}</Blobs><NextMarker/></EnumerationResults>'.encode())
        elif self.blob not in self.server.blobs:
            self.answer(404)
        else:
            self.answer_with_blob(self.server.blobs[self.blob])

    do_HEAD = do_GET

    def answer_with_blob(self, content: bytes) -> None:
        """Answer with a blob, or with the range of it that was asked for."""
        asked = re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers.get('x-ms-range') or self.headers.get('Range') or '')
        if asked is None:
            self.answer(200, content)
        else:
            first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            self.answer(206, content[first:last + 1], {'Content-Range': f'bytes {first}-{last}/{len(content)}'})

    def answer(self, status: int, content: bytes = b'', headers: dict[str, str] | None = None) -> None:
        account = self.path.split('/')[1]
        if not self.headers.get('Authorization', '').startswith(f'SharedKey {account}:'):
            status, content = 403, b''
        self.send_response(status)
        headers = {'Content-Length': str(len(content)), 'ETag': '"1"', 'Last-Modified': DATE, **(headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    def log_message(self, *args) -> None:
        pass


@contextlib.contextmanager
def local_azure() -> Iterator[ThreadingHTTPServer]:
    """Run a server in a thread of this process; its `blobs` are their contents by their names."""
    server = ThreadingHTTPServer(('127.0.0.1', 0), BlobHandler)
    server.blobs = {}
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
