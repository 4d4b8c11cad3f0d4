"""Settings of an S3 store: what to reach, as whom, and how patiently."""

from __future__ import annotations

import os
from base64 import b64decode
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from pipes.arguments import whole_or_none

__all__ = ["S3Options"]

_CLIENTS = ("auto", "obstore", "boto3")
_SECRETS = ("access_key", "secret_key", "session_token", "sse_customer_key")
_ATTEMPTS = 5
# What `verify` would be of, were it about objects.
_CHECKSUMS = ("checksum", "crc", "crc32", "crc32c", "crc64", "crc64nvme", "etag", "md5", "sha1", "sha256")
_NO = ("0", "false", "no", "off")


@dataclass(frozen=True, repr=False)
class S3Options:
    """Settings of an S3 store; plain data that pickles. What is left out comes from boto3's usual places.

    >>> S3Options(endpoint_url="http://127.0.0.1:9000", access_key="me", secret_key="hush")
    S3Options(endpoint_url='http://127.0.0.1:9000', access_key='***', secret_key='***')

    Times are in seconds. `deadline` bounds one opening, listing page or resumption with all its attempts; the attempt
    in flight when it passes may still run into its own timeout, so the defaults give up within 30 seconds.
    Raises ValueError for a setting that makes no sense.
    """

    endpoint_url: str | None = None
    """`http(s)://host[:port]`; else AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, S3_ENDPOINT_URL, then the profile's."""
    region: str | None = None
    """Else AWS_REGION, AWS_DEFAULT_REGION, then the profile's, then us-east-1."""
    profile: str | None = None
    """A section of the AWS configuration files; else AWS_PROFILE."""
    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None
    unsigned: bool = False
    """Send requests without a signature, for public buckets."""
    requester_pays: bool = False
    sse_customer_key: str | bytes | None = None
    """Of objects encrypted with a key of yours (SSE-C): 32 bytes, or their base64. Listing needs none. boto3 only."""
    checksum: bool = False
    """Check whole objects against the checksum that the store keeps, where it keeps one. boto3 only."""
    path_style: bool | None = None
    """`host/bucket/key` in place of `bucket.host/key`; by default for endpoints other than Amazon's own."""
    client: Any = "auto"
    """`"auto"`, `"obstore"`, `"boto3"`, or a boto3 S3 client of your own, which is then used as it is."""
    verify: bool | str = True
    """Check certificates: True, False, or the path of a CA bundle; else AWS_CA_BUNDLE."""
    attempts: int | None = None
    """Requests made for one object or page before giving up; else AWS_MAX_ATTEMPTS, then 5."""
    backoff: float = 0.1
    """The n-th wait is drawn from 0 to `backoff * 2**(n - 1)`, at most 5."""
    deadline: float = 20.0
    connect_timeout: float = 5.0
    read_timeout: float = 10.0
    """Longest silence of the store, before an answer or within one."""

    def __post_init__(self) -> None:
        if isinstance(self.client, str) and self.client not in _CLIENTS:
            raise ValueError(f"client={self.client!r}: choose one of {', '.join(_CLIENTS)}, or pass a boto3 client")
        if self.endpoint_url is not None and urlsplit(self.endpoint_url).scheme not in ("http", "https"):
            raise ValueError(
                f"endpoint_url={_without_password(self.endpoint_url)!r} should begin with http:// or https://"
            )
        if (self.access_key is None) != (self.secret_key is None):
            raise ValueError("access_key and secret_key go together: give both or neither")
        if self.session_token is not None and self.access_key is None:
            raise ValueError("session_token needs access_key and secret_key")
        if str(self.verify).lower() in _CHECKSUMS:
            raise ValueError(
                f"verify={self.verify!r}: verify is about certificates: True, False or the path of a CA bundle. "
                "checksum=True checks objects against the checksum that the store keeps"
            )
        if self.sse_customer_key is not None:
            self._check_customer_key()
        if self.client == "obstore" and self.boto3_only:
            name = "checksum" if self.checksum else "sse_customer_key"
            raise ValueError(f'{name} goes with client="boto3" or "auto", which then reads through boto3')
        object.__setattr__(self, "attempts", whole_or_none("attempts", self.attempts))
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"attempts={self.attempts}: at least one request has to be made")
        for name in ("backoff", "deadline", "connect_timeout", "read_timeout"):
            if not getattr(self, name) >= 0 or (name != "backoff" and getattr(self, name) == 0):
                raise ValueError(f"{name}={getattr(self, name)!r}: a positive number of seconds is needed")

    def _check_customer_key(self) -> None:
        try:
            length = len(self.customer_key or b"")
        except ValueError:
            length = -1
        if length != 32:
            raise ValueError("sse_customer_key is not 32 bytes, or the base64 of 32 bytes, which AES-256 needs")

    def __repr__(self) -> str:
        shown = []
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value == setting.default:
                continue
            if setting.name in _SECRETS:
                value = "***"
            elif setting.name == "endpoint_url":
                value = _without_password(value)
            elif setting.name == "client" and not isinstance(value, str):
                value = "<boto3 client>"
            shown.append(f"{setting.name}={value!r}")
        return f"S3Options({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        if self.own_client is not None:
            raise TypeError(
                "S3 options with a boto3 client of yours cannot travel to another process: describe the client by "
                "settings (endpoint_url=, region=, profile=, ...) and each process makes its own"
            )
        return dict(self.__dict__)

    def __deepcopy__(self, memo: Any) -> S3Options:
        return self

    @property
    def own_client(self) -> Any | None:
        """The boto3 client that the user passed, if any."""
        return None if isinstance(self.client, str) else self.client

    @property
    def customer_key(self) -> bytes | None:
        """The key of SSE-C, as bytes."""
        key = self.sse_customer_key
        return b64decode(key, validate=True) if isinstance(key, str) else key

    @property
    def boto3_only(self) -> bool:
        """Whether these settings need what only boto3 does."""
        return self.checksum or self.sse_customer_key is not None

    def resolved_endpoint(self) -> str | None:
        """The endpoint to give boto3; None leaves the choice to it (AWS_ENDPOINT_URL, profile, Amazon)."""
        if self.endpoint_url:
            return self.endpoint_url
        legacy = os.environ.get("S3_ENDPOINT_URL")
        if not legacy or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            return None
        if "://" in legacy:
            return legacy
        return f"{'http' if _switched_off('S3_USE_HTTPS') else 'https'}://{legacy}"

    def resolved_region(self) -> str | None:
        """The region to give boto3; None leaves the choice to it (AWS_DEFAULT_REGION, profile)."""
        return self.region or os.environ.get("AWS_REGION") or None

    def resolved_attempts(self) -> int:
        """The requests to make before giving up; raises ValueError for an AWS_MAX_ATTEMPTS that is no count."""
        if self.attempts is not None:
            return self.attempts
        text = os.environ.get("AWS_MAX_ATTEMPTS") or str(_ATTEMPTS)
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"AWS_MAX_ATTEMPTS={text!r}: a number of requests, at least 1, is needed")
        return int(text)

    def resolved_verify(self) -> bool | str | None:
        """What to give boto3 as `verify`; None leaves the choice to it (AWS_CA_BUNDLE, its own bundle)."""
        if self.verify is True:
            return False if _switched_off("S3_VERIFY_SSL") else None
        return self.verify


def _switched_off(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in _NO


def _without_password(url: str) -> str:
    head, separator, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://***@{tail}" if separator and "://" in head else url
