"""Azure's blob store through its own client, with the credentials that Streaming finds."""
import functools
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from sdbench.stores.addresses import CONNECT_SECONDS, Address, Retry, StoredFile


class AzureStore:
    """An address in Azure's store."""

    def __init__(self, place: Address, retry: Retry):
        self.key = place.key
        self.container = azure_service(place.host, retry, os.getpid()).get_container_client(place.bucket)

    def download(self, path: str, in_threads: bool) -> None:
        with open(path, 'wb') as file:
            self.container.download_blob(self.key).readinto(file)

    def upload(self, file: BinaryIO) -> None:
        self.container.upload_blob(self.key, file, overwrite=True)

    def files(self, prefix: str) -> Iterator[StoredFile]:
        for blob in self.container.list_blobs(name_starts_with=prefix):
            yield StoredFile(blob.name, blob.size, blob.etag)


@functools.cache
def azure_service(host: str, retry: Retry, process: int) -> Any:
    """Return Azure's client for the account at `host`, once per process."""
    from azure.storage.blob import BlobServiceClient, LinearRetry
    from streaming.base.storage import AzureDownloader
    # The default pauses are 18, 24 and 42 seconds, even if the connection is refused. Azure's client counts the
    # attempts for each kind of error separately.
    kinds = ('retry_total', 'retry_connect', 'retry_read', 'retry_status')
    policy = LinearRetry(backoff=retry.tries / 2, random_jitter_range=0, **dict.fromkeys(kinds, retry.tries - 1))
    return BlobServiceClient(f'https://{host}', AzureDownloader().credential, connection_timeout=CONNECT_SECONDS,
                             read_timeout=retry.timeout, retry_policy=policy)
