"""Writing objects: whole or not at all, whatever breaks, in bounded memory."""

import functools
import hashlib
import io
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from fault_server import FaultServer, Step
from s3_objects import HARD_KEYS, put_objects
from stage_contract import check_stage

from pipes.errors import StoreConnectionError, StoreError, StoreNotFoundError, StorePermissionError
from pipes.iter import IterableWrapper, S3FileLister, S3FileSaver
from pipes.loader2 import DataLoader2, MultiProcessingReadingService
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

MIB = 1 << 20
UNSIGNED = S3Options(unsigned=True, region="us-east-1")
PART = 64 << 10
"""In place of 16 MiB, but where a test says otherwise."""
LARGE = bytes((31 * i + 7) % 251 for i in range(160 << 10))


def tag_of(data: bytes, part: int) -> str:
    tags = [hashlib.md5(data[at : at + part]).digest() for at in range(0, len(data), part)]
    return f'"{hashlib.md5(b"".join(tags)).hexdigest()}-{len(tags)}"'


LARGE_TAG = tag_of(LARGE, PART)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server
    store_on.cache_clear()


@pytest.fixture
def server(shared_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> FaultServer:
    monkeypatch.setattr("pipes.sources.s3_upload._SINGLE", PART)
    shared_server.reset({"old": b"old"})
    return shared_server


@functools.cache
def store_on(server: FaultServer, **settings: Any) -> S3Store:
    given = {"access_key": "AK", "secret_key": "s"} if not settings.get("unsigned") else {}
    return S3Store(S3Options(endpoint_url=server.url, region="us-east-1", backoff=0.01, **given, **settings))


class OneWay(io.RawIOBase):
    """A stream that gives little at a time and cannot seek."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), len(self._data), 700_000)
        buffer[:count], self._data = self._data[:count], self._data[count:]
        return count


def test_what_is_written_is_read_again(moto_server: str) -> None:
    put_objects(moto_server, "put-small", {})
    store = S3Store(S3Options(endpoint_url=moto_server))
    for key in HARD_KEYS:
        tag = store.put(f"s3://put-small/{key}", key.encode())
        assert tag == '"' + hashlib.md5(key.encode()).hexdigest() + '"'
    assert [(item.key, store.get(item.url)) for item in store.list("s3://put-small/")] == [
        (key, key.encode()) for key in sorted(HARD_KEYS, key=str.encode)
    ]
    file = io.BytesIO(b"0123456789")
    file.seek(4)
    for data in (bytearray(b"456789"), memoryview(b"456789"), file, OneWay(b"456789")):
        store.put("s3://put-small/kind", data)  # type: ignore[arg-type]
        assert store.get("s3://put-small/kind") == b"456789"
    for empty in (b"", io.BytesIO()):
        store.put("s3://put-small/kind", empty)
        assert store.get("s3://put-small/kind") == b""
    assert store.put("s3://put-small/kind", store.open("s3://put-small/in"))
    assert store.get("s3://put-small/kind") == b"in"


def test_much_is_sent_in_parts(moto_server: str) -> None:
    put_objects(moto_server, "put-large", {})
    store = S3Store(S3Options(endpoint_url=moto_server))
    much = LARGE * 120
    for data in (much, OneWay(much)):
        assert store.put("s3://put-large/x", data) == tag_of(much, 16 * MIB)  # type: ignore[arg-type]
        assert store.get("s3://put-large/x") == much
    client = boto3.client("s3", endpoint_url=moto_server)
    assert "Uploads" not in client.list_multipart_uploads(Bucket="put-large")
    client.close()


def test_at_most_one_part_is_one_request(server: FaultServer) -> None:
    store = store_on(server)
    for data in (LARGE[:PART], io.BytesIO(LARGE[:PART])):
        store.put("s3://bkt/x", data)
        assert [request.method for request in server.requests] == ["PUT"]
        server.reset({})
    for data in (LARGE[: PART + 1], io.BytesIO(LARGE[: PART + 1])):
        store.put("s3://bkt/x", data)
        begin, *parts, complete = [request.key for request in server.requests]
        assert (begin, sorted(parts), complete) == ("x#begin", ["x#1", "x#2"], "x#complete")
        assert server.objects["x"] == LARGE[: PART + 1]
        server.reset({})


def test_memory_is_bounded_by_parts(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    part = 2 * MIB
    monkeypatch.setattr("pipes.sources.s3_upload._SINGLE", part)

    class Zeros(io.RawIOBase):
        left = 20 * part

        def read(self, size: int = -1) -> bytes:
            self.left -= (count := min(size, self.left))
            return bytes(count)

    store = store_on(server)
    store.put("s3://bkt/y", b"")
    server.keep_parts = False
    tracemalloc.start()
    try:
        store.put("s3://bkt/x", Zeros())  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(server.seen("x#20")) == 1
    assert peak < (6 + 4 + 1) * part, "six parts here, and each that is sent once more with the server, in this process"


def test_a_request_that_fails_is_made_again(server: FaultServer) -> None:
    store = store_on(server)
    server.script("s", Step(status=503), Step(lost=True), Step(status=500))
    assert store.put("s3://bkt/s", b"small") == server.etag("s")
    assert server.objects["s"] == b"small"
    assert len(server.seen("s")) == 4
    for key in ("x#begin", "x#1", "x#3"):
        server.script(key, Step(status=503), Step(lost=True))
    assert store.put("s3://bkt/x", io.BytesIO(LARGE)) == LARGE_TAG
    assert server.objects["x"] == LARGE
    assert [len(server.seen(key)) for key in ("x#begin", "x#1", "x#2", "x#3", "x#complete")] == [3, 3, 1, 3, 1]


def test_a_file_is_read_once_for_all_attempts(server: FaultServer) -> None:
    server.script("s", Step(status=503))
    store_on(server).put("s3://bkt/s", OneWay(b"once"))  # type: ignore[arg-type]
    assert server.objects["s"] == b"once"


@pytest.mark.parametrize("step", [Step(status=503, forever=True), Step(status=400, code="EntityTooSmall")])
@pytest.mark.parametrize("failing", ["old#2", "old#complete"])
def test_what_fails_leaves_the_old_object_and_no_parts(server: FaultServer, step: Step, failing: str) -> None:
    server.script(failing, step)
    with pytest.raises(StoreError) as caught:
        store_on(server).put("s3://bkt/old", LARGE)
    assert (caught.value.bucket, caught.value.key, caught.value.status) == ("bkt", "old", step.status)
    assert (server.objects, server.uploads) == ({"old": b"old"}, {})
    assert len(server.seen("old#abort")) == 1
    assert not getattr(caught.value, "__notes__", [])


def test_a_source_that_fails_or_is_interrupted_leaves_no_parts(server: FaultServer) -> None:
    class Broken(io.BytesIO):
        error: BaseException

        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 2 * PART:
                raise self.error
            return super().read(size)

    for error in (OSError("disk"), KeyboardInterrupt()):
        source = Broken(LARGE)
        source.error = error
        with pytest.raises(type(error)):
            store_on(server).put("s3://bkt/old", source)
        assert (server.objects, server.uploads) == ({"old": b"old"}, {})


def test_parts_that_stay_behind_are_told(server: FaultServer) -> None:
    server.script("old#2", Step(status=403))
    server.script("old#abort", Step(status=403))
    with pytest.raises(StorePermissionError) as caught:
        store_on(server).put("s3://bkt/old", LARGE)
    assert "the parts of upload upload-0 may still be in the store" in caught.value.__notes__[0]


def uploading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pipes S3 upload")]


@pytest.mark.parametrize("concurrency", [None, 1, 2])
def test_so_many_parts_are_sent_at_once_and_no_thread_stays(server: FaultServer, concurrency: int | None) -> None:
    data, at_once = LARGE * 4, concurrency or 4
    together = Step(meet=threading.Barrier(at_once))
    for number in range(1, 9):
        server.script(f"x#{number}", together)
    given = {} if concurrency is None else {"concurrency": concurrency}
    assert store_on(server).put("s3://bkt/x", OneWay(data), **given) == tag_of(data, PART)  # type: ignore[arg-type]
    assert server.objects["x"] == data
    pipe = S3FileSaver([("s3://bkt/y", OneWay(data))], endpoint_url=server.url, options=UNSIGNED, **given)
    for number in range(1, 9):
        server.script(f"y#{number}", together)
    assert list(pipe) == ["s3://bkt/y"]
    assert server.objects["y"] == data
    assert not uploading()


def test_an_upload_at_the_interpreter_s_exit(server: FaultServer) -> None:
    program = (
        "import atexit, sys\nimport pipes.sources.s3_upload as uploading\nfrom pipes.sources.s3_client import S3Store\n"
        "from pipes.sources.s3_options import S3Options\nuploading._SINGLE = 64 << 10\n"
        "store = S3Store(S3Options(endpoint_url=sys.argv[1], unsigned=True, region='us-east-1'))\n"
        "atexit.register(lambda: store.put('s3://bkt/x', bytes(160 << 10)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, server.url], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stderr) == (0, "")
    assert server.objects["x"] == bytes(160 << 10)


def test_at_least_one_part_at_a_time(server: FaultServer) -> None:
    with pytest.raises(ValueError, match="concurrency=0: at least one part"):
        store_on(server).put("s3://bkt/x", b"", concurrency=0)
    with pytest.raises(ValueError, match="concurrency=0: at least one part"):
        S3FileSaver([], concurrency=0)


class Endless(io.BytesIO):
    """Gives parts without end, and calls `then` before the fourth."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.given, self.then = 0, then

    def read(self, size: int | None = -1) -> bytes:
        if self.given == 3:
            self.then()
        self.given += 1
        return bytes(PART)


@pytest.mark.race
def test_what_waits_for_its_next_attempt_is_not_waited_for_when_another_part_fails(server: FaultServer) -> None:
    for number in (1, 3, 4):
        server.script(f"old#{number}", Step(status=503, headers={"Retry-After": "3600"}, forever=True))
    server.script("old#2", Step(status=403))
    with pytest.raises(StorePermissionError):
        store_on(server, deadline=7200.0).put("s3://bkt/old", Endless(lambda: None))
    assert (server.objects, server.uploads) == ({"old": b"old"}, {})
    assert not uploading()


@pytest.mark.race
def test_an_interrupt_waits_for_the_parts_under_way(server: FaultServer) -> None:
    def interrupt() -> None:
        for _ in range(3000):
            if all(server.seen(f"old#{number}") for number in (1, 2, 3)):
                raise KeyboardInterrupt
            time.sleep(0.01)

    for number in (1, 2, 3):
        server.script(f"old#{number}", Step(stall=0.2))
    with pytest.raises(KeyboardInterrupt) as caught:
        store_on(server).put("s3://bkt/old", Endless(interrupt))
    assert (server.objects, server.uploads) == ({"old": b"old"}, {})
    assert not getattr(caught.value, "__notes__", [])
    assert not uploading()


def test_parts_still_under_way_at_the_end_are_told(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipes.sources.s3_upload._SECONDS_TO_END", 0.0)
    server.script("old#1", Step(stall=1.0))
    server.script("old#2", Step(status=403))
    with pytest.raises(StorePermissionError) as caught:
        store_on(server).put("s3://bkt/old", Endless(lambda: None))
    assert "upload upload-0 had parts under way, which may still be in the store" in caught.value.__notes__
    for thread in uploading():
        thread.join(30)


def test_a_completion_whose_answer_was_lost_is_success(server: FaultServer) -> None:
    server.script("x#complete", Step(lost=True))
    assert store_on(server).put("s3://bkt/x", LARGE) == LARGE_TAG
    assert server.objects["x"] == LARGE


def test_an_upload_that_somebody_else_dropped_is_an_error(server: FaultServer) -> None:
    server.script("old#complete", Step(status=500), Step(status=404, code="NoSuchUpload"))
    with pytest.raises(StoreNotFoundError, match="upload is gone, and the object is not the one that was sent"):
        store_on(server).put("s3://bkt/old", LARGE)
    assert server.objects == {"old": b"old"}


def test_an_endpoint_that_is_down() -> None:
    with FaultServer() as gone:
        store = store_on(gone, attempts=2)
    with pytest.raises(StoreConnectionError, match="gave up after 2 attempts"):
        store.put("s3://bkt/x", b"x")


def test_settings_reach_every_request_of_an_upload(server: FaultServer) -> None:
    store_on(server, requester_pays=True).put("s3://bkt/x", LARGE)
    assert {request.headers["x-amz-request-payer"] for request in server.requests} == {"requester"}
    before = len(server.requests)
    store_on(server, unsigned=True).put("s3://bkt/x", LARGE)
    assert all("Authorization" not in request.headers for request in server.requests[before:])


@pytest.mark.parametrize("data", ["text", 5, None, io.StringIO("text")])
def test_what_is_not_bytes_is_refused_before_anything_is_sent(server: FaultServer, data: Any) -> None:
    with pytest.raises(TypeError, match=r"binary file (are|is) needed"):
        store_on(server).put("s3://bkt/x", data)
    assert server.requests == []


def test_saver_keeps_every_promise_of_a_stage(moto_server: str) -> None:
    put_objects(moto_server, "saver", {})
    pairs = [(f"s3://saver/{number}.bin", bytes([number])) for number in range(6)]
    check_stage(lambda: S3FileSaver(pairs, endpoint_url=moto_server), [name for name, _ in pairs])
    store = S3Store(S3Options(endpoint_url=moto_server))
    assert [(item.url, store.get(item.url)) for item in store.list("s3://saver/")] == pairs


@pytest.mark.parametrize(
    ("mode", "kind", "data"),
    [("wb", bytes, "é".encode()), ("b", bytearray, "é".encode()), ("wb", io.BytesIO, "é".encode()), ("w", str, "é"),
     ("wt", io.StringIO, "é"), ("wb", OneWay, "é".encode())],
)  # fmt: skip
def test_saver_takes_bytes_text_and_files(server: FaultServer, mode: str, kind: Any, data: Any) -> None:
    given: dict[str, Any] = {"endpoint_url": server.url, "options": S3Options(unsigned=True)}
    pipe = S3FileSaver([("é x", kind(data))], mode, lambda name: f"s3://bkt/in/{name}", **given)
    assert list(pipe) == ["s3://bkt/in/é x"]
    assert server.objects["in/é x"] == "é".encode()


@pytest.mark.parametrize(
    ("element", "mode", "error", "match"),
    [
        (("s3://bkt/a", "x"), "wb", TypeError, "bytes or a binary file are needed, not str"),
        (("s3://bkt/a", b"x"), "w", TypeError, "must be text"),
        (("a", b"x"), "wb", ValueError, "not an S3 name"),
        (("s3://bkt/../a", b"x"), "wb", ValueError, "filepath_fn="),
        (("s3://bkt/a/", b"x"), "wb", ValueError, "names no file"),
        (("s3://gone/a", b"x"), "wb", StoreNotFoundError, "s3://gone: the bucket does not exist"),
    ],
)
def test_what_cannot_be_saved(server: FaultServer, element: Any, mode: str, error: Any, match: str) -> None:
    given: dict[str, Any] = {"endpoint_url": server.url, "options": S3Options(unsigned=True)}
    with pytest.raises(error, match=match):
        list(S3FileSaver([element], mode, **given))
    good = ("s3://bkt/good", "x" if mode == "w" else b"x")
    assert list(S3FileSaver([element, good], mode, on_error="skip", max_errors=1, **given)) == ["s3://bkt/good"]
    assert server.objects == {"old": b"old", "good": b"x"}


def test_a_name_that_is_saved_again_is_that_of_the_new_object(moto_server: str) -> None:
    put_objects(moto_server, "saver-again", {"a": b"one"})
    (listed,) = S3FileLister("s3://saver-again/", endpoint_url=moto_server)
    (written,) = S3FileSaver([(listed, b"two")], endpoint_url=moto_server)
    assert S3Store(S3Options(endpoint_url=moto_server)).get(written) == b"two"


def test_saver_in_workers(moto_server: str) -> None:
    put_objects(moto_server, "saver-workers", {})
    pipe = (
        IterableWrapper(range(12))
        .sharding_filter()
        .map(lambda number: (number, bytes(number)))
        .save_to_s3(filepath_fn=lambda number: f"s3://saver-workers/{number:02}", endpoint_url=moto_server)
    )
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(2)) as loader:
        names = list(loader)
    assert sorted(names) == [f"s3://saver-workers/{number:02}" for number in range(12)]
    sizes = [item.size for item in S3Store(S3Options(endpoint_url=moto_server)).list("s3://saver-workers/")]
    assert sizes == list(range(12))
