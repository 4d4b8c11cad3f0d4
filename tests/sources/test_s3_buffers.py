"""Parts of large objects are received in buffers that are used again, and never while somebody looks at them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fault_server import FaultServer, Step
from stage_contract import start

from pipes.errors import StoreTimeoutError
from pipes.iter import IterableWrapper
from pipes.sources import s3_buffers
from pipes.sources.s3_buffers import Buffers
from pipes.sources.s3_names import S3Url
from pipes.sources.s3_options import S3Options

KiB, MiB = 1 << 10, 1 << 20
CHUNK = 64 * KiB
OBJECTS = {f"k{i}": random.Random(i).randbytes(900 * KiB + i) for i in range(6)}


@pytest.fixture
def server(shared_server: FaultServer) -> FaultServer:
    shared_server.reset(OBJECTS)
    return shared_server


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The identities of the buffers that were handed out, in order."""
    taken: list[int] = []

    def take(self: Buffers, original: Any = Buffers.take) -> memoryview:
        view: memoryview = original(self)
        taken.append(id(view.obj))
        return view

    monkeypatch.setattr(s3_buffers.Buffers, "take", take)
    return taken


def loaded(server: FaultServer, keys: list[str] | None = None, **more: Any) -> Any:
    options = S3Options(unsigned=True, client="boto3", attempts=2, backoff=0.01, read_timeout=0.4)
    names = IterableWrapper([S3Url(f"s3://bkt/{key}", len(OBJECTS[key]), server.etag(key)) for key in keys or OBJECTS])
    settings = {"options": options, "buffer_size": CHUNK, "read_ahead": 1024 * KiB, **more}
    return names.load_files_by_s3(endpoint_url=server.url, **settings)


def test_all_of_a_large_object_comes_in_few_buffers(server: FaultServer, made: list[int]) -> None:
    """Also a check that boto3's bodies are still built as `Buffers.receive` expects."""
    run = start(loaded(server))
    assert [stream.read(10_000) + stream.read() for _, stream in run] == list(OBJECTS.values())
    run.context.close()
    assert len(made) >= sum(len(body) // CHUNK - 4 for body in OBJECTS.values()), "most bytes came in no buffer"
    run = start(loaded(server))
    made.clear()
    for _, stream in run:
        while stream.read(CHUNK):
            pass
    run.context.close()
    assert len(made) >= 60
    assert len(set(made)) <= 1024 // 64 + 6, "buffers are not used again"


def test_bytes_stay_right_while_buffers_are_used_again(server: FaultServer) -> None:
    run = start(loaded(server))
    kept, firsts = [], []
    for _, stream in run:  # each is left in the middle of a chunk
        firsts.append(stream.read(1000))
        kept.append(stream)
    rests: list[list[bytes]] = [[] for _ in kept]
    for _ in range(40):
        for stream, rest in zip(kept, rests, strict=True):
            rest.append(stream.read1(30_000))
    found = [first + b"".join(rest) + stream.read() for first, rest, stream in zip(firsts, rests, kept, strict=True)]
    assert found == list(OBJECTS.values())
    run.context.close()


def test_views_that_are_kept_stay_as_they_are(server: FaultServer) -> None:
    run = start(loaded(server))
    views = [(view, bytes(view)) for _, stream in run for view in iter(stream.receive, b"")]
    assert all(view == copy for view, copy in views)
    assert b"".join(view for view, _ in views) == b"".join(OBJECTS.values())
    run.context.close()


def test_a_body_that_is_cut_is_resumed_at_its_byte_and_one_that_stalls_is_a_timeout(server: FaultServer) -> None:
    server.script("k0", Step(cut=100_000), Step(cut=70_001, reset=True))
    server.script("k1", Step(cut=150_000, stall=1.0))
    run = start(loaded(server, ["k0", "k1"], options=S3Options(
        unsigned=True, client="boto3", attempts=4, backoff=0.01, read_timeout=0.4
    )))  # fmt: skip
    assert [stream.read(777) + stream.read() for _, stream in run] == [OBJECTS["k0"], OBJECTS["k1"]]
    run.context.close()
    server.script("k2", Step(cut=50_000, stall=1.0, forever=True))
    run = start(loaded(server, ["k2"]))
    with pytest.raises(StoreTimeoutError, match="did not answer in time after 0 of"):
        next(iter(run))[1].read()
    run.context.close()


def test_connections_go_back_after_whole_parts(server: FaultServer) -> None:
    run = start(loaded(server, concurrency=1))
    assert [stream.read() for _, stream in run] == list(OBJECTS.values())
    run.context.close()
    gets = [request for request in server.requests if request.method == "GET"]
    assert len(gets) > 2 * len(OBJECTS)
    assert len({request.port for request in gets}) == 1


def test_free_buffers_make_room_for_what_another_client_brings(server: FaultServer) -> None:
    draw = random.Random(1)
    large = {f"a{i}": draw.randbytes(3 * MiB) for i in range(4)}  # boto3 reads these, obstore those
    server.reset(large | {f"b{i}": draw.randbytes(MiB) for i in range(16)})
    listed = [S3Url(f"s3://bkt/{key}", len(body), server.etag(key)) for key, body in server.objects.items()]
    options = S3Options(unsigned=True, endpoint_url=server.url)
    pipe = IterableWrapper(listed).load_files_by_s3(options=options, buffer_size=CHUNK, read_ahead=4 * MiB)
    run = start(pipe)
    free = []
    for _, stream in run:
        while stream.read(CHUNK):
            free.append(len(run.ahead._buffers))  # type: ignore[attr-defined]
    run.context.close()
    assert max(free) > 2, "nothing was received in buffers"
    assert free[-1] == 0, "what boto3 no longer fills stays beside what obstore brings"


def test_bodies_that_come_from_no_socket_are_read_as_ever() -> None:
    class Body:
        _raw_stream = object()

    assert Buffers(4, 1).receive(Body()) is None
