"""Google's store through its own client, with default credentials or none. With HMAC keys s3.py is used instead."""
import functools
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from sdbench.stores.addresses import CONNECT_SECONDS, Address, Retry, StoredFile


class GoogleStore:
    """An address in Google's store."""

    def __init__(self, place: Address, retry: Retry):
        from google.cloud.storage.retry import DEFAULT_RETRY
        self.key = place.key
        # The project that pays for reading a requester-pays bucket. GDAL reads the same variable.
        self.bucket = google_client(os.getpid()).bucket(place.bucket, os.environ.get('GS_USER_PROJECT'))
        # Google's client limits the seconds of all attempts, not their number. Allow as many as azure.py's pauses take.
        policy = DEFAULT_RETRY.with_timeout(retry.tries * (retry.tries - 1) / 2)
        self.options = {'retry': policy, 'timeout': (CONNECT_SECONDS, retry.timeout)}

    def download(self, path: str, in_threads: bool) -> None:
        with open(path, 'wb') as file:
            self.bucket.blob(self.key).download_to_file(file, **self.options)

    def upload(self, file: BinaryIO) -> None:
        self.bucket.blob(self.key).upload_from_file(file, **self.options)

    def files(self, prefix: str) -> Iterator[StoredFile]:
        for blob in self.bucket.list_blobs(prefix=prefix, **self.options):
            yield StoredFile(blob.name, blob.size, blob.etag)


@functools.cache
def google_client(process: int) -> Any:
    """Return Google's client, once per process. Without default credentials it can read public buckets."""
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud.storage import Client
    try:
        return Client()
    except DefaultCredentialsError:
        return Client.create_anonymous_client()
