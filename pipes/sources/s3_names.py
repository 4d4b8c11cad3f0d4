"""Names of objects in an S3 store: `s3://bucket/key`, taken literally.

A key is any string of at most 1024 UTF-8 bytes. Nothing in it is special here: `?`, `#`, `%`, `//` and a trailing `/`
are part of the name, and composed and decomposed accents are two names. In place of the bucket may stand the ARN of an
access point, as the AWS command line has it: `s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/name/key`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, NamedTuple

__all__ = ["S3Object", "S3Url", "quoted", "split_s3_url"]

_SCHEME = "s3://"
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html, "Resource types".
_ACCESS_POINT = re.compile(r"(arn:[^/]*:(?:outpost[:/][^:/]+[:/])?accesspoint[:/][^:/]+)(?:/|$)")


class S3Url(str):
    """An `s3://bucket/key` string that also carries the `size` (bytes) and `etag` its listing showed.

    It compares, hashes and prints as the plain string.

    >>> url = S3Url("s3://bkt/a.tar", size=10, etag='"t1"')
    >>> url == "s3://bkt/a.tar", url.size, url.etag
    (True, 10, '"t1"')
    """

    __slots__ = ("etag", "size")
    size: int | None
    etag: str | None

    def __new__(cls, url: str, size: int | None = None, etag: str | None = None) -> S3Url:
        self = super().__new__(cls, url)
        self.size, self.etag = size, quoted(etag)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Url, (str(self), self.size, self.etag)

    def __deepcopy__(self, memo: Any) -> S3Url:
        return self


def quoted(etag: str | None) -> str | None:
    """The tag with its quotes (RFC 9110, 8.8.3), which some stores leave out in listings and others in answers.

    >>> quoted("t1"), quoted('"t1"'), quoted('W/"t1"')
    ('"t1"', '"t1"', 'W/"t1"')
    """
    return f'"{etag}"' if etag and not etag.endswith('"') else etag


class S3Object(NamedTuple):
    """One row of a listing; `size` in bytes, `etag` with its quotes."""

    bucket: str
    key: str
    size: int
    etag: str | None
    last_modified: datetime | None

    @property
    def url(self) -> S3Url:
        """The name to open this object by, with size and ETag attached."""
        return S3Url(f"{_SCHEME}{self.bucket}/{self.key}", self.size, self.etag)


def split_s3_url(url: str, *, prefix: bool = False) -> tuple[str, str]:
    """Split `s3://bucket/key` into bucket and key; with `prefix` the key may be empty.

    >>> split_s3_url("s3://bkt/in//a?b#c.txt")
    ('bkt', 'in//a?b#c.txt')

    Raises ValueError that names the string when the scheme, the bucket or the key is missing.
    """
    if not isinstance(url, str):
        raise TypeError(f"an S3 name is a string like 's3://bucket/key', not {type(url).__name__}: {url!r}")
    if not url.startswith(_SCHEME):
        raise ValueError(f"{url!r} is not an S3 name: it should look like 's3://bucket/key'")
    bucket, _, key = url[len(_SCHEME) :].partition("/")
    if point := _ACCESS_POINT.match(url, len(_SCHEME)):
        bucket, key = point[1], url[point.end() :]
    if not bucket:
        raise ValueError(f"{url!r} names no bucket: it should look like 's3://bucket/key'")
    if not key and not prefix:
        raise ValueError(f"{url!r} names a bucket and no object: add a key, or list it")
    return bucket, key
