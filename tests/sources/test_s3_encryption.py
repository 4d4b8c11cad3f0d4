"""Objects encrypted with a key of the user's own (SSE-C): the key reaches the store, and nothing else."""

import hashlib
import logging
import pickle
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest
from fault_server import LIST, FaultServer, Step
from s3_objects import put_objects

from pipes import saved
from pipes.config import dump_graph
from pipes.errors import ConfigError, StoreError
from pipes.iter import S3FileLoader
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

KEY = bytes(range(100, 132))
TEXT = b64encode(KEY).decode()
HEADERS = {
    "x-amz-server-side-encryption-customer-algorithm": "AES256",
    "x-amz-server-side-encryption-customer-key": TEXT,
    "x-amz-server-side-encryption-customer-key-MD5": b64encode(hashlib.md5(KEY).digest()).decode(),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultServer]:
    monkeypatch.setattr("pipes.sources.s3_upload._SINGLE", 1000)
    with FaultServer({"a": b"abc", "b": bytes(3000)}) as server:
        yield server


def options_on(url: str, key: Any = TEXT) -> S3Options:
    return S3Options(endpoint_url=url, region="us-east-1", sse_customer_key=key, backoff=0.01)


@pytest.mark.parametrize("key", [KEY, TEXT])
def test_the_key_goes_with_every_request_for_an_object(server: FaultServer, key: Any) -> None:
    store = S3Store(options_on(server.url, key))
    store.put("s3://bkt/small", b"x")
    store.put("s3://bkt/large", bytes(2500))
    for _ in range(2):  # a small one that obstore would read the second time
        assert store.get("s3://bkt/small") == b"x"
    server.script("b", Step(cut=1500))
    assert store.get("s3://bkt/b") == bytes(3000)
    assert store.ranged("s3://bkt/b").read_at(10, 5) == bytes(5)
    asked = [(request.method, request.key) for request in server.requests]
    asked[2:5] = sorted(asked[2:5])  # parts are sent at once
    assert asked == [
        *[("PUT", "small"), ("POST", "large#begin"), ("PUT", "large#1"), ("PUT", "large#2"), ("PUT", "large#3")],
        *[("POST", "large#complete"), ("GET", "small"), ("GET", "small"), ("GET", "b"), ("GET", "b")],
        *[("HEAD", "b"), ("GET", "b")],
    ]
    for request in server.requests:
        assert {name: request.headers[name] for name in HEADERS} == HEADERS
    assert len(list(store.list("s3://bkt/"))) == 4
    assert not HEADERS.keys() & server.seen(LIST)[0].headers.keys()


def test_a_store_takes_what_is_sent(moto_server: str) -> None:
    put_objects(moto_server, "encrypted", {})
    store = S3Store(options_on(moto_server))
    store.put("s3://encrypted/x", b"hidden")
    assert store.get("s3://encrypted/x") == b"hidden"


def test_without_the_key_the_store_says_why(server: FaultServer) -> None:
    server.needed = HEADERS
    assert S3Store(options_on(server.url)).get("s3://bkt/a") == b"abc"
    for key in (None, bytes(32)):
        with pytest.raises(StoreError, match=r"told to fail .*InvalidRequest") as caught:
            S3Store(options_on(server.url, key)).get("s3://bkt/a")
        assert caught.value.status == 400


@pytest.mark.parametrize("key", [b"short", "c2hvcnQ=", TEXT + "\n", TEXT[:-1], "not base64 at all, 32 bytes long", "é"])
def test_what_is_no_key_is_refused_and_not_shown(key: Any) -> None:
    with pytest.raises(ValueError, match="sse_customer_key is not 32 bytes") as caught:
        S3Options(sse_customer_key=key)
    assert str(key).strip("=\n") not in str(caught.value)


def test_obstore_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r'sse_customer_key goes with client="boto3"'):
        S3Options(sse_customer_key=KEY, client="obstore")


@pytest.mark.parametrize("key", [KEY, TEXT])
def test_the_key_is_shown_nowhere(server: FaultServer, key: Any, caplog: pytest.LogCaptureFixture) -> None:
    options = options_on(server.url, key)
    assert "sse_customer_key='***'" in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options
    pipe = S3FileLoader(["s3://bkt/a"], options=options)
    shown = [repr(options), repr(pipe), str(pipe), repr(saved.fingerprint(pipe)), repr(S3Store(options))]
    stream = iter(pipe)
    next(stream)
    shown.append(repr(pipe.state_dict()))
    with pytest.raises(ConfigError, match="sse_customer_key is a credential") as refused:
        dump_graph(pipe)
    shown.append(str(refused.value))
    for step in (Step(status=400), Step(status=403), Step(cut=0, forever=True)):
        server.script("a", step)
        with caplog.at_level(logging.INFO), pytest.raises(StoreError) as caught:
            S3Store(options).get("s3://bkt/a")
        error: BaseException | None = caught.value
        while error is not None:
            shown += [repr(error), str(error)]
            error = error.__cause__ or error.__context__
    text = "".join(shown) + caplog.text
    assert TEXT not in text
    assert str(KEY)[2:-1] not in text
