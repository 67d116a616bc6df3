"""Stores that speak S3, through boto3: Amazon's, the server at S3_ENDPOINT_URL, and Google's with HMAC keys."""
import functools
import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from sdbench.stores.addresses import CONNECT_SECONDS, Address, Retry, StoredFile

GOOGLE_S3 = 'https://storage.googleapis.com'  # where Google speaks S3
SINGLE_UPLOAD = 64 << 20  # bytes, enough for a shard: some stores do not support uploads in several parts
CONNECTIONS = 64  # connections that a client keeps open, because a command may send so many requests concurrently


class S3Store:
    """An address in a store that speaks S3."""

    def __init__(self, place: Address, retry: Retry):
        self.place = place
        endpoint = os.environ.get('S3_ENDPOINT_URL', '').strip() or None  # docker --env-file keeps trailing spaces
        keys = None
        if place.scheme == 'gs':
            endpoint = GOOGLE_S3
            keys = (os.environ['GCS_KEY'], os.environ['GCS_SECRET'])
        self.client = make_client(endpoint, keys, retry, os.getpid())

        # Requester-pays: Streaming's variable lists the buckets for which this account pays.
        self.request_payer = {}
        if place.bucket in os.environ.get('MOSAICML_STREAMING_AWS_REQUESTER_PAYS', '').replace(' ', '').split(','):
            self.request_payer = {'RequestPayer': 'requester'}

    def download(self, path: str, in_threads: bool) -> None:
        """Download the file to `path`, in parallel parts if `in_threads`."""
        from boto3.s3.transfer import TransferConfig
        from botocore.exceptions import ClientError
        bucket, key = self.place.bucket, self.place.key
        config = TransferConfig(use_threads=in_threads)
        try:
            self.client.download_file(bucket, key, path, self.request_payer, Config=config)
        except ClientError:
            # download_file sends HEAD first, whose errors have no message. A GET raises the full error.
            self.client.get_object(Bucket=bucket, Key=key, **self.request_payer)
            raise

    def upload(self, file: BinaryIO) -> None:
        from boto3.s3.transfer import TransferConfig
        acl = {}
        if 'S3_CANNED_ACL' in os.environ:  # Composer reads the same variable
            acl = {'ACL': os.environ['S3_CANNED_ACL']}
        config = TransferConfig(multipart_threshold=SINGLE_UPLOAD)
        self.client.upload_fileobj(file, self.place.bucket, self.place.key, acl, Config=config)

    def files(self, prefix: str) -> Iterator[StoredFile]:
        pages = self.client.get_paginator('list_objects_v2')
        for page in pages.paginate(Bucket=self.place.bucket, Prefix=prefix, **self.request_payer):
            for entry in page.get('Contents', ()):
                yield StoredFile(entry['Key'], entry['Size'], entry.get('ETag') or str(entry['LastModified']))


@functools.cache
def make_client(endpoint: str | None, keys: tuple[str, str] | None, retry: Retry, process: int) -> Any:
    """Return boto3's client, which signs requests if there are credentials.

    The client is made once per process, because a forked process must not share the connections of its parent.
    `endpoint` is the URL of the server, and `keys` are Google's HMAC key and secret; None means what boto3 finds, if
    anything.
    """
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config
    if keys is not None:
        session = boto3.session.Session(*keys, region_name='auto')
    else:
        session = boto3.session.Session()
    signature = UNSIGNED if session.get_credentials() is None else None

    # Send no checksums by default, as boto3 before 1.36, because R2, B2, OCI and older MinIO and Ceph refuse them.
    checksums = {}
    for name in ('request_checksum_calculation', 'response_checksum_validation'):
        checksums[name] = os.environ.get(f'AWS_{name.upper()}', 'when_required')
    config = Config(signature_version=signature, read_timeout=retry.timeout, connect_timeout=CONNECT_SECONDS,
                    retries={'mode': 'standard', 'total_max_attempts': retry.tries}, max_pool_connections=CONNECTIONS,
                    **checksums)
    client = session.client('s3', endpoint_url=endpoint, config=config)
    client.meta.events.register('after-call.s3', keep_error_page)
    return client


def keep_error_page(http_response: Any, parsed: dict, **_) -> None:
    """Keep the text of an error answer that is not XML, which boto3 drops. boto3 calls this after every answer."""
    if http_response.status_code >= 300 and not re.match(r'\s*<(\?xml|Error)', http_response.text):
        parsed['Error']['Message'] = re.sub('<[^>]*>', ' ', http_response.text)  # without HTML tags
