"""Pages of an S3 listing out of the store's XML, taken out of botocore's hands.

It builds two trees and 70 us of objects a key; this needs 4 us. And it takes whatever answers with status 200 for a
listing without keys: the page of a web server, an empty answer. Here only a ListBucketResult is one.
"""

from __future__ import annotations

import re
from datetime import datetime
from html import unescape
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from pipes.sources.s3_names import quoted
from pipes.sources.s3_retry import S3Failure

__all__ = ["Page", "Row", "page_of", "read_pages_ourselves"]

Row = tuple[str, int, str | None, datetime | None]
Page = tuple[list[Row], bool, str | None]
"""Keys with size, ETag and time; whether more follow, and the token to ask for them."""

_PAGE = "PipesPage"
_FIELDS = ("Key", "Size", "ETag", "LastModified")
_ROOT = "ListBucketResult"
# What botocore finds in a listing, if only one of them.
_PARSED = ("Contents", "IsTruncated", "KeyCount", "MaxKeys", "Name", "Prefix")


def read_pages_ourselves(client: Any) -> None:
    """Have the pages that this boto3 client lists come out of `page_of` without botocore's parser."""
    from botocore import handlers

    events = client.meta.events
    # It looks for an error inside a good answer, in the whole tree of every page. A botocore without it is as well.
    check = getattr(handlers, "_handle_200_error", None)
    if check is not None:
        events.unregister("before-parse.s3.*", check)

    def read(
        operation_model: Any, response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **more: Any
    ) -> None:
        body = response_dict["body"]
        good = response_dict["status_code"] == 200 and isinstance(body, bytes)
        if good and operation_model.name == "ListObjectsV2" and b"<Error" not in body[:200]:
            customized_response_dict[_PAGE] = _read(body)
            response_dict["body"] = b"<ListBucketResult/>"
        elif check is not None:
            check(
                operation_model=operation_model,
                response_dict=response_dict,
                customized_response_dict=customized_response_dict,
                **more,
            )

    events.register_first("before-parse.s3.*", read)


def page_of(answer: Any) -> Page:
    """The page that an answer to ListObjectsV2 holds.

    Raises:
        S3Failure: it holds none.
    """
    page = answer.get(_PAGE)
    if page is None:
        if not any(name in answer for name in _PARSED):
            raise _no_page("")
        return _plain_page(answer)
    if isinstance(page, S3Failure):
        raise page
    return page  # type: ignore[no-any-return]


def _read(body: bytes) -> Page | S3Failure:
    try:
        return (_scan(body.decode()) if b"<ListBucketResult" in body[:200] else None) or _parse(body)
    except ElementTree.ParseError as error:
        if b"<ListBucketResult" not in body[:200]:
            return _no_page(f", it begins with {body[:60]!r}")
        return S3Failure("server", f"the store sent a listing that is not XML ({error})")
    except (ValueError, KeyError) as error:
        return S3Failure("server", f"the store sent a listing that cannot be read ({type(error).__name__}: {error})")
    except S3Failure as failure:
        return failure


def _no_page(found: str) -> S3Failure:
    return S3Failure("server", f"the answer is no listing{found}; is endpoint_url that of an S3 store?", status=200)


def _scan(text: str) -> Page | None:
    """Read a page without building its tree; None when it is not of the plain form that this relies on."""
    count = text.count("<Contents>")
    keys, sizes, etags, times = (re.findall(f"<{tag}>([^<]*)</{tag}>", text) for tag in _FIELDS)
    encoding = re.findall(r"<EncodingType>url</EncodingType>", text)
    if not text.rstrip().endswith("</ListBucketResult>") or not encoding:
        return None
    if not count == len(keys) == len(sizes) == len(etags) == len(times):
        return None
    rows: list[Row] = [
        (_plain_key(key), int(size), _plain_etag(etag), _time(time))
        for key, size, etag, time in zip(keys, sizes, etags, times, strict=True)
    ]
    token = re.search(r"<NextContinuationToken>([^<]*)</NextContinuationToken>", text)
    return rows, "<IsTruncated>true</IsTruncated>" in text, unescape(token[1]) if token else None


def _plain_key(key: str) -> str:
    return unquote_plus(key) if "%" in key or "+" in key else key


def _plain_etag(etag: str) -> str | None:
    # Quotes are all that a tag has to escape, and `unescape` takes ten times as long.
    plain = etag.replace("&quot;", '"')
    return quoted(unescape(etag) if "&" in plain else plain)


def _parse(body: bytes) -> Page:
    root = ElementTree.fromstring(body)
    space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    if root.tag.removeprefix(space) != _ROOT:
        raise _no_page(f" but a {root.tag.removeprefix(space)}")
    encoded = root.findtext(space + "EncodingType") == "url"
    rows: list[Row] = []
    for entry in root.iterfind(space + "Contents"):
        text = {child.tag.removeprefix(space): child.text for child in entry}
        key = text["Key"] or ""
        time = _time(text.get("LastModified"))
        rows.append((unquote_plus(key) if encoded else key, int(text["Size"] or 0), quoted(text.get("ETag")), time))
    more = root.findtext(space + "IsTruncated") == "true"
    return rows, more, root.findtext(space + "NextContinuationToken")


def _time(text: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None


def _plain_page(answer: Any) -> Page:
    """A page as botocore parsed it, for clients that are not ours."""
    encoded = answer.get("EncodingType") == "url"
    rows: list[Row] = [
        (
            unquote_plus(entry["Key"]) if encoded else entry["Key"],
            entry["Size"],
            quoted(entry.get("ETag")),
            entry.get("LastModified"),
        )
        for entry in answer.get("Contents", ())
    ]
    return rows, answer.get("IsTruncated", False), answer.get("NextContinuationToken")
