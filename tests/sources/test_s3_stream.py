"""Streams over a part of an object: only that part is asked for, and the same care is taken of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from fault_server import FaultServer, Request, Step

from pipes.errors import ChangedDataError, StoreConnectionError, StoreNotFoundError
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options
from pipes.sources.s3_stream import S3Stream

BODY = bytes(range(256)) * 4000
clients = pytest.mark.parametrize("client", ["obstore", "boto3"])


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


def part(server: FaultServer, client: str, start: int, stop: int, key: str = "x", **more: Any) -> S3Stream:
    options = S3Options(endpoint_url=server.url, unsigned=True, client=client, attempts=3, backoff=0.01)
    return S3Stream(S3Store(options), "bkt", key, offset=start, stop=stop, **more)


def header(request: Request, name: str) -> str | None:
    return {key.lower(): value for key, value in request.headers.items()}.get(name)


@clients
@pytest.mark.parametrize("size", [len(BODY), None])
@pytest.mark.parametrize(("start", "stop"), [(0, 10), (0, 300_000), (0, len(BODY)), (0, 10**9), (7, 600_000)])
def test_a_part_is_asked_for_and_given(
    server: FaultServer, client: str, size: int | None, start: int, stop: int
) -> None:
    server.reset({"x": BODY})
    with part(server, client, start, stop, size=size) as stream:
        assert (stream.position, stream.size, stream.etag) == (start, len(BODY), server.etag("x"))
        assert stream.read(5) == BODY[start : start + 5]
        assert stream.skip(3) == min(3, stop - start - 5)
        assert stream.read() == BODY[start + 8 : stop]
        assert stream.read() == stream.read1() == stream.peek() == b""
    (request,) = [request for request in server.requests if request.method == "GET"]
    # An object that may be empty has no range at all.
    whole = start == 0 and (size is None or stop >= size)
    assert header(request, "range") == (None if whole else f"bytes={start}-{stop - 1}")


@clients
def test_a_part_that_is_cut_is_resumed_inside_it(server: FaultServer, client: str) -> None:
    server.reset({"x": BODY})
    server.script("x", Step(cut=400_000), Step(cut=50_000))
    with part(server, client, 1000, 900_000, size=len(BODY), etag=server.etag("x")) as stream:
        assert stream.read() == BODY[1000:900_000]
    ranges = [header(request, "range") for request in server.seen("x")]
    assert ranges == ["bytes=1000-899999", "bytes=401000-899999", "bytes=451000-899999"]
    assert {header(request, "if-match") for request in server.seen("x")} == {server.etag("x")}


@clients
@pytest.mark.parametrize("size", [0, None])
def test_the_part_of_an_empty_object(server: FaultServer, client: str, size: int | None) -> None:
    server.reset({"x": b""})
    with part(server, client, 0, 1000, size=size) as stream:
        assert (stream.read(), stream.size) == (b"", 0)
    with pytest.raises(StoreNotFoundError, match="s3://bkt/y"):
        part(server, client, 0, 1000, "y", size=size)


@clients
def test_an_object_that_was_replaced_between_two_parts(server: FaultServer, client: str) -> None:
    server.reset({"x": BODY})
    etag = server.etag("x")
    server.objects["x"] = b"?" + BODY
    with pytest.raises(ChangedDataError, match="the object was replaced"):
        part(server, client, 1000, 2000, size=len(BODY), etag=etag)
    server.etags["x"] = etag
    with pytest.raises(ChangedDataError, match=f"{len(BODY)} bytes before, {len(BODY) + 1} bytes now"):
        part(server, client, 1000, 2000, size=len(BODY), etag=etag)


@clients
def test_a_store_that_ignores_ranges(server: FaultServer, client: str) -> None:
    server.reset({"x": BODY})
    server.script("x", Step(ignore_range=True, forever=True))
    with part(server, client, 100_000, 400_000, size=len(BODY)) as stream:
        assert stream.read() == BODY[100_000:400_000]


def test_waits_go_through_the_function_given(server: FaultServer) -> None:
    server.reset({"x": BODY})
    server.script("x", Step(status=503, headers={"Retry-After": "7"}, forever=True))
    waits: list[float] = []
    with pytest.raises(StoreConnectionError, match="gave up after 3 attempts"):
        part(server, "boto3", 0, 10, wait=waits.append)
    assert waits == [7.0, 7.0]


def test_streams_that_cannot_be_made_close_without_a_word() -> None:
    program = """
import contextlib
from pipes.sources.http_stream import HttpStream
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_ranges import RangedFile
from pipes.sources.s3_stream import S3Stream

for make in (
    lambda: S3Stream(S3Store(), "bkt", "x", offset=-1),
    lambda: RangedFile(S3Store(), "s3://bkt/x", block=0),
    lambda: RangedFile(S3Store(), "no name"),
    lambda: HttpStream("http://[::1", None, {}, None),
):
    with contextlib.suppress(ValueError, AttributeError):
        make()
    print("made")
"""
    # In this mode, and from Python 3.13 on in every one, what `close` raises in a finalizer is shown.
    ended = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("made\n" * 4, "")
