"""Files in an S3 store: listed page by page, and read from start to end over connections that may break."""
import io
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import NamedTuple

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from inputs.errors import DataError, one_line

CONNECTIONS = 32  # of a process, at once
PIECE_BYTES = 8 << 20  # that a request asks for
PIECES_AHEAD = 2  # on their way while one is read, so that a file takes 32 MiB with the piece behind
ATTEMPTS = 8  # without one new byte, before a store counts as out of reach
LONGEST_PAUSE = 20  # seconds between two attempts, so that they take about a minute
# The object itself is not there, is shorter than it was, or lies in an archive: others can still be read.
CODES_OF_ONE_OBJECT = ('NoSuchKey', '404', 'InvalidRange', '416', 'InvalidObjectState')


class S3Store:
    """A bucket of S3 or of a server like it, at S3_ENDPOINT_URL as everywhere in Streaming; read without credentials
    where there are none. A process that is forked makes a client of its own."""

    def __init__(self, bucket: str):
        self.bucket = bucket
        self._client = None
        self._process = None  # that made the client

    def connect(self):
        """The client of this process."""
        if self._process != os.getpid():
            session = boto3.session.Session()
            anonymous = {'signature_version': UNSIGNED} if session.get_credentials() is None else {}
            config = Config(max_pool_connections=CONNECTIONS, connect_timeout=20, read_timeout=60,
                            retries={'mode': 'standard', 'total_max_attempts': 3}, **anonymous)
            self._client = session.client('s3', config=config, endpoint_url=os.environ.get('S3_ENDPOINT_URL'))
            self._process = os.getpid()
        return self._client

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, bytes) of each object whose key begins with `prefix`, in the order of the keys; 1000 a request."""
        pages = self.connect().get_paginator('list_objects_v2').paginate(Bucket=self.bucket, Prefix=prefix)
        for page in pages:
            for entry in page.get('Contents', ()):
                yield entry['Key'], entry['Size']

    def read(self, key: str) -> bytes | None:
        """A whole object; None if there is none. DataError: the store is out of reach."""
        problem = None
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(min(0.1 * 2 ** attempt, LONGEST_PAUSE))
            try:
                return self.connect().get_object(Bucket=self.bucket, Key=key)['Body'].read()
            except ClientError as error:
                if error.response['Error']['Code'] in ('NoSuchKey', '404'):
                    return None
                raise
            except (BotoCoreError, HTTPError, OSError) as error:  # the connection, within the content too
                problem = f'{type(error).__name__}: {one_line(error)}'
        raise DataError(f's3://{self.bucket}/{key} is out of reach ({problem})')

    def read_range(self, key: str, first: int, end: int) -> bytes:
        """The bytes of an object from `first` to before `end`; after a broken connection it goes on where it was.

        FileNotFoundError: they are not there. DataError: the store is out of reach, or lets nobody read.
        """
        content = bytearray()
        failures = 0
        while first + len(content) < end:
            before = len(content)
            problem = 'an answer without content'
            try:
                answer = self.connect().get_object(Bucket=self.bucket, Key=key,
                                                Range=f'bytes={first + before}-{end - 1}')
                for chunk in answer['Body'].iter_chunks(1 << 18):
                    content += chunk
            except ClientError as error:
                code = error.response['Error']['Code']
                if code in CODES_OF_ONE_OBJECT:
                    raise FileNotFoundError(f's3://{self.bucket}/{key}: {code}') from None
                if error.response['ResponseMetadata'].get('HTTPStatusCode', 500) < 500:
                    raise DataError(f's3://{self.bucket}/{key} cannot be read ({one_line(error)})') from None
                problem = one_line(error)
            except (BotoCoreError, HTTPError, OSError) as error:  # the connection, at any point
                problem = f'{type(error).__name__}: {one_line(error)}'
            failures = 0 if len(content) > before else failures + 1
            if failures == ATTEMPTS:
                raise DataError(f's3://{self.bucket}/{key} is out of reach ({problem})')
            if first + len(content) < end:
                time.sleep(min(0.1 * 2 ** failures, LONGEST_PAUSE))
        return bytes(content)


class S3Object(NamedTuple):
    """As much of a Path as reading a tar takes."""
    store: S3Store
    key: str
    size: int  # bytes

    def __str__(self) -> str:
        return f's3://{self.store.bucket}/{self.key}'

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    def open(self, mode: str = 'rb', buffering: int = 0) -> 'S3File':
        return S3File(self)


class S3File(io.RawIOBase):
    """An object as a file, read in pieces: some are on their way while one is read, and the one behind is kept."""

    def __init__(self, object: S3Object):
        self.object = object
        self.position = 0
        self.pieces: dict[int, Future] = {}
        object.store.connect()  # here, since two threads that make a client get in each other's way
        self.fetchers = ThreadPoolExecutor(1 + PIECES_AHEAD)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.object.size}[whence]
        if start + offset < 0:
            raise OSError(f'seek to {start + offset}')
        self.position = start + offset
        return self.position

    def readinto(self, buffer) -> int:
        if self.position >= self.object.size:
            return 0
        number, start = divmod(self.position, PIECE_BYTES)
        content = self.piece(number)[start:start + len(buffer)]
        buffer[:len(content)] = content
        self.position += len(content)
        return len(content)

    def piece(self, number: int) -> memoryview:
        """The bytes of a piece, with those after it on their way."""
        last = (self.object.size - 1) // PIECE_BYTES
        for other in list(self.pieces):
            if not number - 1 <= other <= number + PIECES_AHEAD:
                self.pieces.pop(other).cancel()
        for wanted in range(number, min(number + PIECES_AHEAD, last) + 1):
            if wanted not in self.pieces:
                end = min((wanted + 1) * PIECE_BYTES, self.object.size)
                self.pieces[wanted] = self.fetchers.submit(self.object.store.read_range, self.object.key,
                                                           wanted * PIECE_BYTES, end)
        return memoryview(self.pieces[number].result())

    def close(self) -> None:
        if not self.closed:
            self.fetchers.shutdown(wait=False, cancel_futures=True)
            self.pieces.clear()
        super().close()
