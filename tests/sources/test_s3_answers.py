"""Answers with a good status that are none of a store: pages of a web server or a portal, listings in circles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fault_server import LIST, FaultServer, Step

from pipes.errors import StoreConnectionError, StoreError
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options
from pipes.sources.s3_pages import page_of
from pipes.sources.s3_retry import S3Failure

CLIENTS = ("boto3", "obstore")
HTML = b"<html><head/><body>Please log in</body></html>"
PAGE = (
    b"<ListBucketResult><IsTruncated>false</IsTruncated><EncodingType>url</EncodingType><Contents><Key>a</Key>"
    b"<LastModified>2026-12-07T10:00:00.000Z</LastModified><ETag>t</ETag><Size>3</Size></Contents></ListBucketResult>"
)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer({"a": b"abc", "b": b"b"}) as server:
        yield server


def store_on(server: FaultServer, client: Any = "auto") -> S3Store:
    return S3Store(S3Options(endpoint_url=server.url, unsigned=True, client=client, attempts=2, backoff=0.01))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (HTML, "the answer is no listing but a html; is endpoint_url"),
        (b"<!doctype html><title>Console<meta>", "no listing, it begins with b'<!doctype html>"),
        (b"", "no listing, it begins with b''"),
        (b"<ListAllMyBucketsResult/>", "no listing but a ListAllMyBucketsResult"),
        (PAGE.replace(b"<Size>3", b"<Size>x"), "a listing that cannot be read .ValueError"),
        (PAGE.replace(b"<Key>a</Key>", b""), "a listing that cannot be read .KeyError"),
        (PAGE.replace(b"<Key>a", b"<Key>\xff"), "a listing that cannot be read .UnicodeDecodeError"),
        (b"<Error><Code>InternalError</Code></Error>", "the store failed .status 500, InternalError"),
    ],
)
def test_only_a_listing_is_one(server: FaultServer, answer: bytes, said: str) -> None:
    server.reset({})
    server.script(LIST, Step(instead=answer, forever=True))
    with pytest.raises(StoreConnectionError, match=said) as caught:
        list(store_on(server).list("s3://bkt/"))
    assert (caught.value.attempts, len(str(caught.value)) < 400) == (2, True)


def test_the_listing_of_a_client_of_the_users() -> None:
    with pytest.raises(S3Failure, match="the answer is no listing; is endpoint_url"):
        page_of({"ResponseMetadata": {"HTTPStatusCode": 200}})
    assert page_of({"IsTruncated": False, "Name": "bkt"}) == ([], False, None)
    assert page_of({"Contents": [{"Key": "a", "Size": 1, "ETag": "t"}]}) == ([("a", 1, '"t"', None)], False, None)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            Step(instead=HTML, headers={"Content-Type": "text/html; charset=utf-8"}),
            "type text/html; .*no ETag.*endpoint",
        ),
        (Step(instead=b"<Error/>", headers={"Content-Type": "application/xml"}), "type application/xml, no ETag"),
        (Step(instead=b"", status=204), "the answer is no object .*status 204"),
        (Step(instead=b"", headers={"Content-Length": "-5"}), "no usable length .Content-Length -5"),
    ],
)
def test_a_page_is_no_object(server: FaultServer, client: str, step: Step, said: str) -> None:
    server.reset({"a": b"abc"})
    server.script("a", step, step)
    with pytest.raises(StoreError, match=said):
        store_on(server, client).get("s3://bkt/a")


@pytest.mark.parametrize("client", CLIENTS)
def test_tags_with_and_without_quotes_are_the_same(server: FaultServer, client: str) -> None:
    server.reset({"a": b"abc"})
    server.etags["a"] = '"t"'
    server.script(LIST, Step(instead=PAGE))
    store = store_on(server, client)
    (item,) = store.list("s3://bkt/")
    assert (item.etag, item.url.etag) == ('"t"', '"t"')
    assert store.get(item.url) == store.get("s3://bkt/a", etag="t") == b"abc"
    headers = [{name.lower(): value for name, value in request.headers.items()} for request in server.seen("a")]
    assert [found["if-match"] for found in headers] == ['"t"', '"t"']


def test_a_listing_that_comes_to_the_same_keys_again(server: FaultServer) -> None:
    server.reset({})
    page = PAGE.replace(b">false<", b">true<")
    told = (b"<NextContinuationToken>%d</NextContinuationToken></ListBucketResult>" % number for number in range(9))
    first, other, again = (page.replace(b"</ListBucketResult>", next(told)) for _ in range(3))
    server.script(LIST, Step(instead=first), Step(instead=other.replace(b"<Key>a", b"<Key>b")), Step(instead=again))
    found = []
    with pytest.raises(StoreError, match=r"does not go on after .'ContinuationToken': '1'.: it comes to the same keys"):
        found.extend(item.key for item in store_on(server).list("s3://bkt/"))
    assert len(server.seen(LIST)) == 3


def test_what_to_do_about_objects_that_are_elsewhere(server: FaultServer) -> None:
    server.reset({"a": b"abc"})
    server.script("a", Step(status=403, code="InvalidObjectState"))
    with pytest.raises(StoreError, match=r"in an archive .as Glacier.: have the store restore it"):
        store_on(server, "boto3").get("s3://bkt/a")
