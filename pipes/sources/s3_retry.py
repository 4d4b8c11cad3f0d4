"""The one retry loop of the S3 boundary; both clients run with their own retries off.

Contract
- An operation is one object from open to close, or one page of a listing. It makes at most `attempts` requests that
  fail, and is given up `deadline` seconds after its first failure began. Not counted is time in which the caller does
  something else, or this process was stopped: no attempt counts longer than its timeouts allow. A body that brought
  `_GOOD_BYTES` since the last failure has earned its attempts back.
- A wait is drawn from 0 to `backoff * 2**(failures - 1)` (full jitter), and is never shorter than Retry-After. A
  Retry-After beyond the deadline fails at once.
- Expired credentials are asked for anew once (a body that brings bytes may have them expire again), through boto3;
  what is refused then is an error.
- What cannot get better (missing, denied, changed, a setting that is wrong) is raised after one request.
- The error names bucket, key, status, attempts and request id; never a key, a token or a signature.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Literal, TypeVar

from pipes.errors import (
    StoreConnectionError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTimeoutError,
)
from pipes.sources.s3_options import S3Options

__all__ = ["Attempts", "Kind", "S3Failure", "failure_of_answer", "retry_after_seconds"]

Kind = Literal[
    "missing",
    "denied",
    "expired",
    "changed",
    "refused",
    "throttled",
    "server",
    "timeout",
    "connection",
    "cut",
    "unclear",
    "corrupt",
]
T = TypeVar("T")

_PASSING = frozenset({"throttled", "server", "timeout", "connection", "cut", "unclear"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_THROTTLED = frozenset({429, 503, 509})
_SERVER = frozenset({408, 500, 502, 504})
_LONGEST_WAIT = 5.0
_GOOD_BYTES = 8 << 20
# Not the user's generators, which must not move, nor one that forked processes would share.
_draw = random.SystemRandom().uniform


class S3Failure(Exception):
    """One request that failed, in the words of no particular client."""

    def __init__(
        self,
        kind: Kind,
        what: str,
        *,
        status: int | None = None,
        code: str = "",
        request_id: str = "",
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(what)
        self.kind, self.what, self.status, self.code = kind, what, status, code
        self.request_id, self.retry_after = request_id, retry_after


def _kind(status: int, code: str) -> Kind:
    """What an error answer of the store means for the one who asked."""
    if code in _EXPIRED:
        return "expired"
    if code in ("SlowDown", "RequestLimitExceeded", "Throttling", "ThrottlingException") or status in _THROTTLED:
        return "throttled"
    if code in ("RequestTimeout", "InternalError") or status in _SERVER:
        return "server"
    if status in (401, 403):
        return "denied"
    if status == 404:
        return "missing"
    return "changed" if status == 412 else "refused"


def failure_of_answer(
    status: int, code: str, message: str, request_id: str = "", retry_after: float = 0.0
) -> S3Failure:
    """The failure that an error answer of the store stands for."""
    kind = _kind(status, code)
    reason = message[:300] or "it gave no reason"
    what = {
        "missing": "the bucket does not exist" if code == "NoSuchBucket" else "the object does not exist",
        "changed": "the object was replaced",
        "throttled": "the store asks to slow down",
        "server": "the store failed",
        "denied": f"the store denied access: {reason}",
        "expired": f"the credentials have expired: {reason}",
    }.get(kind, f"the store refused: {reason}")
    return S3Failure(kind, what, status=status, code=code, request_id=request_id, retry_after=retry_after)


def retry_after_seconds(value: str | None) -> float:
    """Seconds a Retry-After header asks for, 0 without one (RFC 9110, 10.2.3: seconds or a date)."""
    if not value:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


class Attempts:
    """Counts the failed requests of one operation, waits between them, and says when it is enough."""

    def __init__(
        self,
        options: S3Options,
        bucket: str,
        key: str,
        wait: Callable[[float], None] = time.sleep,
        *,
        name: str = "",
        advise: Callable[[S3Failure], str] | None = None,
    ) -> None:
        self.failures = 0
        self._sleep = wait
        self._options, self._bucket, self._key = options, bucket, key
        self._name, self._advise = name or f"s3://{bucket}/{key}", advise or _advice
        self._spent = 0.0
        self._good = 0
        self._renewed = False

    def run(self, request: Callable[[int], T]) -> T:
        """Call `request` with the number of failures so far until it answers; raise a StoreError when it is enough."""
        while True:
            began = time.monotonic()
            try:
                answer = request(self.failures)
            except S3Failure as failure:
                self.failed(failure, began)
            else:
                if self.failures:
                    self._spent += self._took(began)
                return answer

    def progress(self, count: int) -> None:
        """Note `count` body bytes that arrived."""
        self._good += count
        self._renewed = False
        if self.failures and self._good >= _GOOD_BYTES:
            self.failures, self._spent = 0, 0.0

    def failed(self, failure: S3Failure, began: float) -> None:
        """Wait for the next attempt of what began at `began` (monotonic seconds), or raise the error."""
        self.failures += 1
        self._good = 0
        if failure.kind == "expired" and not self._renewed:
            self._renewed = True  # the clients have asked for new ones
            return
        if failure.kind not in _PASSING:
            raise self.error(failure) from failure
        options = self._options
        if self.failures >= options.resolved_attempts():
            raise self.error(failure, f"gave up after {_count(self.failures)}") from failure
        self._spent += self._took(began, failure.kind)
        spent = self._spent
        if failure.retry_after > options.deadline - spent and failure.retry_after:
            reason = (
                f"the store asks to wait {failure.retry_after:.0f} s, beyond the deadline of {options.deadline:g} s"
            )
            raise self.error(failure, reason) from failure
        if spent >= options.deadline:
            raise self.error(failure, f"gave up after {spent:.1f} s and {_count(self.failures)}") from failure
        if failure.kind != "unclear":
            wait = _draw(0.0, min(_LONGEST_WAIT, options.backoff * 2.0 ** (self.failures - 1)))
            wait = min(max(wait, failure.retry_after), options.deadline - spent)
            self._spent += wait
            self._sleep(wait)

    def _took(self, began: float, kind: Kind | None = None) -> float:
        """Seconds that count for an attempt that began at `began` and failed in this way, or did not fail."""
        took, options = time.monotonic() - began, self._options
        if kind == "connection":  # a host may be looked up for longer
            return took
        return min(took, options.connect_timeout + options.read_timeout)

    def error(self, failure: S3Failure, reason: str = "") -> StoreError:
        """The public error for `failure`."""
        name = self._name
        if failure.code == "NoSuchBucket":
            name = f"s3://{self._bucket}"
        details = [f"status {failure.status}"] if failure.status else []
        details += [failure.code] if failure.code else []
        details += [f"request id {failure.request_id}"] if failure.request_id else []
        told = f" ({', '.join(details)})" if details else ""
        message = f"{name}: {failure.what}{told}{'; ' if reason else ''}{reason}.{self._advise(failure)}"
        return _CLASSES.get(failure.kind, StoreError)(
            message,
            bucket=self._bucket,
            key=self._key,
            status=failure.status,
            attempts=max(1, self.failures),
            request_id=failure.request_id,
        )


_CLASSES: dict[Kind, type[StoreError]] = {
    "missing": StoreNotFoundError,
    "denied": StorePermissionError,
    "expired": StorePermissionError,
    "timeout": StoreTimeoutError,
    "throttled": StoreConnectionError,
    "server": StoreConnectionError,
    "connection": StoreConnectionError,
    "cut": StoreConnectionError,
}


def _count(attempts: int) -> str:
    return "1 attempt" if attempts == 1 else f"{attempts} attempts"


def _advice(failure: S3Failure) -> str:
    if failure.code == "NoSuchBucket":
        return " Check the bucket's name and the endpoint."
    if failure.kind == "missing":
        return " Check the key; nothing in it is decoded or normalised."
    if failure.code in ("SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken", "InvalidToken"):
        return " Check the credentials (environment, profile, or access_key= and secret_key=)."
    if failure.code == "RequestTimeTooSkewed":
        return " Its clock and the store's are too far apart: set this machine's clock."
    if failure.code == "InvalidObjectState":
        return " It is in an archive (as Glacier): have the store restore it, and read it then."
    if failure.code == "PermanentRedirect":
        return " The bucket is elsewhere: check region and endpoint_url."
    if failure.kind == "denied" and failure.status is None:
        return " Give some (environment, profile=, access_key= and secret_key=), or unsigned=True for a public bucket."
    if failure.kind == "denied":
        return " Check the credentials' rights to read, list or write here, or use unsigned=True for a public bucket."
    if failure.kind in ("connection", "timeout"):
        more = "attempts=, deadline=, connect_timeout= and read_timeout="
        return f" Check endpoint_url and the network; {more} give it more time."
    return ""
