"""The body of an HTTP answer as a binary stream that is either whole or an error.

Contract
- Bytes come in order, each once. The end is where Content-Length, Content-Range or the last chunk says, never where a
  connection closes; only a body for which the server states none of these ends with its connection (RFC 9112, 6.3).
- What breaks is resumed at the byte it broke at, by `Range` with `If-Range` and `If-Match` on the first answer's ETag
  or Last-Modified. Without these, or where the server decodes for us (Content-Encoding) or takes no ranges, it begins
  again if no byte was given yet, and else it is an error that names the bytes received and expected.
- Another ETag, Last-Modified or length than the first answer's raises ChangedDataError.
- Each process and thread has its own session; a stream in a forked child opens a connection of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import threading
import time
from typing import Any, NoReturn

from pipes.errors import ChangedDataError, mask
from pipes.sources.s3_options import S3Options
from pipes.sources.s3_retry import Attempts, S3Failure, failure_of_answer, retry_after_seconds

__all__ = ["HttpStream", "Sessions", "need_requests"]

_BLOCK = 1 << 20
_SKIP_BY_READING = 256 << 10
_inherited: list[Any] = []


def need_requests() -> None:
    """Raise ModuleNotFoundError, saying what to install, where requests is not installed."""
    if importlib.util.find_spec("requests") is None:
        raise ModuleNotFoundError('reading over HTTP needs requests: pip install "pipes[http]"', name="requests")


class Sessions:
    """The sessions of one run: one for each thread and process, made when it is first used."""

    def __init__(self) -> None:
        self._local = threading.local()

    def own(self) -> Any:
        """The session of this thread."""
        if getattr(self._local, "pid", None) != os.getpid():
            import requests

            _inherited.append(getattr(self._local, "session", None))
            session = requests.Session()
            session.headers["Accept-Encoding"] = "identity"  # so that offsets count the bytes that are given
            self._local.session, self._local.pid = session, os.getpid()
        return self._local.session


class HttpStream(io.RawIOBase):
    """What a GET of `url` answers, read as it arrives; it seeks where the server takes ranges.

    `settings` are those of `requests.Session.get`; `patience` gives attempts, backoff and deadline; `listed` is the
    size in bytes that the body must have, if known.
    """

    def __init__(
        self, url: str, sessions: Sessions, settings: dict[str, Any], patience: S3Options, listed: int | None = None
    ) -> None:
        # First, for `close`: it runs also where this raises.
        self._response: Any = None
        self._url, self._sessions, self._settings = url, sessions, settings
        self._shown = mask(url)
        self._attempts = Attempts(patience, "", self._shown, name=self._shown, advise=_advice)
        self._pid = os.getpid()
        self._at = 0
        self._size = listed
        self._answered = self._ended = self._encoded = self._ranges = False
        self._etag = self._modified = ""
        self._attempts.run(self._open)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._ranges and self._size is not None and self._resumable()

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if not self.seekable():
            raise io.UnsupportedOperation(f"{self._shown}: the server takes no ranges, so the stream cannot seek")
        assert self._size is not None
        target = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if target < 0:
            raise ValueError(f"seek to byte {target}: a body begins at byte 0")
        if self._response is not None and 0 < target - self._at <= _SKIP_BY_READING:
            while self._at < target and self._receive(target - self._at):
                pass
        if target != self._at:
            self._drop()
            self._at = target
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._receive(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        parts = []
        while data := self._receive(_BLOCK):
            parts.append(data)
        return b"".join(parts)

    def close(self) -> None:
        if not self.closed:
            self._drop()
        super().close()

    def __repr__(self) -> str:
        return f"<HttpStream {self._shown} at {self._at} of {self._size}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self!r} cannot be pickled: send its URL and open it where it is read")

    def _resumable(self) -> bool:
        return not self._encoded and bool(self._validator())

    def _validator(self) -> str:
        """What may stand in If-Range: a strong tag, or a date (RFC 9110, 13.1.5)."""
        return self._etag if self._etag.startswith('"') else self._modified

    def _receive(self, limit: int) -> bytes:
        """The next bytes, at least one before the end, empty at it."""
        if self.closed:
            raise ValueError(f"read from a closed stream: {self._shown}")
        if self._pid != os.getpid():
            _inherited.append(self._response)
            self._response, self._pid = None, os.getpid()
        while limit and not self._ended and (self._size is None or self._at < self._size):
            began = time.monotonic()
            try:
                if self._response is None:
                    self._check_resumable(S3Failure("cut", "its connection is gone"))
                    self._attempts.run(self._open)
                    continue
                data = self._read(limit)
            except S3Failure as failure:
                self._drop()
                failure.what += f" after {self._at} of {self._size or 'an unknown number of'} bytes were received"
                self._check_resumable(failure)
                self._attempts.failed(failure, began)
                continue
            except BaseException:
                self._drop()
                raise
            self._at += len(data)
            self._attempts.progress(len(data))
            return data
        if limit:
            self._finish()
        return b""

    def _finish(self) -> None:
        more = b""
        if self._response is not None and not self._ended:
            with contextlib.suppress(Exception):
                more = self._response.raw.read(1)  # which gives the connection back
        self._drop()
        if more:
            self._changed(f"{self._size} bytes", "more")

    def _read(self, limit: int) -> bytes:
        """The next bytes of the open answer; empty, and the end noted, where a body of unknown size ends."""
        raw = self._response.raw
        left = limit if self._size is None else min(limit, self._size - self._at)
        try:
            # All that a failing `read` has received is lost; `read1` gives what there is.
            data: bytes = raw.read(left, decode_content=True) if self._encoded else raw.read1(left)
        except Exception as error:
            _raise_failure(error, "cut")
        if not data:
            expected = _length_of(self._response.headers) if self._encoded else None
            if self._size is not None or (expected is not None and raw.tell() < expected):
                raise S3Failure("cut", "the connection was closed")
            self._ended = True
        return data

    def _check_resumable(self, failure: S3Failure) -> None:
        if self._at and not self._resumable():
            why = (
                "the server encodes the body" if self._encoded else "the server sends neither a strong ETag nor a date"
            )
            raise self._attempts.error(failure, f"it cannot be continued, because {why}") from None

    def _open(self, failures: int) -> None:
        """Ask for the body from the position on."""
        settings = dict(self._settings)
        if self._at:
            more = {"Range": f"bytes={self._at}-", "If-Range": self._validator()}
            if self._validator() == self._etag:
                more["If-Match"] = self._etag
            settings["headers"] = {**(settings.get("headers") or {}), **more}
        try:
            response = self._sessions.own().get(self._url, stream=True, **settings)
        except Exception as error:
            _raise_failure(error, "connection")
        try:
            self._accept(response)
            if response.status_code == 200 and self._size == 0:
                response.raw.read()  # gives its connection back
        except BaseException:
            response.close()
            raise
        self._response = response

    def _accept(self, response: Any) -> None:
        """Check that the answer is about the same body and begins, or is read on to, where this stream stands."""
        status, headers = response.status_code, response.headers
        start, total = _range_of(headers)
        if status == 412 and self._at:
            self._changed(self._tag(), "another")
        if status == 416 and self._at and total is not None:
            self._check_same("", "", total)
            self._size = total
        elif status not in (200, 203) and not (status == 206 and self._at):
            wait = retry_after_seconds(headers.get("Retry-After"))
            raise failure_of_answer(status, "", mask(response.reason or ""), retry_after=wait)
        else:
            encoded = headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity")
            if status != 206:
                start, total = 0, None if encoded else _length_of(headers)
            self._check_same(headers.get("ETag", ""), headers.get("Last-Modified", ""), total)
            if not self._answered:
                self._etag, self._modified = headers.get("ETag", ""), headers.get("Last-Modified", "")
                self._encoded, self._ranges = encoded, headers.get("Accept-Ranges", "").strip().lower() == "bytes"
            elif encoded and self._at:
                raise S3Failure("refused", "the server encodes the rest of the body")
            self._size = None if encoded else self._size if total is None else total
            self._answered = True
            self._align(response, start)

    def _align(self, response: Any, start: int | None) -> None:
        """Read over what a server sends that does not take ranges; that it is the same body was checked."""
        if start is None or start > self._at:
            raise S3Failure("refused", f"byte {self._at} was asked for and byte {start} came")
        surplus = self._at - start
        while surplus:
            try:
                data = response.raw.read(min(surplus, _BLOCK), decode_content=False)
            except Exception as error:
                _raise_failure(error, "cut")
            if not data:
                raise S3Failure("cut", "the connection was closed")
            surplus -= len(data)

    def _check_same(self, etag: str, modified: str, total: int | None) -> None:
        if self._size is not None and total is not None and total != self._size:
            self._changed(f"{self._size} bytes", f"{total} bytes")
        if not self._answered:
            return
        if self._etag and etag:
            if self._etag != etag:
                self._changed(self._tag(), f"ETag {etag}")
        elif self._modified and modified and self._modified != modified:
            self._changed(self._tag(), f"Last-Modified {modified}")
        elif self._at and not etag and not modified and total is None:
            raise S3Failure("refused", "the rest came with nothing that tells whether it is of the same body")

    def _tag(self) -> str:
        return f"ETag {self._etag}" if self._etag else f"Last-Modified {self._modified}"

    def _changed(self, before: str, now: str) -> NoReturn:
        raise ChangedDataError(
            f"{self._shown}: it was replaced: it had {before} and has {now} now. Read it again from its beginning"
        )

    def _drop(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.close()


def _length_of(headers: Any) -> int | None:
    length = headers.get("Content-Length", "").strip()
    return int(length) if length.isdecimal() and "Transfer-Encoding" not in headers else None


def _range_of(headers: Any) -> tuple[int | None, int | None]:
    """The first byte and the whole length that Content-Range states (RFC 9110, 14.4)."""
    found = re.fullmatch(r"bytes\s+(?:(\d+)-\d+|\*)/(\d+|\*)", headers.get("Content-Range", "").strip())
    if found is None:
        return None, None
    return int(found[1]) if found[1] else None, int(found[2]) if found[2] != "*" else None


def _raise_failure(error: Exception, otherwise: Any) -> NoReturn:
    """Raise what `error` of requests means, without its text, which holds the URL with its secrets."""
    import requests
    import urllib3

    if isinstance(error, ValueError) and isinstance(error, requests.RequestException):  # the URL itself is wrong
        raise ValueError(mask(str(error))) from None
    reason = _reason(error)
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError | TimeoutError):
        raise S3Failure("timeout", "the server did not answer in time") from None
    if isinstance(error, requests.exceptions.SSLError | urllib3.exceptions.SSLError):
        raise S3Failure(
            "refused", f"TLS failed: {reason}; check the certificate, or give verify= a CA bundle"
        ) from None
    if isinstance(error, requests.TooManyRedirects):
        raise S3Failure("refused", "the server redirects without end") from None
    if isinstance(error, urllib3.exceptions.DecodeError):
        raise S3Failure("cut", "the body cannot be decoded") from None
    if isinstance(error, requests.ConnectionError | requests.exceptions.ChunkedEncodingError):
        raise S3Failure(otherwise, f"the connection failed: {reason}") from None
    if isinstance(error, urllib3.exceptions.HTTPError | OSError) and not isinstance(error, requests.RequestException):
        raise S3Failure(otherwise, f"the connection failed: {reason}") from None
    raise error


def _reason(error: BaseException) -> str:
    """What the system said, or that it said nothing: the texts of the libraries hold URLs."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.strerror:
            return str(at.strerror)
        at = at.__cause__ or at.__context__
    return "it ended early"


def _advice(failure: S3Failure) -> str:
    if failure.kind == "missing":
        return " Check the URL."
    if failure.kind == "denied":
        return " Check auth=, headers=, or the signature in the URL, which may have expired."
    if failure.kind in ("connection", "timeout", "cut"):
        return " Check the URL and the network; timeout=, attempts= and deadline= give it more time."
    return ""
