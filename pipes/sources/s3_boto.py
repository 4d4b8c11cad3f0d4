"""Requests through boto3: the control plane, large bodies, odd names, and every second attempt.

It shows statuses, headers and request ids, which the retry loop needs, and is what in-process mocks reach.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any, NamedTuple, Protocol
from xml.etree import ElementTree

from pipes.sources.s3_buffers import Buffers
from pipes.sources.s3_checksum import Checksum, checksum_of_headers
from pipes.sources.s3_names import S3Object, quoted
from pipes.sources.s3_options import S3Options
from pipes.sources.s3_pages import page_of, read_pages_ourselves
from pipes.sources.s3_retry import S3Failure, failure_of_answer, retry_after_seconds

__all__ = [
    "BotoTransport",
    "S3Body",
    "S3Head",
    "failure_of_boto",
    "make_boto_client",
    "make_boto_session",
    "need_boto3",
]

# Of answers without an ETag that are no objects: the pages of a web server, errors of a gateway.
_PAGES = ("text/html", "application/xhtml+xml", "application/xml", "text/xml")


class S3Body(Protocol):
    """An answer with a body that has not been read yet."""

    size: int
    """Of the whole object, in bytes."""
    etag: str | None
    version: str | None
    """Of an object in a bucket that keeps versions."""
    start: int
    """Offset in the object of the body's first byte."""
    checksum: Checksum | None
    """Of the whole object, where it was asked for and told."""

    def read(self, limit: int, buffers: Buffers | None = None) -> bytes | memoryview:
        """The next bytes, about `limit` and at least one, perhaps in `buffers`; empty at the end. Raises S3Failure."""

    def close(self) -> None: ...


class S3Head(NamedTuple):
    """What a store says about an object; `size` in bytes, `version` where the bucket keeps versions."""

    size: int
    etag: str | None
    version: str | None


def need_boto3() -> None:
    """Raise ModuleNotFoundError that says what to install, unless boto3 is there."""
    try:
        import boto3  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('reading from S3 needs boto3: pip install "pipes[s3]"', name="boto3") from error


def make_boto_session(options: S3Options) -> Any:
    """A session of our own; the process-wide default one is left alone."""
    import boto3
    from botocore.exceptions import ProfileNotFound

    try:
        return boto3.Session(
            aws_access_key_id=options.access_key,
            aws_secret_access_key=options.secret_key,
            aws_session_token=options.session_token,
            region_name=options.resolved_region(),
            profile_name=options.profile,
        )
    except ProfileNotFound as error:
        named = options.profile or os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE")
        raise ValueError(f"profile {named!r} is in none of the AWS configuration files") from error


def make_boto_client(session: Any, options: S3Options) -> Any:
    """A boto3 S3 client without retries and with the options' timeouts."""
    from botocore import UNSIGNED
    from botocore.config import Config

    settings: dict[str, Any] = {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": options.connect_timeout,
        "read_timeout": options.read_timeout,
        "max_pool_connections": 64,
        "tcp_keepalive": True,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "user_agent_extra": "pipes",
    }
    if options.unsigned:
        settings["signature_version"] = UNSIGNED
    if options.path_style is not None:
        settings["s3"] = {"addressing_style": "path" if options.path_style else "virtual"}
    verify = options.resolved_verify()
    bundle = os.environ.get("AWS_CA_BUNDLE") if verify is None else verify
    if isinstance(bundle, str) and not os.path.exists(bundle):
        raise S3Failure("refused", f"the CA bundle {bundle} is not there: verify= or AWS_CA_BUNDLE names it")
    client = session.client(
        "s3",
        endpoint_url=options.resolved_endpoint(),
        region_name=session.region_name or "us-east-1",
        verify=verify,
        config=Config(**settings),
    )
    read_pages_ourselves(client)
    if options.checksum:
        client.meta.events.register("before-call.s3.GetObject", _ask_for_checksum)
    return client


class BotoTransport:
    """Opens objects and lists pages through one boto3 client; every problem comes out as an S3Failure."""

    def __init__(
        self, client: Any, options: S3Options, renew: Callable[[BotoTransport, Any], None] | None = None
    ) -> None:
        self.client = client
        self._renew = renew
        self._checksum = options.checksum
        self._payer = {"RequestPayer": "requester"} if options.requester_pays else {}
        self._object = dict[str, Any](self._payer)
        if options.customer_key is not None:
            self._object |= {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": options.customer_key}

    def open(
        self, bucket: str, key: str, start: int, etag: str | None, stop: int | None = None, version: str | None = None
    ) -> S3Body:
        """GET an object, or a version of it, from byte `start` to before byte `stop`, or its end, if it has `etag`."""
        asked = self._object | ({"VersionId": version} if version else {})
        if start or stop:
            asked["Range"] = f"bytes={start}-{stop - 1 if stop else ''}"
        if etag and not etag.startswith("W/"):
            asked["IfMatch"] = etag
        body = _BotoBody(self._call("get_object", Bucket=bucket, Key=key, **asked))
        if not self._checksum:
            body.checksum = None
        return body

    def head(self, bucket: str, key: str) -> S3Head:
        """What the object is now."""
        answer = self._call("head_object", Bucket=bucket, Key=key, **self._object)
        return S3Head(answer["ContentLength"], quoted(answer.get("ETag")), answer.get("VersionId"))

    def checksum(self, bucket: str, key: str, version: str | None = None) -> tuple[str | None, Checksum | None]:
        """The ETag that the object, or a version of it, has now, and its checksum where the store keeps one."""
        asked = self._object | ({"VersionId": version} if version else {})
        answer = self._call("head_object", Bucket=bucket, Key=key, ChecksumMode="ENABLED", **asked)
        return quoted(answer.get("ETag")), checksum_of_headers(answer["ResponseMetadata"]["HTTPHeaders"])

    def put(self, bucket: str, key: str, data: bytes, md5: str) -> str | None:
        """Write a whole object, of which `md5` is the base64 digest; its ETag."""
        return self._call("put_object", Bucket=bucket, Key=key, Body=data, ContentMD5=md5, **self._object).get("ETag")  # type: ignore[no-any-return]

    def begin(self, bucket: str, key: str) -> str:
        """Begin a multipart upload; its id."""
        return self._call("create_multipart_upload", Bucket=bucket, Key=key, **self._object)["UploadId"]  # type: ignore[no-any-return]

    def part(self, bucket: str, key: str, upload: str, number: int, data: bytes, md5: str) -> str:
        """Send one part, from 1; its ETag."""
        named = {"Bucket": bucket, "Key": key, "UploadId": upload, "PartNumber": number}
        return self._call("upload_part", **named, Body=data, ContentMD5=md5, **self._object)["ETag"]  # type: ignore[no-any-return]

    def complete(self, bucket: str, key: str, upload: str, etags: list[str]) -> str:
        """Make the object of its parts' ETags, in order; its own."""
        parts = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]}
        named = {"Bucket": bucket, "Key": key, "UploadId": upload, "MultipartUpload": parts}
        etag = self._call("complete_multipart_upload", **named, **self._object).get("ETag")
        if not etag:  # botocore takes a cut answer for a good one
            raise S3Failure("cut", "the answer to the end of the upload was cut")
        return str(etag)

    def abort(self, bucket: str, key: str, upload: str) -> None:
        """Drop an upload and its parts."""
        self._call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload, **self._payer)

    def page(self, bucket: str, prefix: str, size: int, place: dict[str, str]) -> tuple[list[S3Object], dict[str, str]]:
        """One page of a listing and the place of the next one, empty after the last."""
        asked = {"Bucket": bucket, "Prefix": prefix, "MaxKeys": size, "EncodingType": "url"}
        try:
            answer = self._call("list_objects_v2", **asked, **place, **self._payer)
        except ElementTree.ParseError as error:
            raise S3Failure("server", f"the store sent a listing that is not XML ({error})") from error
        rows, truncated, token = page_of(answer)
        objects = [S3Object(bucket, *row) for row in rows]
        if not truncated:
            return objects, {}
        if token:
            return objects, {"ContinuationToken": token}
        if not objects:
            raise S3Failure("refused", "the store says that the listing goes on but not where")
        return objects, {"StartAfter": objects[-1].key}

    def _call(self, method: str, **asked: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client
        try:
            return getattr(client, method)(**asked)
        except (BotoCoreError, ClientError, OSError) as error:
            failure = failure_of_boto(error)
            if failure.kind == "expired" and self._renew is None:
                failure.kind = "denied"  # a client or keys that the user passed: there are no others
            elif failure.kind == "expired":
                self.renew(client)
            raise failure from error

    def renew(self, used: Any) -> None:
        """Put a client with credentials asked for anew in place of `used`, unless another thread did."""
        if self._renew is not None:
            self._renew(self, used)


class _BotoBody:
    def __init__(self, answer: Any) -> None:
        self._body = answer["Body"]
        self.etag: str | None = quoted(answer.get("ETag"))
        self.version: str | None = answer.get("VersionId")
        told = answer.get("ResponseMetadata", {})
        self._check(told.get("HTTPStatusCode", 200), answer.get("ContentType", ""))
        length, span = answer.get("ContentLength"), answer.get("ContentRange", "")
        # By the header and not by status 206: some stores send a part with status 200.
        place, _, total = span.removeprefix("bytes").strip().partition("/")
        try:
            self.start = int(place.partition("-")[0]) if span else 0
            self.size = int(total) if span else int(length)
            if self.size < 0:
                raise ValueError(self.size)
        except (TypeError, ValueError) as error:
            self._body.close()
            raise S3Failure("refused", f"no usable length (Content-Length {length}, Content-Range {span!r})") from error
        headers = {} if span else told.get("HTTPHeaders", {})
        self.checksum = checksum_of_headers(headers)
        if not self.size:
            self.read(1)  # gives the connection back

    def _check(self, status: int, kind: str) -> None:
        """Refuse what is no object; S3 gives every object an ETag."""
        if status in (200, 206) and (self.etag or kind.partition(";")[0].lower() not in _PAGES):
            return
        self._body.close()
        what = f"the answer is no object{'' if self.etag else f' (type {kind or None}, no ETag)'}"
        raise S3Failure("refused", f"{what}; is endpoint_url that of an S3 store, and no proxy between?", status=status)

    def read(self, limit: int, buffers: Buffers | None = None) -> bytes | memoryview:
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        try:
            received = None if buffers is None or limit < buffers.size else buffers.receive(self._body)
            return self._body.read(limit) if received is None else received
        except (BotoCoreError, HTTPError, HTTPException, OSError) as error:
            raise failure_of_boto(error) from error

    def close(self) -> None:
        self._body.close()


def failure_of_boto(error: Exception) -> S3Failure:
    """What an exception of botocore (or below it) means."""
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        meta: Any = error.response.get("ResponseMetadata", {})
        told: Any = error.response.get("Error", {})
        headers = meta.get("HTTPHeaders", {})
        failure = failure_of_answer(
            int(meta.get("HTTPStatusCode") or 0),
            str(told.get("Code", "")),
            str(told.get("Message", "")),
            str(meta.get("RequestId") or headers.get("x-amz-request-id") or told.get("RequestId") or ""),
            retry_after_seconds(headers.get("retry-after")),
        )
        if failure.code == "RequestTimeTooSkewed":
            failure.what += _skew(headers.get("date"))
        return failure
    if isinstance(error, (boto.ReadTimeoutError, boto.ConnectTimeoutError, TimeoutError)):
        return S3Failure("timeout", "the store did not answer in time")
    if isinstance(error, boto.SSLError):
        advice = "verify= or AWS_CA_BUNDLE takes the path of a CA bundle"
        return S3Failure("refused", f"no trusted TLS connection ({error}); {advice}")
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)):
        return S3Failure("denied", f"no usable credentials ({error})")
    if isinstance(error, (boto.ResponseStreamingError, boto.IncompleteReadError)):
        return S3Failure("cut", "the connection broke")
    if isinstance(error, (boto.ConnectionError, boto.HTTPClientError, OSError)):
        return S3Failure("connection", f"the store cannot be reached ({error})")
    if isinstance(error, (boto.TokenRetrievalError, boto.SSOError)):
        return S3Failure("denied", f"no usable credentials ({error})")
    if isinstance(error, boto.BotoCoreError):
        return S3Failure("refused", str(error))
    return S3Failure("cut", f"the connection broke ({type(error).__name__})")


def _skew(date: str | None) -> str:
    """How far this machine's clock is from that of the store, which sent `date`."""
    try:
        ahead = time.time() - parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return ""
    return f"; this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the store's"


def _ask_for_checksum(params: dict[str, Any], **_: Any) -> None:
    """Not by botocore's parameter, which would have it check the body as well, where it can, and then say it cut."""
    if "Range" not in params["headers"]:
        params["headers"]["x-amz-checksum-mode"] = "ENABLED"
