"""Workers killed at every point of the transport, and consumers that keep everything: nothing is lost, torn or left."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pipes.errors import ChannelClosed
from pipes.loader2 import packing
from pipes.loader2.channel import Channel, wait
from pipes.loader2.collate import collating_into, default_collate
from pipes.loader2.packing import Receiver, pack
from pipes.loader2.slabs import Slab, SlabPool

BATCH, RELEASE = 1, 2
LIMIT = 30.0


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    # The full `no_residue` takes half a second a test; `worker` waits for its process itself.
    before, threads = len(os.listdir("/proc/self/fd")), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("pipes-")]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def batch_number(number: int, rows: int = 8) -> Any:
    """A batch with a stack in the slab, an array copied into it, and inline leaves, all equal to `number`."""
    image = torch.full((45, 100), number, dtype=torch.int16)
    batch = default_collate([{"x": image, "y": number, "name": str(number)}] * rows)
    return {**batch, "more": torch.full((17_000 + 100 * (number % 7),), float(number))}


def check(batch: Any, number: int) -> None:
    assert (batch["x"] == number).all()
    assert (batch["y"] == number).all()
    assert (batch["more"] == number).all()
    assert batch["name"] == [str(number)] * 8


def serve(channel: Channel, prefetch: int, make: Callable[[int], Any] = batch_number) -> None:
    """What a worker does, for ever: collate into the pool, pack, send, take back."""
    torch.set_num_threads(1)
    pool = SlabPool()
    credits, number = prefetch, 0
    while True:
        for message in channel.feed() if credits else [channel.recv()]:
            credits += 1
            pool.take_back(memoryview(message.body).cast("Q"))
        with collating_into(pool):
            packed = pack(make(number), pool)
        channel.send(BATCH, packed.parts, packed.fds)
        credits -= 1
        number += 1


@contextmanager
def worker(act: Callable[[Channel], None]) -> Iterator[tuple[Channel, int]]:
    ours, theirs = Channel.pair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            act(theirs)
        except ChannelClosed:
            os._exit(0)
        finally:
            os._exit(1)
    theirs.close()
    try:
        yield ours, pid
    finally:
        ours.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def drain(channel: Channel, receiver: Receiver, kept: list[Any]) -> None:
    """Keep every batch until the worker is gone."""
    while True:
        assert wait([channel], timeout=LIMIT)
        try:
            messages = channel.feed()
        except ChannelClosed:
            return
        for message in messages:
            kept.append(receiver.unpack(message.body, message.fds))
            channel.post(RELEASE, [array("Q", receiver.returned())])


def kill_at(owner: Any, name: str, when: str, at: int) -> Callable[[Channel], None]:
    """A worker that is killed just before or after its `at`-th call of `owner.name`."""

    def act(channel: Channel) -> None:
        count, real = 0, getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at and when == "before":
                die()
            result = real(*args, **kwargs)
            if count == at:
                die()
            return result

        setattr(owner, name, call)
        serve(channel, prefetch=3)

    return act


POINTS = {
    "before a slab is opened": (SlabPool, "open", "before"),
    "after a slab was opened": (SlabPool, "open", "after"),
    "while the collate fills a slab": (Slab, "allocate", "after"),
    "between collate and pack": (packing, "collect", "before"),
    "while a batch is pickled": (packing, "collect", "after"),
    "while leaves are written": (packing, "_write", "after"),
    "before a slab is lent": (SlabPool, "lend", "before"),
    "after a slab was lent": (SlabPool, "lend", "after"),
    "before a message is written": (Channel, "_write", "before"),
    "with a message and its descriptor on the way": (Channel, "_write", "after"),
    "holding credits": (SlabPool, "take_back", "before"),
    "after a slab came back": (SlabPool, "take_back", "after"),
}


@pytest.mark.race
@pytest.mark.parametrize("at", [1, 6])
@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS.keys())
def test_a_worker_killed_at_a_point(point: tuple[Any, str, str], at: int) -> None:
    receiver, kept = Receiver(max_held=4), []
    with worker(kill_at(*point, at)) as (channel, _):
        drain(channel, receiver, kept)
        for number, batch in enumerate(kept):
            check(batch, number)
            batch["x"] += 1
        assert len(kept) >= at // 3 - 1


@pytest.mark.race
@pytest.mark.parametrize("large", [False, True], ids=["small", "larger than the socket's buffer"])
def test_a_worker_killed_at_any_moment(large: bool) -> None:
    """Also in the middle of a message, which is what the inline text of 3 MB (in pieces under 64 KiB) is for."""
    rng = random.Random(0)

    def make(number: int) -> Any:
        # Distinct texts: one object would travel once.
        return {**batch_number(number), "text": [f"{number}{i}" + "t" * 60_000 for i in range(50 if large else 0)]}

    for _ in range(15):
        receiver, kept = Receiver(max_held=3), []
        with worker(lambda channel: serve(channel, prefetch=3, make=make)) as (channel, pid):
            deadline = time.monotonic() + rng.random() * 0.1
            while (left := deadline - time.monotonic()) > 0 or not kept:
                if wait([channel], timeout=max(left, 0.001)):
                    for message in channel.feed():
                        kept.append(receiver.unpack(message.body, message.fds))
                        channel.post(RELEASE, [array("Q", receiver.returned())])
            os.kill(pid, signal.SIGKILL)
            drain(channel, receiver, kept)
        for number, batch in enumerate(kept):
            check(batch, number)


def test_a_consumer_that_keeps_2000_batches_needs_few_descriptors_and_little_shared_memory() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    receiver, kept = Receiver(max_held=6), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with worker(lambda channel: serve(channel, prefetch=2)) as (channel, _):
            while len(kept) < 2000:
                assert wait([channel], timeout=LIMIT)
                for message in channel.feed():
                    kept.append(receiver.unpack(message.body, message.fds))
                    channel.post(RELEASE, [array("Q", receiver.returned())])
            assert receiver.held == 6
            # The first batch took two slabs: the collate could not know what would come beside its stack.
            assert receiver.copied_batches == len(kept) - 5
            assert receiver.loans.nbytes < 16 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for number, batch in enumerate(kept):
        check(batch, number)


def test_a_consumer_that_keeps_only_labels_has_no_batch_copied() -> None:
    receiver, labels = Receiver(max_held=2), []
    with worker(lambda channel: serve(channel, prefetch=2)) as (channel, _):
        while len(labels) < 1000:
            assert wait([channel], timeout=LIMIT)
            for message in channel.feed():
                batch = receiver.unpack(message.body, message.fds)
                labels.append((batch["y"], batch["name"]))
                del batch
                channel.post(RELEASE, [array("Q", receiver.returned())])
        assert receiver.copied_batches == 0
        assert receiver.loans.nbytes < 8 << 20
    assert [int(label[0]) for label, _ in labels] == list(range(len(labels)))


def test_a_batch_of_80_mb() -> None:
    def make(number: int) -> Any:
        return {"t": torch.full((20_000_000,), float(number)), "b": bytes([number]) * 1_000_000}

    receiver = Receiver(max_held=2)
    with worker(lambda channel: serve(channel, prefetch=1, make=make)) as (channel, _):
        for number in range(3):
            message = channel.recv(timeout=LIMIT)
            assert len(message.body) < 10_000
            batch = receiver.unpack(message.body, message.fds)
            assert (batch["t"] == number).all()
            assert batch["b"] == bytes([number]) * 1_000_000
            del batch
            channel.post(RELEASE, [array("Q", receiver.returned())])
        assert receiver.loans.nbytes < 200 << 20
