"""What runs in a worker, spoken to over its channel as main would, in a thread of this process."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from loading import with_draws

from pipes import IterDataPipe
from pipes.errors import ChannelClosed
from pipes.iter import IterableWrapper
from pipes.loader2.channel import Channel, Message
from pipes.loader2.messages import BATCH_HEAD, EVENT_HEAD, FATAL, Kind
from pipes.loader2.packing import Receiver
from pipes.loader2.remote_error import unpack_error
from pipes.loader2.shipping import ship
from pipes.loader2.streams import Plan, StreamState
from pipes.loader2.whereabouts import Page
from pipes.loader2.worker import Job, WorkerInfo, _Worker

PATIENCE = 20.0


class Main:
    """Main's side of one worker."""

    def __init__(self, graph: IterDataPipe[Any], monkeypatch: pytest.MonkeyPatch, **job: Any) -> None:
        # a worker owns its process: what it sets there is put back, or not done, in a test
        monkeypatch.setattr("pipes.loader2.worker.install_forwarding", lambda send, number: None)
        monkeypatch.setattr("pipes.stages.collating._stack", lambda samples: samples)
        monkeypatch.setattr("pipes.loader2.dealing.DealtSource.fetch", None, raising=False)
        self.channel, theirs = Channel.pair()
        settings = {
            "generation": 0,
            "max_bytes": 1 << 30,
            "shared": 0,
            "snapshot_every": 4,
            "snapshot_seconds": 1e9,
            **job,
        }
        page, descriptor = Page.create()
        self.ledger = page.ledger
        worker = _Worker(theirs, Job(ship(graph), WorkerInfo(1, 0), **settings), Page(descriptor))
        self.receiver = Receiver(8)

        def serve() -> None:
            with contextlib.suppress(ChannelClosed):
                worker.serve()

        self.thread = threading.Thread(target=serve)
        self.thread.start()
        self.theirs = theirs

    def begin(self, states: dict[int, StreamState], credits: int, iteration: int = 1, streams: int = 2) -> None:
        plan = Plan(seed=1, epoch=0, streams=streams)
        reached = self.ledger.granted, self.ledger.own
        self.send(Kind.EPOCH, [pickle.dumps((iteration, plan, list(states.items()), credits, None, *reached))])

    def credit(self, batches: int, own: int = 0) -> None:
        self.ledger.add(batches, own, self.receiver.returned())
        if self.ledger.to_wake:
            self.send(Kind.CREDIT)

    def send(self, kind: Kind, parts: list[bytes] | None = None) -> None:
        self.ledger.announce()
        self.channel.send(kind, parts or [])

    def next(self) -> Message:
        return self.channel.recv(timeout=PATIENCE)

    def batch(self) -> tuple[int, int, Any, Any]:
        """Return (stream, given, snapshot, output) of the next message, which must be a batch."""
        message = self.next()
        assert message.kind == Kind.BATCH
        _, stream, given, size = BATCH_HEAD.unpack_from(message.body)
        snapshot = message.body[BATCH_HEAD.size : BATCH_HEAD.size + size]
        output = self.receiver.unpack(memoryview(message.body)[BATCH_HEAD.size + size :], message.fds)
        return stream, given, pickle.loads(snapshot) if snapshot else None, output

    def is_silent(self) -> bool:
        try:
            self.channel.recv(timeout=0.2)
        except TimeoutError:
            return True
        return False

    def stop(self) -> None:
        self.channel.post(Kind.STOP)
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self.channel.close()
        self.theirs.close()


@pytest.fixture
def mains(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Main] = []

    def make(graph: IterDataPipe[Any], **job: Any) -> Main:
        made.append(Main(graph, monkeypatch, **job))
        return made[-1]

    yield make
    for main in made:
        main.stop()


def numbers(count: int = 10) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).sharding_filter()


FRESH = {0: StreamState(), 1: StreamState()}


def test_it_sends_in_turn_as_credits_allow(mains: Any) -> None:
    main = mains(numbers(5))
    main.begin(FRESH, credits=2)
    assert [main.batch()[::3], main.batch()[::3]] == [(0, 0), (1, 1)]
    main.credit(9, own=1)
    assert [main.batch()[::3] for _ in range(3)] == [(0, 2), (1, 3), (0, 4)]
    ends = [main.next() for _ in range(2)]
    assert [(end.kind, EVENT_HEAD.unpack(end.body)) for end in ends] == [(Kind.END, (1, 1, 2)), (Kind.END, (1, 0, 3))]
    assert main.is_silent()


def test_snapshots_come_every_so_many_outputs(mains: Any) -> None:
    main = mains(numbers(40), snapshot_every=4)
    main.begin({0: StreamState()}, credits=40, streams=1)
    batches = [main.batch() for _ in range(12)]
    assert [given for _, given, snapshot, _ in batches if snapshot is not None] == [4, 8, 12]
    assert [snapshot[0] for _, _, snapshot, _ in batches if snapshot] == [4, 8, 12]


def test_a_new_epoch_replaces_the_old_at_once(mains: Any) -> None:
    main = mains(numbers(1000))
    main.begin(FRESH, credits=3)
    for _ in range(3):
        main.batch()
    main.begin(FRESH, credits=1, iteration=2)
    message = main.next()
    assert BATCH_HEAD.unpack_from(message.body)[:3] == (2, 0, 1)
    assert main.is_silent()


def test_bytes_on_the_way_hold_it_back_but_for_one(mains: Any) -> None:
    main = mains(numbers(20).map(lambda x: bytes(1000)), max_bytes=2500)
    main.begin({0: StreamState()}, credits=20, streams=1)
    for _ in range(3):
        main.batch()
    assert main.is_silent()
    main.credit(0, own=2)
    main.batch()
    main.batch()
    assert main.is_silent()


def test_an_error_ends_the_iteration_and_not_the_worker(mains: Any) -> None:
    main = mains(numbers(10).map(lambda x: 1 // (3 - x)))
    main.begin(FRESH, credits=20)
    for _ in range(3):
        main.batch()
    message = main.next()
    assert message.kind == Kind.ERROR
    assert EVENT_HEAD.unpack_from(message.body) == (1, 1, 1)
    error = unpack_error(bytes(message.body[EVENT_HEAD.size :]))
    assert isinstance(error, ZeroDivisionError)
    assert "output 1 of stream 1, epoch 0" in error.__notes__
    assert main.is_silent()
    main.begin(FRESH, credits=1, iteration=2)
    assert main.batch()[::3] == (0, 0)


def test_an_error_of_the_opening_is_one_of_the_stream(mains: Any) -> None:
    main = mains(numbers(10))
    main.begin({0: StreamState({"1:ShardingFilter": {"given": -1}}, 0, 0)}, credits=1)
    message = main.next()
    assert message.kind == Kind.ERROR
    assert "damaged" in str(unpack_error(bytes(message.body[EVENT_HEAD.size :])))


def test_it_goes_on_from_a_state(mains: Any) -> None:
    main = mains(numbers(40).map(with_draws).batch(2), snapshot_every=3)
    main.begin(FRESH, credits=8)
    batches = [main.batch() for _ in range(8)]
    main.begin({0: StreamState(None, 0, 2), 1: StreamState(None, 0, 3)}, credits=3, iteration=2)
    again = [main.batch() for _ in range(3)]
    assert [output for *_, output in again] == [batches[4][3], batches[6][3], batches[7][3]]


def test_main_s_end_ends_it(mains: Any) -> None:
    main = mains(numbers(10))
    main.channel.close()
    main.thread.join(PATIENCE)
    assert not main.thread.is_alive()


def test_a_fatal_iteration_is_no_iteration() -> None:
    assert FATAL < 0
