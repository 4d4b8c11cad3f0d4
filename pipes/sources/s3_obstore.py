"""Requests through obstore: small bodies at a tenth of boto3's CPU.

What it cannot do right is left to boto3 (`can_name`, and every attempt after a failed one):
- It takes names as paths: `in/` reads the object `in`, `in//a`, `.` and control characters are refused, and one such
  key makes a whole listing fail; its listing also takes a prefix as a folder. So listing is never done here.
- It shows no headers of a refusal: a request that was throttled waits at least a second, the unit of Retry-After.
- Its runtime belongs to the process: a child forked from a process that used it hangs, with a new store too.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pipes.sources.s3_boto import S3Body, failure_of_boto
from pipes.sources.s3_buffers import Buffers
from pipes.sources.s3_checksum import Checksum
from pipes.sources.s3_names import quoted
from pipes.sources.s3_options import S3Options
from pipes.sources.s3_retry import S3Failure, failure_of_answer

__all__ = ["ObstoreTransport", "can_name", "can_run"]

_ODD_NAME = re.compile(r"(?:^|/)(?:\.{0,2})(?:/|$)|[\x00-\x1f\x7f]")
_STATUS = re.compile(r"\n\s*status: (\d{3}),")
_THREADS = "tokio-rt-worker"
# A body up to this many bytes that is wanted whole is received by one call, for two thirds of the CPU time; when the
# connection breaks, it is asked for again from its first byte.
_WHOLE = 256 << 10
# Botocore renews credentials 10 minutes before they end at the latest.
_TRUST = timedelta(minutes=9)

_used = False
_inherited = False
_warned = False
_up_at_fork = False


def can_name(bucket: str, key: str) -> bool:
    """Whether obstore asks for exactly this key (it normalises some and refuses others).

    >>> can_name("bkt", "in/a b.txt"), can_name("bkt", "in//a.txt"), can_name("bkt", "in/")
    (True, False, False)
    """
    return ":" not in bucket and not _ODD_NAME.search(key)


def can_run() -> bool:
    """Whether this process may use obstore; warns once where a fork after use forbids it."""
    global _warned
    if _inherited and not _warned:
        _warned = True
        warnings.warn(
            "this process was forked from one that had used obstore, which would hang here: S3 is read through boto3, "
            "slower for small objects. Start workers by forkserver or spawn to avoid it.",
            RuntimeWarning,
            stacklevel=2,
        )
    return not _inherited


class ObstoreTransport:
    """Opens objects of one bucket through obstore; every problem comes out as an S3Failure."""

    def __init__(self, session: Any, boto_client: Any, options: S3Options, bucket: str) -> None:
        from obstore.store import S3Store

        global _used
        _used = True
        #: Whose credentials and regions it has.
        self.boto_client = boto_client
        place, region = _where(boto_client, bucket)
        endpoint = f"{place.scheme}://{place.netloc}"
        config: Any = {
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,
            "region": region,
            "virtual_hosted_style_request": not place.path.startswith(f"/{bucket}/"),
            "skip_signature": options.unsigned,
            "request_payer": options.requester_pays,
        }
        client: Any = {
            "allow_http": place.scheme == "http",
            "connect_timeout": timedelta(seconds=options.connect_timeout),
            "read_timeout": timedelta(seconds=options.read_timeout),
            # Of a whole request, body and slow consumer included: `read_timeout` is what notices a silent store.
            "timeout": timedelta(days=1),
            "user_agent": "pipes",
        }
        verify = options.resolved_verify()
        if verify is None:
            verify = os.environ.get("AWS_CA_BUNDLE") or True
        if isinstance(verify, str):
            try:
                client["root_certificate"] = Path(verify).read_bytes()
            except OSError as error:
                raise S3Failure("refused", f"the CA bundle cannot be read: {error}") from error
        elif not verify:
            client["allow_invalid_certificates"] = True
        self._store = S3Store(
            bucket,
            config=config,
            client_options=client,
            retry_config={"max_retries": 0},
            credential_provider=None if options.unsigned else _Credentials(session),
        )

    def open(self, bucket: str, key: str, start: int, etag: str | None, stop: int | None = None) -> S3Body:
        """GET an object from byte `start` to before byte `stop`, or its end, if it still has `etag`."""
        import obstore
        from obstore.exceptions import BaseError

        asked: Any = {}
        if stop:
            asked["range"] = (start, stop)
        elif start:
            asked["range"] = {"offset": start}
        if etag and not etag.startswith("W/"):
            asked["if_match"] = etag
        try:
            answer = obstore.get(self._store, key, options=asked)
            return _ObstoreBody(answer, None if "range" not in asked else answer.range)
        except (BaseError, OSError, ValueError) as error:
            raise _failure(error) from error


def _where(boto_client: Any, bucket: str) -> tuple[SplitResult, str]:
    """Where botocore would send this bucket's requests, and for which region it would sign them.

    Endpoint rules, addressing style and buckets found in other regions are its business.
    """
    from botocore.exceptions import BotoCoreError

    regions = [boto_client.meta.region_name]

    def note(builtins: dict[str, Any], **_: Any) -> None:
        regions.append(builtins.get("AWS::Region") or regions[0])

    events = boto_client.meta.events
    events.register_last("before-endpoint-resolution.s3", note)
    try:
        url = boto_client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})
    except BotoCoreError as error:
        raise failure_of_boto(error) from error
    finally:
        events.unregister("before-endpoint-resolution.s3", note)
    return urlsplit(url), regions[-1]


class _ObstoreBody:
    def __init__(self, answer: Any, part: tuple[int, int] | None) -> None:
        # Each look at the answer costs some 20 us.
        meta = answer.meta
        self.etag: str | None = quoted(meta["e_tag"])
        if not self.etag:
            raise S3Failure("unclear", "the answer has no ETag")  # boto3 sees whether it is an object
        self.version: str | None = meta["version"]
        self.checksum: Checksum | None = None  # it does not show it
        self.size: int = meta["size"]
        self.start: int
        self._stop: int
        self.start, self._stop = part or (0, self.size)
        self._answer: Any = answer
        self._chunks: Iterator[bytes] | None = None

    def read(self, limit: int, buffers: Buffers | None = None) -> bytes:
        from obstore.exceptions import BaseError

        try:
            if self._chunks is None:
                answer, self._answer = self._answer, None
                if self._stop - self.start <= min(limit, _WHOLE):
                    self._chunks = iter(())
                    return bytes(answer.bytes())
                # As they come off the network: larger ones cost as much, and are lost whole when the connection breaks.
                self._chunks = iter(answer.stream(1))
            return next(self._chunks, b"")
        except (BaseError, OSError) as error:
            raise _failure(error) from error

    def close(self) -> None:
        self._answer, self._chunks = None, iter(())


class _Credentials:
    """Hands boto3's credentials to obstore, renewed by botocore when they run out."""

    def __init__(self, session: Any) -> None:
        self._credentials = session.get_credentials()

    def __call__(self) -> Any:
        if self._credentials is None:
            raise PermissionError("no credentials found")
        frozen = self._credentials.get_frozen_credentials()
        fixed = type(self._credentials).__name__ == "Credentials"
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": None if fixed else datetime.now(UTC) + _TRUST,
        }


def _failure(error: Exception) -> S3Failure:
    """What an exception of obstore means; what its text does not say, boto3 is asked again for."""
    text = str(error)
    found = _STATUS.findall(text)
    code, request_id, message = (_element(text, name) for name in ("Code", "RequestId", "Message"))
    if found:
        status = int(found[-1])
        failure = failure_of_answer(status, code, message, request_id, 1.0 if status in (429, 503) else 0.0)
        if failure.kind == "refused":
            failure.kind = "unclear"
        return failure
    if "kind: Timeout" in text:
        return S3Failure("timeout", "the store did not answer in time")
    if "kind: Interrupted" in text or "kind: Body" in text or "kind: Decode" in text:
        return S3Failure("cut", "the connection broke")
    if "kind: Connect" in text or "kind: Request" in text:
        return S3Failure("connection", "the store cannot be reached")
    return S3Failure("unclear", f"obstore failed: {text.partition(chr(10))[0][:300]}")


def _element(text: str, name: str) -> str:
    found = re.search(f"<{name}>([^<]*)</{name}>", text)
    return found[1] if found else ""


def _runtime_is_up() -> bool:
    """Whether obstore's runtime runs in this process, whoever started it (threads are visible on Linux only)."""
    if _used or _inherited or "obstore" not in sys.modules:
        return _used or _inherited
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:
        return False
    for task in tasks:
        try:
            if Path(f"/proc/self/task/{task}/comm").read_text().startswith(_THREADS):
                return True
        except OSError:
            continue
    return False


def _before_fork() -> None:
    global _up_at_fork
    _up_at_fork = _runtime_is_up()


def _after_fork() -> None:
    global _inherited, _used, _warned
    _inherited, _used, _warned = _up_at_fork, False, False


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
