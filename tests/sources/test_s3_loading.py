"""Objects fetched ahead: order, memory, errors in their place, resume, and an end without residue."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from fault_server import FaultServer, Step
from stage_contract import start
from tars import make_tar

from pipes import IterDataPipe
from pipes.errors import ErrorBudgetExceeded, StoreConnectionError, StoreNotFoundError
from pipes.iter import IterableWrapper, S3FileLoader
from pipes.sources.s3 import S3FileLister
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_fetch import LEAST_READ_AHEAD, ReadAhead
from pipes.sources.s3_options import S3Options
from pipes.utils import StreamWrapper

MiB = 1 << 20
UNSIGNED = S3Options(unsigned=True, attempts=2, backoff=0.01, read_timeout=5.0)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FaultServer]:
    with FaultServer({"x": b"x"}) as server:
        # obstore's runtime lives as long as the process: it must not be news to `no_residue`
        kept = S3Store(replace(UNSIGNED, endpoint_url=server.url))
        assert list(kept.list("s3://bkt/none")) == []
        assert S3Store(replace(kept.options, client="obstore")).get("s3://bkt/x") == b"x"
        yield server
        del kept


@pytest.fixture(autouse=True)
def no_threads() -> Iterator[None]:
    """Connections stay with the store's client; threads may not."""
    yield
    assert ended()


@pytest.fixture(autouse=True)
def server(shared_server: FaultServer) -> FaultServer:
    draw = random.Random(7)
    shared_server.reset({f"k{i:02d}": draw.randbytes(draw.choice([0, 1, 5000, 300_000])) for i in range(40)})
    return shared_server


def names(server: FaultServer, listed: bool = True) -> Any:
    if listed:
        return S3FileLister("s3://bkt/", endpoint_url=server.url, options=UNSIGNED)
    return IterableWrapper([f"s3://bkt/{key}" for key in sorted(server.objects)])


def loader(server: FaultServer, source: Any = None, **more: Any) -> S3FileLoader:
    source = names(server) if source is None else source
    return S3FileLoader(source, endpoint_url=server.url, **{"options": UNSIGNED, **more})


def read(pair: tuple[str, Any]) -> tuple[str, bytes]:
    return pair[0].removeprefix("s3://bkt/"), pair[1].read()


def fetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pipes S3 fetch"]


def ended() -> bool:
    deadline = time.monotonic() + 10
    while fetching() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not fetching()


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("settings", [{}, {"concurrency": 1}, {"read_ahead": LEAST_READ_AHEAD}, {"read_ahead": 0}])
def test_order_is_that_of_the_names(server: FaultServer, listed: bool, settings: dict[str, int]) -> None:
    server.script("k00", Step(stall=0.3))
    server.script("k03", Step(stall=0.2))
    patient = replace(UNSIGNED, read_timeout=60.0)  # a request that is made again would be one too many
    pipe = loader(server, names(server, listed), options=patient, **settings)
    assert [read(pair) for pair in pipe] == sorted(server.objects.items())
    if settings.get("read_ahead", MiB) > LEAST_READ_AHEAD:
        assert all(len(server.seen(key)) == 1 for key, body in server.objects.items() if body)


def test_requests_are_made_ahead_and_at_once(server: FaultServer) -> None:
    for key in server.objects:
        server.script(key, Step(stall=0.3))
    run = start(loader(server, concurrency=8))
    assert read(next(iter(run)))[0] == "k00"
    deadline = time.monotonic() + 10
    while len([request for request in server.requests if request.key != "\0list"]) < 9:
        assert time.monotonic() < deadline, "nothing is fetched while the reader is busy"
        time.sleep(0.01)
    run.context.close()
    assert ended()


def with_peak(action: Callable[[], Any]) -> int:
    """Bytes that Python held at most during `action`, beyond those before it."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("listed", [True, False])
def test_memory_is_within_read_ahead_for_a_slow_reader(server: FaultServer, listed: bool) -> None:
    body = random.Random(1).randbytes(MiB)
    server.reset({f"k{i:02d}": body for i in range(24)})
    used: list[int] = []

    def consume() -> None:
        run = start(loader(server, names(server, listed), read_ahead=4 * MiB, buffer_size=65536, concurrency=8))
        for _, stream in run:
            while stream.read(100_000):
                used.append(run.ahead.used)  # type: ignore[attr-defined]
                time.sleep(0.002)
        run.context.close()

    # Beside what is held, each of eight connections has its buffers.
    assert with_peak(consume) < 4 * MiB + 3 * MiB
    assert max(used) <= 4 * MiB
    assert max(used) > 2 * MiB, "hardly anything was fetched ahead"


def test_an_object_larger_than_read_ahead_streams_through(server: FaultServer) -> None:
    body = random.Random(2).randbytes(MiB)
    server.reset({"big": body * 12, "next": b"next"})
    run = start(loader(server, read_ahead=MiB))
    elements = iter(run)
    _, stream = next(elements)
    for _ in range(24):
        assert stream.read(MiB // 2) in (body[: MiB // 2], body[MiB // 2 :])
        assert run.ahead.used <= MiB  # type: ignore[attr-defined]
    assert stream.read() == b""
    assert read(next(elements)) == ("next", b"next")
    run.context.close()


def test_streams_that_are_kept_unread_or_interleaved_never_wait_for_each_other(server: FaultServer) -> None:
    body = random.Random(3).randbytes(MiB)
    server.reset({f"k{i:02d}": body for i in range(12)})
    streams = [stream for _, stream in loader(server, read_ahead=LEAST_READ_AHEAD)]
    assert not fetching(), "the iteration has ended"
    parts: list[list[bytes]] = [[] for _ in streams]
    for place in range(0, MiB, 100_000):
        for stream, part in zip(reversed(streams), parts, strict=True):
            assert stream.tell() == place
            part.append(stream.read(100_000))
    assert all(b"".join(part) == body for part in parts)
    run = start(loader(server, read_ahead=2 * MiB).shuffle(6).map(read))
    assert [data for _, data in run] == [body] * 12
    run.context.close()
    with ThreadPoolExecutor(4) as pool:
        run = start(loader(server, read_ahead=LEAST_READ_AHEAD))
        assert list(pool.map(read, run)) == [(f"k{i:02d}", body) for i in range(12)]
        run.context.close()


def test_archives_of_which_some_streams_are_dropped(server: FaultServer) -> None:
    members = [(f"{i}.txt", b"%d" % i * 50_000) for i in range(6)]
    server.reset({f"{i}.tar": make_tar(members) for i in range(9)})
    chain = loader(server, read_ahead=MiB).filter(lambda pair: int(pair[0][-5]) % 3 != 1).load_from_tar().map(read)
    expected = [(f"{i}.tar/{name}", data) for i in range(9) if i % 3 != 1 for name, data in members]
    assert list(chain) == expected
    left, right = (loader(server, read_ahead=MiB).load_from_tar().map(read) for _ in range(2))
    whole = [(f"{i}.tar/{name}", data) for i in range(9) for name, data in members]
    assert list(left.zip(right)) == list(zip(whole, whole, strict=True))


def test_errors_come_in_their_place_and_count_exactly(server: FaultServer) -> None:
    for key in ("k01", "k05", "k39"):
        server.script(key, Step(status=403, forever=True))
    server.script("k07", Step(status=404, forever=True))
    keys = sorted(server.objects)
    got: list[Any] = []
    with pytest.raises(PermissionError, match="k01") as caught:
        got.extend(map(read, loader(server)))
    assert any("S3FileLoader" in note and "k01" in note for note in caught.value.__notes__)
    run = start(loader(server, on_error="skip", max_errors=4))
    good = [key for key in keys if key not in ("k01", "k05", "k07", "k39")]
    assert [read(pair)[0] for pair in run] == good
    (counts,) = run.context.tallies.counts().values()
    assert (counts.taken, counts.skipped) == (40, 4)
    run = start(loader(server, on_error="skip", max_errors=1))
    given = []
    with pytest.raises(ErrorBudgetExceeded):
        given.extend(read(pair)[0] for pair in run)
    run.context.close()
    source = IterableWrapper([*(f"s3://bkt/{key}" for key in keys[8:12]), "no name", "s3://bkt/k13"])
    run = start(loader(server, source, on_error=lambda error, name: (name, StreamWrapper(b""))))
    assert [name for name, _ in run][4:] == ["no name", "s3://bkt/k13"]


def test_an_error_upstream_comes_after_what_was_before_it(server: FaultServer) -> None:
    def check(name: str) -> str:
        if "k06" in name:
            raise RuntimeError("upstream")
        return name

    got: list[str] = []
    with pytest.raises(RuntimeError, match="upstream") as caught:
        got.extend(read(pair)[0] for pair in loader(server, names(server).map(check)))
    assert got == [f"k{i:02d}" for i in range(6)]
    assert any("Mapper" in note for note in caught.value.__notes__)


def test_an_error_in_the_middle_of_an_object(server: FaultServer) -> None:
    server.reset({"a": b"a" * MiB, "b": b"b" * 10})
    server.script("a", Step(cut=400_000), Step(status=500, forever=True))
    options = replace(UNSIGNED, attempts=3)
    elements = iter(loader(server, read_ahead=8 * MiB, options=options))
    _, stream = next(elements)
    with pytest.raises(StoreConnectionError, match=r"s3://bkt/a: .*status 500"):
        stream.read()
    server.script("a")
    left = MiB - stream.tell()
    assert stream.read() == b"a" * left  # asked again, a reader goes on
    assert read(next(elements)) == ("b", b"b" * 10)
    assert next(elements, None) is None


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_resume_opens_nothing_before_the_position(server: FaultServer, on_error: Any) -> None:
    def graph() -> Any:
        budget = {} if on_error == "raise" else {"max_errors": 9}
        return loader(server, concurrency=4, on_error=on_error, **budget)

    server.script("k02", *([Step(status=404, forever=True)] if on_error == "skip" else []))
    whole = [read(pair) for pair in start(graph())]
    run = start(graph())
    for place in range(len(whole) + 1):
        state = json.loads(json.dumps(run.table()))
        assert len(json.dumps(state)) < 800, "the state holds data"
        if place in (0, 5, 20, 39):
            server.requests.clear()
            again = start(graph(), state)
            assert [read(pair) for pair in again] == whole[place:]
            opened = {request.key for request in server.requests} - {"\0list"}
            assert min(opened, default="k99") >= min((key for key, _ in whole[place:]), default="k99") or place == 0
            again.context.close()
        assert next(iter(run), None) is None or place < len(whole)
    run.context.close()


def test_a_resume_inside_a_large_archive_asks_for_its_rest(server: FaultServer) -> None:
    members = [(f"{i:02d}.txt", b"%02d" % i * 100_000) for i in range(40)]
    server.reset({f"{i}.tar": make_tar(members) for i in range(3)})

    def graph() -> IterDataPipe[Any]:
        return loader(server).load_from_tar().map(read)

    run = start(graph())
    whole = list(start(graph()))
    assert list(islice(iter(run), 70)) == whole[:70]
    state = json.loads(json.dumps(run.table()))
    run.context.close()
    server.requests.clear()
    assert list(start(graph(), state)) == whole[70:]
    asked = [(request.key, {k.lower(): v for k, v in request.headers.items()}.get("range")) for request in
             server.requests if request.method == "GET" and request.key != "\0list"]  # fmt: skip
    assert "0.tar" not in dict(asked)
    # The first bytes tell whether it is compressed.
    beginning, rest = (str(span).removeprefix("bytes=").split("-") for key, span in asked if key == "1.tar")
    assert (beginning[0], int(beginning[1]) < 300_000, int(rest[0]) > 5_000_000) == ("0", True, True)


@pytest.mark.race
@pytest.mark.parametrize("how", ["close", "del", "error", "break"])
def test_an_iteration_that_stops_leaves_no_thread(server: FaultServer, how: str) -> None:
    for key in server.objects:
        server.script(key, Step(stall=random.uniform(0, 0.05)))
    pipe = loader(server)
    elements = iter(pipe)
    next(elements)
    assert fetching()
    if how == "close":
        elements.close()  # type: ignore[attr-defined]
        assert not fetching()
    elif how == "error":
        server.script("k01", Step(status=404, forever=True))
        server.script("k02", Step(status=404, forever=True))
        with pytest.raises(StoreNotFoundError):
            list(loader(server))
    del elements, pipe
    assert ended()


@pytest.mark.race
@pytest.mark.parametrize("taken", [1, 3, 40])
def test_an_iteration_that_is_dropped_leaves_no_socket(no_residue: None, taken: int) -> None:
    with FaultServer({f"k{i:02d}": bytes(200_000) for i in range(40)}) as own:
        run = start(loader(own, options=replace(UNSIGNED, client="boto3", attempts=3), read_ahead=MiB))
        held = list(islice(iter(run), taken))
        assert held[-1][1].read(10) == bytes(10)
        del run, held


@pytest.mark.race
def test_a_store_that_is_silent_does_not_hold_up_the_end(server: FaultServer) -> None:
    for key in sorted(server.objects)[1:]:
        server.script(key, Step(stall=3.0))
    options = replace(UNSIGNED, read_timeout=2.0, attempts=1)
    elements = iter(loader(server, options=options))
    next(elements)
    elements.close()  # type: ignore[attr-defined]
    assert ended()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_goes_on_by_itself(server: FaultServer) -> None:
    options = replace(UNSIGNED, client="boto3")
    run = start(loader(server, options=options, concurrency=4))
    elements = iter(run)
    whole = sorted(server.objects.items())
    assert read(next(elements)) == whole[0]
    _, held = next(elements)
    child = os.fork()
    if not child:
        try:
            ok = held.read() == whole[1][1] and [read(pair) for pair in elements] == whole[2:]
            run.context.close()
            os._exit(0 if ok else 1)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(2)
    assert held.read() == whole[1][1]
    assert [read(pair) for pair in elements] == whole[2:]
    run.context.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_iteration_alive_at_the_end_of_the_interpreter(server: FaultServer) -> None:
    import subprocess
    import sys

    program = (
        "import sys\nfrom pipes.iter import S3FileLoader\nfrom pipes.sources.s3_options import S3Options\n"
        "names = [f's3://bkt/k{i:02d}' for i in range(40)]\n"
        "elements = iter(S3FileLoader(names, endpoint_url=sys.argv[1], options=S3Options(unsigned=True)))\n"
        "print(len(next(elements)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, server.url], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_numbers_that_make_no_sense(server: FaultServer) -> None:
    with pytest.raises(ValueError, match="concurrency=0"):
        S3FileLoader([], concurrency=0)
    with pytest.raises(ValueError, match="read_ahead=100: a number of bytes, 0 or at least 262144"):
        S3FileLoader([], read_ahead=100)


def test_a_skip_over_parts_that_were_asked_for(server: FaultServer) -> None:
    body = random.Random(5).randbytes(4 * MiB)
    server.reset({"x": body})
    store = S3Store(replace(UNSIGNED, endpoint_url=server.url))
    from pipes.sources.s3_loading import FetchedStream

    for offset in (1, 300_000, MiB, 3 * MiB + 5, 4 * MiB):
        ahead = ReadAhead(store, concurrency=4, read_ahead=2 * MiB)
        stream = FetchedStream(store, ahead.add("s3://bkt/x"), ahead, None)
        stream.wait()
        assert stream.read(10) == body[:10]
        assert stream.skip(offset) == min(offset, 4 * MiB - 10)
        assert stream.tell() == min(offset + 10, 4 * MiB)
        assert stream.read() == body[offset + 10 :]
        stream.close()
        ahead.close()
        assert ended()
        assert ahead.used == 0
