"""The words that main and a worker share: nothing lost, nothing twice, and no wake-up missed."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService
from pipes.loader2.channel import Channel
from pipes.loader2.guard import sleep_until
from pipes.loader2.iterator import NOTHING
from pipes.loader2.ledger import LEDGER_BYTES, Ledger
from pipes.loader2.messages import Kind
from pipes.loader2.slot import Slot
from pipes.loader2.whereabouts import Page, Phase

PATIENCE = 20.0


def sides() -> tuple[Ledger, Ledger]:
    memory = memoryview(bytearray(LEDGER_BYTES))
    return Ledger(memory), Ledger(memory)


@given(st.lists(st.one_of(st.none(), st.integers(0, 500)), max_size=20))
def test_each_loan_comes_back_once_and_in_order_however_full_the_ring(steps: list[int | None]) -> None:
    main, worker = sides()
    given_back, taken = 0, list[int]()
    for step in steps:
        if step is None:
            taken.extend(worker.take_loans())
        else:
            main.add(0, 0, list(range(given_back, given_back + step)))
            given_back += step
    while len(taken) < given_back:
        main.add(0, 0, [])
        found = list(worker.take_loans())
        assert found
        taken.extend(found)
    assert taken == list(range(given_back))
    assert list(worker.take_loans()) == []


def test_each_count_has_a_word_of_its_own() -> None:
    main, worker = sides()
    main.add(batches=3, own=1, loans=[7])
    for _ in range(5):
        main.announce()
    worker.count_sending()
    assert list(worker.take_loans()) == [7]
    with worker.falling_asleep(8):
        main.add(batches=0, own=7, loans=[9])
        assert main.to_wake
    assert (worker.granted, worker.own, worker.announced, main.sent, main.to_wake) == (3, 8, 5, 1, False)
    assert list(worker.take_loans()) == [9]


def test_what_is_written_of_a_page_is_not_read_as_the_other_half() -> None:
    page, descriptor = Page.create()
    worker = Page(descriptor)
    worker.move(Phase.OUTPUT, 1 << 60, 1 << 60)
    worker.note("s" * 5000, "e" * 5000)
    assert (page.ledger.granted, page.ledger.own, page.ledger.announced, page.ledger.to_wake) == (0, 0, 0, False)
    before = str(page.read())
    page.ledger.add(2**40, 2**40, list(range(2**40, 2**40 + 1000)))
    page.ledger.announce()
    assert str(page.read()) == before
    assert len(list(worker.ledger.take_loans())) > 100


def test_a_worker_that_stops_waiting_is_awake() -> None:
    main, worker = sides()

    def wait() -> None:
        with worker.falling_asleep(0):
            assert main.to_wake
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert not main.to_wake


def answer(channel: Channel, ledger: Ledger, count: int) -> None:
    """Answer each grant with one message, as a worker that sleeps whenever it has nothing granted."""
    answered = 0
    pause = random.Random(1)
    while answered < count:
        if ledger.granted == answered:
            with ledger.falling_asleep(ledger.own):
                if ledger.granted == answered:
                    channel.recv(timeout=PATIENCE)
            continue
        for _ in range(pause.randrange(200)):
            pass
        channel.send(2)
        answered += 1


@pytest.mark.usefixtures("no_residue")
def test_no_wake_up_is_lost_between_processes() -> None:
    count = 5000
    page, descriptor = Page.create()
    channel, theirs = Channel.pair()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            channel.close()
            answer(theirs, Page(descriptor).ledger, count)
            code = 0
        finally:
            os._exit(code)
    os.close(descriptor)
    theirs.close()
    pause = random.Random(2)
    woken = 0
    try:
        for _ in range(count):
            # Around the moment at which the worker falls asleep.
            for _ in range(pause.randrange(300)):
                pass
            page.ledger.add(1, 0, [])
            if page.ledger.to_wake:
                woken += 1
                channel.post(1)
            assert channel.recv(timeout=PATIENCE).kind == 2
    finally:
        channel.close()
        deadline = time.monotonic() + PATIENCE
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert ended == (pid, 0)
    # Both ways were taken: with a message, and without.
    assert 0 < woken < count


def big_after_the_first(number: int) -> list[int]:
    # Inline, and more than a socket holds: sent to its end only while main reads.
    time.sleep(0.5 if number == 1 else 0)
    return [1 << 40] * (number * 200_000)


@pytest.mark.usefixtures("no_residue")
def test_main_reads_when_something_was_sent_and_not_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    feed = Channel.feed
    monkeypatch.setattr(Channel, "feed", lambda channel: reads.append(1) or feed(channel))
    pipe = IterableWrapper(range(3)).sharding_filter().map(big_after_the_first)
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(1)) as loader:
        assert next(iter(loader)) == []
        runner = loader._runner
        assert runner is not None
        reads.clear()
        assert [runner.next_ready() for _ in range(100)] == [NOTHING] * 100
        assert not reads
        seen = [NOTHING]

        def arrived() -> bool:
            seen[0] = runner.next_ready()
            return seen[0] is not NOTHING

        assert sleep_until(arrived, PATIENCE)
        assert seen[0] == big_after_the_first(1)


@pytest.mark.usefixtures("no_residue")
def test_a_worker_that_is_ahead_is_woken_for_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Kind] = []
    post = Slot.post

    def counting(slot: Slot, kind: Kind, *rest: Any) -> None:
        posted.append(kind)
        post(slot, kind, *rest)

    monkeypatch.setattr(Slot, "post", counting)
    pipe = IterableWrapper(range(80)).sharding_filter().map(str)
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(1, prefetch=8)) as loader:
        for _ in loader:
            # Time for the worker to fill up and fall asleep.
            time.sleep(0.005)
    assert 5 <= posted.count(Kind.CREDIT) <= 80 // 4 + 2
