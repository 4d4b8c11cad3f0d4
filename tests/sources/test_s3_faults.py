"""Status codes, cut bodies, replaced objects, silent and absent stores (cases D2 to D4), against a scripted server."""

import functools
import hashlib
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from fault_server import LIST, FaultServer, Step

from pipes.errors import (
    ChangedDataError,
    StoreConnectionError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTimeoutError,
)
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options
from pipes.sources.s3_retry import Attempts, S3Failure

BIG = bytes((31 * i + 7) % 251 for i in range(1_000_000))
SECRET = "very-secret-key"
CLIENTS = ("boto3", "obstore")


@functools.cache
def store_on(url: str, client: str = "auto", **settings: object) -> S3Store:
    given = {"attempts": 4, "backoff": 0.05, "read_timeout": 5.0, **settings}
    return S3Store(
        S3Options(endpoint_url=url, region="us-east-1", access_key="AK", secret_key=SECRET, client=client, **given)  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server
    store_on.cache_clear()


@pytest.fixture
def server(shared_server: FaultServer) -> FaultServer:
    shared_server.reset({key: key.encode() for key in "abcdf"} | {"a": b"abc", "x": BIG, "zero": b""})
    shared_server.etags["x"] = '"t1"'
    return shared_server


@pytest.mark.parametrize("client", CLIENTS)
def test_slow_down_twice_then_the_object(server: FaultServer, client: str) -> None:
    server.script("a", Step(status=503), Step(status=503))
    assert store_on(server.url, client).get("s3://bkt/a") == b"abc"
    assert len(server.seen("a")) == 3


@pytest.mark.parametrize("client", CLIENTS)
def test_slow_down_for_ever(server: FaultServer, client: str) -> None:
    server.script("b", Step(status=503, forever=True))
    store = store_on(server.url, client)
    store.get("s3://bkt/a")
    began = time.monotonic()
    with pytest.raises(StoreConnectionError, match=r"s3://bkt/b: .*503.*SlowDown.*gave up after 4 attempts") as caught:
        store.open("s3://bkt/b")
    assert time.monotonic() - began < 5
    assert len(server.seen("b")) == 4
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.bucket, error.key, error.status, error.attempts, error.request_id) == ("bkt", "b", 503, 4, "REQ7")
    assert str(error) == str(caught.value)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("key", "status", "kind", "builtin"),
    [("c", 403, StorePermissionError, PermissionError), ("d", 404, StoreNotFoundError, FileNotFoundError)],
)
def test_what_cannot_get_better_is_asked_once(
    server: FaultServer, client: str, key: str, status: int, kind: type[StoreError], builtin: type[OSError]
) -> None:
    server.script(key, Step(status=status, forever=True))
    with pytest.raises(kind) as caught:
        store_on(server.url, client).open(f"s3://bkt/{key}")
    assert isinstance(caught.value, builtin)
    assert len(server.seen(key)) == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is kind
    assert (again.bucket, again.key, again.status, again.attempts) == ("bkt", key, status, 1)


@pytest.mark.parametrize("client", CLIENTS)
def test_retry_after_is_obeyed(server: FaultServer, client: str) -> None:
    server.script("f", Step(status=429, headers={"Retry-After": "1"}))
    began = time.monotonic()
    assert store_on(server.url, client).get("s3://bkt/f") == b"f"
    assert time.monotonic() - began >= 1.0
    assert len(server.seen("f")) == 2


def test_retry_after_beyond_the_deadline_is_an_error_at_once(server: FaultServer) -> None:
    server.script("f", Step(status=503, headers={"Retry-After": "3600"}))
    with pytest.raises(StoreConnectionError, match=r"asks to wait 3600 s, beyond the deadline"):
        store_on(server.url, "boto3").open("s3://bkt/f")
    assert len(server.seen("f")) == 1


def test_a_listing_survives_a_failed_page(server: FaultServer) -> None:
    server.script(LIST, Step(), Step(status=500))
    keys = [item.key for item in store_on(server.url).list("s3://bkt/", page_size=2)]
    assert keys == sorted(server.objects)
    assert len(server.seen(LIST)) == 5
    assert server.seen(LIST)[1].query == server.seen(LIST)[2].query


def test_a_listing_that_ends_in_an_error(server: FaultServer) -> None:
    server.script(LIST, Step(), Step(status=500, forever=True))
    with pytest.raises(StoreConnectionError, match="gave up after 4 attempts"):
        list(store_on(server.url).list("s3://bkt/", page_size=2))


@pytest.mark.parametrize("client", ["auto", *CLIENTS])
@pytest.mark.parametrize("size", [1_000_000, 65_536, 7919])
@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_body_is_resumed_where_it_broke(server: FaultServer, client: str, size: int, reset: bool) -> None:
    server.script("x", Step(cut=600_000, reset=reset))
    with store_on(server.url, client).open("s3://bkt/x") as stream:
        parts = iter(lambda: stream.read(size), b"")
        assert hashlib.sha256(b"".join(parts)).digest() == hashlib.sha256(BIG).digest()
    first, second = server.seen("x")
    assert "Range" not in first.headers
    assert second.headers["If-Match"] == '"t1"'
    if not reset:  # a reset also throws away what was on its way
        assert second.headers["Range"] == "bytes=600000-"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_body_that_is_always_cut_is_never_short(server: FaultServer, client: str) -> None:
    server.script("x", Step(cut=1000, forever=True))
    with pytest.raises(StoreConnectionError, match=r"after \d000 of 1000000 bytes were received; gave up after 4") as e:
        store_on(server.url, client).get("s3://bkt/x")
    assert e.value.attempts == len(server.seen("x")) == 4


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("obedient", [True, False])
def test_an_object_replaced_while_it_is_read(server: FaultServer, client: str, obedient: bool) -> None:
    server.script("x", Step(cut=600_000), Step(etag='"t2"', ignore_match=not obedient))
    with pytest.raises(ChangedDataError, match=r's3://bkt/x: .*ETag "t1" before, ETag "t2" now'):
        store_on(server.url, client).get("s3://bkt/x")


@pytest.mark.parametrize("client", CLIENTS)
def test_an_object_replaced_between_listing_and_opening(server: FaultServer, client: str) -> None:
    store = store_on(server.url, client)
    (listed,) = store.list("s3://bkt/x")
    server.objects["x"], server.etags["x"] = b"new", '"t2"'
    with pytest.raises(ChangedDataError, match=r'ETag "t1" before, ETag "t2" now'):
        store.open(listed.url)
    server.etags["x"] = '"t1"'
    with pytest.raises(ChangedDataError, match=r"1000000 bytes before, 3 bytes now"):
        store.open(listed.url)


def test_a_store_that_ignores_ranges(server: FaultServer) -> None:
    server.script("x", Step(cut=600_000), Step(ignore_range=True))
    assert store_on(server.url, "boto3").get("s3://bkt/x") == BIG


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("cut", [None, 600_000])
def test_a_store_that_falls_silent(server: FaultServer, client: str, cut: int | None) -> None:
    server.script("x", Step(stall=30.0, cut=cut))
    assert store_on(server.url, client, read_timeout=1.0).get("s3://bkt/x") == BIG
    assert len(server.seen("x")) == 2


def test_a_store_that_never_answers(server: FaultServer) -> None:
    server.script("x", Step(stall=5.0, forever=True))
    with pytest.raises(StoreTimeoutError, match=r"did not answer in time; gave up after .* attempt.*read_timeout="):
        store_on(server.url, read_timeout=0.3, deadline=0.5).open("s3://bkt/x")


def test_a_body_that_is_silent_again_and_again_is_given_up_at_the_deadline(server: FaultServer) -> None:
    server.script("x", Step(stall=30.0, cut=1000, forever=True))
    store = store_on(server.url, "boto3", read_timeout=0.4, deadline=1.0, attempts=50)
    with pytest.raises(
        StoreTimeoutError, match=r"of 1000000 bytes were received; gave up after \d+\.\d s and \d attempts"
    ):
        store.get("s3://bkt/x")
    assert len(server.seen("x")) <= 4, "three silences are longer than the deadline"


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    waits: list[float] = []
    for kind in ("timeout", "cut"):
        attempts = Attempts(S3Options(deadline=20.0), "bkt", "k", waits.append)
        attempts.failed(S3Failure(kind, "an hour passed"), time.monotonic() - 3600)
        with pytest.raises(OSError, match=r"gave up after 30\.\d s and 2 attempts"):
            attempts.failed(S3Failure(kind, "another one"), time.monotonic() - 3600)
    assert len(waits) == 2
    with pytest.raises(StoreConnectionError, match=r"gave up after 3600\.\d s and 1 attempt"):
        Attempts(S3Options(), "bkt", "k").failed(S3Failure("connection", "no such host"), time.monotonic() - 3600)


@pytest.mark.parametrize("client", CLIENTS)
def test_an_endpoint_that_is_down(client: str) -> None:
    with FaultServer() as gone:
        url = gone.url
    began = time.monotonic()
    with pytest.raises(StoreConnectionError, match=r"cannot be reached .*gave up after 5 attempts.*endpoint_url"):
        S3Store(S3Options(endpoint_url=url, region="us-east-1", client=client)).open("s3://bkt/a")
    assert time.monotonic() - began < 30


@pytest.fixture
def black_hole() -> Iterator[str]:
    """Where a connection is neither made nor refused: the queue of one who never accepts is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        with socket.socket() as probe:
            probe.settimeout(0.3)
            if probe.connect_ex(listener.getsockname()) == 0:
                pytest.skip("this system accepts for those who do not")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("act", ["open", "list", "put"])
def test_an_endpoint_that_neither_accepts_nor_refuses(black_hole: str, client: str, act: str) -> None:
    store = store_on(black_hole, client, connect_timeout=0.3, deadline=0.5)
    said = (
        r"s3://bkt/a: the store did not answer in time; gave up after [01]\.\d s and \d attempts?\..*connect_timeout="
    )
    acts: dict[str, Callable[[], object]] = {
        "open": lambda: store.open("s3://bkt/a"),
        "list": lambda: list(store.list("s3://bkt/a")),
        "put": lambda: store.put("s3://bkt/a", b"abc"),
    }
    with pytest.raises(StoreTimeoutError, match=said) as caught:
        acts[act]()
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_missing_bucket(server: FaultServer, client: str) -> None:
    store = store_on(server.url, client)
    with pytest.raises(StoreNotFoundError, match=r"s3://other: the bucket does not exist"):
        store.open("s3://other/a")
    with pytest.raises(StoreNotFoundError, match=r"s3://other: the bucket does not exist"):
        list(store.list("s3://other/"))
    assert len(server.requests) == 2


@pytest.mark.parametrize("client", CLIENTS)
def test_an_empty_object_gets_no_range(server: FaultServer, client: str) -> None:
    store = store_on(server.url, client)
    with store.open("s3://bkt/zero") as stream:
        assert (stream.size, stream.read(), stream.read(5), stream.read1(), stream.readline()) == (
            0,
            b"",
            b"",
            b"",
            b"",
        )
        stream.skip(1_000_000)
    (listed,) = store.list("s3://bkt/zero")
    assert store.get(listed.url) == b""
    assert all("range" not in {name.lower() for name in request.headers} for request in server.seen("zero"))


def test_what_obstore_does_not_explain_is_asked_again_by_boto3(server: FaultServer) -> None:
    server.script("a", Step(status=400, code="ExpiredToken", forever=True))
    with pytest.raises(StoreError, match=r"400, ExpiredToken.*Check the credentials") as caught:
        store_on(server.url, "obstore").open("s3://bkt/a")
    assert caught.value.attempts == 2
    assert "Boto3" in server.seen("a")[1].headers["User-Agent"]


@pytest.mark.parametrize("client", CLIENTS)
def test_no_secret_in_messages(server: FaultServer, client: str) -> None:
    server.script("c", Step(status=403, forever=True))
    store = store_on(server.url, client)
    with pytest.raises(StorePermissionError) as caught:
        store.open("s3://bkt/c")
    told, error = "", caught.value
    while error is not None:
        told += repr(error) + str(error)
        error = error.__cause__ or error.__context__
    assert SECRET not in told + repr(store)


def test_requests_that_brought_much_pay_failures_back(server: FaultServer) -> None:
    server.objects["long"] = bytes(40 << 20)
    server.script("long", *[Step(cut=9 << 20)] * 4)
    assert len(store_on(server.url, "boto3", attempts=2).get("s3://bkt/long")) == 40 << 20
    assert len(server.seen("long")) == 5
