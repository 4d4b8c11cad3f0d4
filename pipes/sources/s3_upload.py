"""Writing an object to an S3 store: there whole, or not at all.

Contract
- An object appears under its key when all its bytes arrived, as the store checked by their MD5; until then, and after
  any failure or interrupt, the key has what it had before.
- Up to `_SINGLE` bytes are one request, more are parts of a multipart upload. `concurrency` of them are sent side by
  side, each by a thread of the upload's own; with those that are being read and joined, at most two more are held.
- Each request has the attempts and the deadline of the options. An upload that fails, or is interrupted, begins no
  more parts, waits for those under way (`_SECONDS_TO_END` at most), and is aborted, so that the store keeps no parts.
  Where that fails, or a part was still under way, the error's note names the upload.
- Where no thread can be had, as at the interpreter's exit, parts are sent by the caller's.
- No thread is left after a success, nor after a failure once the parts under way have ended.
- Completing an upload that was completed, its answer lost, is success if the object has the tag of its parts.
"""

from __future__ import annotations

import hashlib
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count, islice
from typing import IO, TYPE_CHECKING

from pipes.arguments import whole
from pipes.errors import StoreError, add_note
from pipes.sources.s3_retry import Attempts, S3Failure

if TYPE_CHECKING:
    from pipes.sources.s3_boto import BotoTransport
    from pipes.sources.s3_client import S3Store

__all__ = ["PARTS_AT_ONCE", "checked_parts_at_once", "upload"]

PARTS_AT_ONCE = 4

_SINGLE = 16 << 20
_SECONDS_TO_END = 3.0
# A store takes 10,000 parts: parts that double every 2,000 reach 970 GiB, and those of the first 31 GiB have 16 MiB.
_PARTS_OF_A_SIZE = 2_000
Buffer = bytes | bytearray | memoryview


def checked_parts_at_once(concurrency: int) -> int:
    """The number of parts to send at once; raises ValueError unless it is at least 1."""
    concurrency = whole("concurrency", concurrency)
    if concurrency < 1:
        raise ValueError(f"concurrency={concurrency}: at least one part at a time has to be sent")
    return concurrency


def upload(store: S3Store, bucket: str, key: str, data: Buffer | IO[bytes], concurrency: int) -> str | None:
    """Write `data`, or what is left of an open binary file, as one object; return its ETag."""
    if isinstance(data, bytes | bytearray | memoryview):
        parts = _slices(data)
    elif hasattr(data, "read"):
        parts = _pieces(data)
    else:
        raise TypeError(f"s3://{bucket}/{key}: bytes or a binary file are needed, not {type(data).__name__}")
    head = list(islice(parts, 2))
    if len(head) == 2:
        return _Multipart(store, bucket, key, concurrency).run(_drained(head, parts))
    digest = _md5(head[0])
    return Attempts(store.options, bucket, key).run(lambda _: store.uploads().put(bucket, key, head[0], digest))


class _Stopped(BaseException):
    """Another part failed."""


class _Multipart:
    def __init__(self, store: S3Store, bucket: str, key: str, concurrency: int) -> None:
        self._store, self._bucket, self._key, self._concurrency = store, bucket, key, concurrency
        self._tags: dict[int, str] = {}
        self._id = ""
        self._ending = threading.Event()

    def run(self, parts: Iterator[bytes]) -> str | None:
        self._id = self._attempts().run(lambda _: self._uploads().begin(self._bucket, self._key))
        try:
            self._send_all(parts)
            return self._attempts().run(self._complete)
        except BaseException as error:
            self._abort(error)
            raise

    def _send_all(self, parts: Iterator[bytes]) -> None:
        sending: dict[Future[str], int] = {}
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="pipes S3 upload")
        try:
            for number, part in enumerate(parts, 1):
                if len(sending) == self._concurrency:
                    self._take_sent(sending)
                try:
                    future = pool.submit(self._send, number, part)
                except RuntimeError:  # the interpreter is ending, or the system allows no thread
                    future = Future()
                    future.set_result(self._send(number, part))
                sending[future] = number
                del part
            while sending:
                self._take_sent(sending)
        except BaseException as error:
            self._ending.set()
            pool.shutdown(wait=False, cancel_futures=True)
            # Those that were cancelled have not begun; `wait` would wait for a thread to take note of them.
            if wait([future for future in sending if not future.cancelled()], _SECONDS_TO_END).not_done:
                add_note(error, f"upload {self._id} had parts under way, which may still be in the store")
            else:
                pool.shutdown()  # the threads of parts that are done end now, and not a moment later
            raise
        pool.shutdown()

    def _take_sent(self, sending: dict[Future[str], int]) -> None:
        for future in wait(sending, return_when=FIRST_COMPLETED).done:
            self._tags[sending.pop(future)] = future.result()

    def _send(self, number: int, data: bytes) -> str:
        digest = _md5(data)

        def request(_: int) -> str:
            return self._uploads().part(self._bucket, self._key, self._id, number, data, digest)

        return Attempts(self._store.options, self._bucket, self._key, self._pause).run(request)

    def _pause(self, seconds: float) -> None:
        if self._ending.wait(seconds):
            raise _Stopped

    def _complete(self, attempt: int) -> str | None:
        try:
            return self._uploads().complete(self._bucket, self._key, self._id, self._tags_in_order())
        except S3Failure as failure:
            if attempt and failure.code == "NoSuchUpload":
                found = self._store.head(self._bucket, self._key).etag
                if found and found == _tag_of_parts(self._tags_in_order()):
                    return found
                failure.what = "the upload is gone, and the object is not the one that was sent"
            raise

    def _tags_in_order(self) -> list[str]:
        return [self._tags[number] for number in sorted(self._tags)]

    def _abort(self, error: BaseException) -> None:
        try:
            self._attempts().run(lambda _: self._uploads().abort(self._bucket, self._key, self._id))
        except StoreError as failure:
            if not isinstance(failure, FileNotFoundError):
                add_note(error, f"the parts of upload {self._id} may still be in the store: {failure}")

    def _uploads(self) -> BotoTransport:
        return self._store.uploads()

    def _attempts(self) -> Attempts:
        return Attempts(self._store.options, self._bucket, self._key)


def _slices(data: Buffer) -> Iterator[bytes]:
    view = memoryview(data).cast("B")
    start = number = 0
    while start < len(view) or not number:
        stop = start + _part_size(number)
        whole = isinstance(data, bytes) and not start and stop >= len(data)
        yield data if whole else bytes(view[start:stop])  # type: ignore[misc]
        start, number = stop, number + 1


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """What is left of a file, in full parts but for the last; one empty part when nothing is left."""
    for number in count():
        size, pieces = _part_size(number), []
        while size:
            data = file.read(min(size, 1 << 20))
            if not isinstance(data, bytes | bytearray | memoryview):
                raise TypeError(f"a binary file is needed; {file!r} gives {type(data).__name__}")
            if not data:
                break
            pieces.append(data)
            size -= len(data)
        if pieces or not number:
            yield b"".join(pieces)
        if size:
            return


def _drained(head: list[bytes], parts: Iterator[bytes]) -> Iterator[bytes]:
    """First the parts of the list, which keeps none that was given."""
    while head:
        yield head.pop(0)
    yield from parts


def _part_size(number: int) -> int:
    return _SINGLE << number // _PARTS_OF_A_SIZE


def _md5(data: bytes) -> str:
    return b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _tag_of_parts(tags: list[str]) -> str | None:
    """The ETag of an object made of parts with these tags, None where they are no MD5 sums (encrypted objects)."""
    try:
        parts = b"".join(bytes.fromhex(tag.strip('"')) for tag in tags)
    except ValueError:
        return None
    return f'"{hashlib.md5(parts, usedforsecurity=False).hexdigest()}-{len(tags)}"'
