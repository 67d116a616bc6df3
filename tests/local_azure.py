"""A store of Azure's blobs on loopback: as much of its REST interface as a dataset needs."""
import contextlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from werkzeug.wrappers import Request, Response

from tests.local_s3 import served

DATE = datetime(2026, 9, 1, tzinfo=UTC)  # of all blobs
LISTED = ('<Blob><Name>{}</Name><Properties><Last-Modified>Tue, 01 Sep 2026 00:00:00 GMT</Last-Modified>'
          '<Etag>"1"</Etag><Content-Length>{}</Content-Length><Content-Type>x</Content-Type></Properties></Blob>')


class LocalAzure:
    """Answers requests for /ACCOUNT/CONTAINER/BLOB that are signed with a key of that account.

    Attributes:
        url: of the server.
        blobs: their contents by their names.
    """

    def __init__(self):
        self.url = ''
        self.blobs: dict[str, bytes] = {}

    def answer(self, request: Request) -> Response:
        _, account, _, *folders = request.path.split('/')
        name = '/'.join(folders)
        if not request.headers.get('Authorization', '').startswith(f'SharedKey {account}:'):
            return Response(status=403)
        if request.method == 'PUT' and request.headers.get('If-None-Match') == '*' and name in self.blobs:
            return Response(status=409)
        if request.method == 'PUT':
            self.blobs[name] = request.get_data()
            return Response(status=201)
        if request.args.get('comp') == 'list':
            found = [blob for blob in sorted(self.blobs) if blob.startswith(request.args['prefix'])]
            listed = ''.join(LISTED.format(blob, len(self.blobs[blob])) for blob in found)
            return Response(f'<EnumerationResults><Blobs>{listed}</Blobs><NextMarker/></EnumerationResults>')
        if name not in self.blobs:
            return Response(status=404)
        if 'x-ms-range' in request.headers:
            request.environ['HTTP_RANGE'] = request.headers['x-ms-range']
        return Response(self.blobs[name]).make_conditional(request, True, len(self.blobs[name]))

    def __call__(self, environ: dict, start_response) -> Iterable[bytes]:
        """Answer a request, as a WSGI application."""
        response = self.answer(Request(environ))
        response.last_modified = DATE
        response.set_etag('1')
        return response(environ, start_response)


@contextlib.contextmanager
def local_azure() -> Iterator[LocalAzure]:
    """Run a server in a thread of this process."""
    store = LocalAzure()
    with served(store) as store.url:
        yield store
