"""Reading over HTTP from a server that misbehaves: a stream is whole or an error."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import socket
import sys
import threading
import zipfile
from typing import Any

import pytest
from fault_server import FaultServer, Request, Step

from pipes.config import dump_graph
from pipes.errors import (
    ChangedDataError,
    ConfigError,
    StoreConnectionError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTimeoutError,
    mask,
)
from pipes.iter import HttpReader, IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService

BODY = bytes(range(256)) * 4000
DATE = {"ETag": "", "Last-Modified": "Mon, 07 Dec 2026 10:00:00 GMT"}
BARE = {"ETag": "", "Last-Modified": ""}


@pytest.fixture
def server(shared_server: FaultServer) -> FaultServer:
    shared_server.reset({"a": BODY, "b": b"", "c": b"see"})
    return shared_server


def url(server: FaultServer, key: str) -> str:
    return f"{server.url}/bkt/{key}"


def opened(server: FaultServer, key: str = "a", **settings: Any) -> Any:
    [(_, stream)] = HttpReader([url(server, key)], **settings)
    return stream


def read(element: tuple[str, Any]) -> tuple[str, bytes]:
    return element[0].rpartition("/")[2], element[1].read()


def ranges(requests: list[Request]) -> list[str | None]:
    return [request.headers.get("Range") for request in requests]


def test_whole_bodies_in_order_over_one_connection(server: FaultServer, no_residue: None) -> None:
    names = IterableWrapper([url(server, key) for key in "abca"])
    assert list(names.read_from_http().map(read)) == [("a", BODY), ("b", b""), ("c", b"see"), ("a", BODY)]
    assert len({request.port for request in server.requests}) == 1
    assert {request.headers["Accept-Encoding"] for request in server.requests} == {"identity"}
    stream = opened(server)
    parts = []
    while part := stream.read(1000):
        parts.append(part)
    assert b"".join(parts) == BODY
    assert len(names.read_from_http()) == 4


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("headers", [{}, DATE])
@pytest.mark.parametrize("ignore", [False, True])
def test_a_cut_body_is_resumed_at_its_byte(
    server: FaultServer, reset: bool, headers: dict[str, str], ignore: bool
) -> None:
    server.script("a", Step(cut=300_000, reset=reset, headers=headers), Step(headers=headers, ignore_range=ignore))
    assert opened(server).read() == BODY
    first, second = server.seen("a")
    assert "Range" not in first.headers
    start = int(second.headers["Range"].removeprefix("bytes=").removesuffix("-"))
    assert start == 300_000 or reset
    assert 0 < start <= 300_000
    assert second.headers["If-Range"] == (DATE["Last-Modified"] if headers else server.etag("a"))
    assert second.headers.get("If-Match") == (None if headers else server.etag("a"))


def test_a_body_with_nothing_to_hold_on_to(server: FaultServer) -> None:
    server.script("a", Step(cut=0, headers=BARE), Step(cut=300_000, headers=BARE), Step())
    stream = opened(server)
    with pytest.raises(StoreConnectionError, match=rf"a: .* after \d+ of {len(BODY)} bytes .*cannot be continued"):
        stream.read()
    assert ranges(server.seen("a")) == [None, None]
    server.reset({"a": BODY})
    weak = {"ETag": 'W/"x"', "Last-Modified": ""}
    server.script("a", Step(cut=300_000, headers=weak, forever=True))
    with pytest.raises(StoreConnectionError, match="cannot be continued"):
        opened(server).read()


@pytest.mark.parametrize("match", [False, True])
@pytest.mark.parametrize("ignore", [False, True])
def test_a_body_replaced_while_it_is_read(server: FaultServer, match: bool, ignore: bool) -> None:
    server.script("a", Step(cut=300_000), Step(body=b"new" + BODY[3:], ignore_range=ignore, ignore_match=match))
    before = server.etag("a")
    with pytest.raises(ChangedDataError, match="it was replaced: it had ETag") as caught:
        opened(server).read()
    assert before in str(caught.value)
    assert not match or server.etag("a") in str(caught.value)
    server.reset({"a": BODY})
    server.script("a", Step(cut=300_000, headers=DATE), Step(headers={**DATE, "Last-Modified": "another day"}))
    with pytest.raises(ChangedDataError, match=r"Last-Modified Mon, 07 Dec .* has Last-Modified another day now"):
        opened(server).read()
    server.reset({"a": BODY})
    server.script("a", Step(cut=300_000), Step(body=BODY[:-1], etag=before))
    with pytest.raises(ChangedDataError, match=rf"it had {len(BODY)} bytes and has {len(BODY) - 1} bytes"):
        opened(server).read()


@pytest.mark.parametrize(
    ("status", "kind", "asked"),
    [(404, StoreNotFoundError, 1), (401, StorePermissionError, 1), (403, StorePermissionError, 1),
     (410, StoreError, 1), (204, StoreError, 1), (429, StoreConnectionError, 2), (503, StoreConnectionError, 2),
     (500, StoreConnectionError, 2)],
)  # fmt: skip
def test_statuses(server: FaultServer, status: int, kind: type[StoreError], asked: int) -> None:
    server.script("a", Step(status=status, forever=True))
    with pytest.raises(kind, match=rf"/bkt/a: .*\(status {status}\)") as caught:
        opened(server, attempts=2)
    assert caught.value.status == status
    assert caught.value.attempts == asked == len(server.requests)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_what_passes_is_tried_again(server: FaultServer) -> None:
    server.script("c", Step(status=503, headers={"Retry-After": "0.3"}), Step(lost=True), Step(status=429))
    assert opened(server, "c").read() == b"see"
    times = [request.time for request in server.requests]
    assert len(times) == 4
    assert times[1] - times[0] >= 0.3
    server.script("c", Step(status=503, headers={"Retry-After": "600"}))
    with pytest.raises(StoreConnectionError, match="asks to wait 600 s, beyond the deadline of 20 s"):
        opened(server, "c")


def test_silence_is_a_timeout(server: FaultServer) -> None:
    server.script("c", Step(stall=1.0))
    with pytest.raises(StoreTimeoutError, match=r"did not answer in time.* timeout="):
        opened(server, "c", timeout=0.1, attempts=1)
    server.script("a", Step(cut=300_000, stall=1.0))
    assert opened(server, timeout=[1.0, 0.1]).read() == BODY
    assert len(server.seen("a")) == 2


def test_nobody_listens_and_no_such_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        StoreConnectionError, match=r"refused; gave up after 2 attempts\. Check the URL and the network"
    ):
        list(HttpReader([f"http://127.0.0.1:{port}/a"], attempts=2))
    with pytest.raises(ValueError, match="'s3://b/k' is no URL of http"):
        list(HttpReader(["s3://b/k"]))
    with pytest.raises(ValueError, match="http://"):
        list(HttpReader(["http://"]))
    with pytest.raises(TypeError, match="a URL must be str, not int"):
        list(HttpReader([1]))


def test_secrets_in_urls_headers_and_auth_never_show(server: FaultServer) -> None:
    secret = "h1dden"
    for query in (f"X-Amz-Signature={secret}", f"x=1&sig={secret}", f"Signature={secret}&x=1", f"key={secret}"):
        with pytest.raises(StoreNotFoundError) as caught:
            opened(server, f"none?{query}")
        assert secret not in "".join([str(caught.value), *caught.value.__notes__])
        server.script("c", Step(lost=True))
        with pytest.raises(StoreConnectionError) as failed:
            opened(server, f"c?{query}", attempts=1)
        assert secret not in str(failed.value)
    pipe = HttpReader(["http://h/a"], auth=("me", secret), headers={"Authorization": f"Bearer {secret}"})
    assert secret not in repr(pipe) + str(pipe)
    with pytest.raises(ConfigError, match="credential"):
        dump_graph(pipe)
    assert mask("http://h/a?design=1&monkey=2") == "http://h/a?design=1&monkey=2"


def test_settings_reach_requests_and_travel(server: FaultServer, no_residue: None) -> None:
    pipe = IterableWrapper([url(server, "c")]).read_from_http(
        headers={"X-Own": "1"}, auth=["me", "pw"], params={"q": "z"}
    )
    for made in (pipe, pickle.loads(pickle.dumps(pipe))):
        assert list(made.map(read)) == [("c", b"see")]
        assert server.requests[-1].headers["X-Own"] == "1"
        assert server.requests[-1].headers["Authorization"].startswith("Basic ")
        assert server.requests[-1].query == {"q": "z"}
    with pytest.raises(TypeError, match="takes no headrs; of requests it takes"):
        HttpReader([], headrs={})
    with pytest.raises(ValueError, match="Range header"):
        HttpReader([], headers={"range": "bytes=0-1"})
    with pytest.raises(ValueError, match="not both"):
        HttpReader([], skip_on_error=True, on_error=lambda error, url: None)
    with pytest.raises(ValueError, match="attempts=0"):
        HttpReader([], attempts=0)


def test_redirects_are_followed(server: FaultServer) -> None:
    server.script("c", Step(status=302, headers={"Location": url(server, "a")}))
    assert opened(server, "c").read() == BODY
    server.script("c", Step(status=302, headers={"Location": url(server, "c")}, forever=True))
    with pytest.raises(StoreError, match="redirects without end"):
        opened(server, "c")
    with pytest.raises(StoreError, match="status 302"):
        opened(server, "c", allow_redirects=False)


def test_an_encoded_body_is_decoded_and_whole(server: FaultServer) -> None:
    packed = gzip.compress(os.urandom(400_000))
    server.reset({"a": packed})
    headers = {"Content-Encoding": "gzip"}
    server.script("a", Step(headers=headers))
    stream = opened(server)
    assert stream.read() == gzip.decompress(packed)
    assert not stream.seekable()
    server.script("a", Step(headers=headers, cut=300_000), Step(headers=headers))
    stream = opened(server)
    assert stream.read(1000) == gzip.decompress(packed)[:1000]
    with pytest.raises(StoreConnectionError, match="cannot be continued, because the server encodes the body"):
        stream.read()
    server.script("a", Step(headers=headers, cut=0), Step(headers=headers))
    assert opened(server).read() == gzip.decompress(packed)


@pytest.mark.parametrize("whole", [True, False])
def test_chunked_bodies(whole: bool) -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\nyou\r\n" + b"0\r\n\r\n" * whole
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        [(_, stream)] = HttpReader([f"http://127.0.0.1:{listening.getsockname()[1]}/a"], attempts=1)
        if whole:
            assert stream.read() == b"helloyou"
        else:
            with pytest.raises(
                StoreConnectionError, match="it ended early after 8 of an unknown number of bytes were received"
            ):
                stream.read()
        thread.join()


def test_streams_seek_where_the_server_takes_ranges(server: FaultServer) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("big", bytes(3_000_000))
        archive.writestr("x.txt", "in a zip")
    server.reset({"a": packed.getvalue()})
    stream = opened(server)
    with zipfile.ZipFile(stream) as archive:
        assert archive.read("x.txt") == b"in a zip"
    assert len(server.seen("a")) > 1
    assert stream.seek(0, io.SEEK_END) == len(packed.getvalue())
    assert stream.read() == b""
    assert stream.seek(3) == 3
    assert stream.read(20) == packed.getvalue()[3:23]
    server.script("a", Step(headers={"Accept-Ranges": "none"}))
    assert not opened(server).seekable()


def test_what_cannot_be_opened_is_skipped_and_counted(server: FaultServer) -> None:
    names = [url(server, key) for key in ("none", "c", "nothing")]
    assert list(HttpReader(names, skip_on_error=True).map(read)) == [("c", b"see")]
    assert list(HttpReader(names, on_error="skip", max_errors=2).map(read)) == [("c", b"see")]
    with pytest.raises(StoreNotFoundError, match=r"none: .*Check the URL\."):
        list(HttpReader(names))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_stream_and_a_session_go_on_in_a_forked_child(server: FaultServer) -> None:
    elements = iter(HttpReader([url(server, "a"), url(server, "c")]))
    stream = next(elements)[1]
    begun = stream.read(10)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sending, b"%d %s" % (stream.read() == BODY[10:], next(elements)[1].read()))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as answers:
        assert answers.read() == b"1 see"
    assert begun + stream.read() == BODY
    assert next(elements)[1].read() == b"see"
    ports = [request.port for request in server.requests]
    assert len(set(ports[:2])) == 2


def test_workers_read_and_a_state_resumes(server: FaultServer, no_residue: None) -> None:
    server.reset({f"{number}": b"%d" % number for number in range(6)})
    names = IterableWrapper([url(server, str(number)) for number in range(6)]).sharding_filter()
    loader = DataLoader2(names.read_from_http().map(read), reading_service=MultiProcessingReadingService(2))
    with loader:
        assert list(loader) == [(str(number), b"%d" % number) for number in range(6)]


def test_without_requests_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "pipes\[http\]"'):
        HttpReader([])
    assert "requests" in sys.modules
