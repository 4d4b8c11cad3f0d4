"""Messages and descriptors over a channel, with peers that stall, die in the middle of a message, or never read."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipes.errors import ChannelClosed
from pipes.loader2.channel import Channel, Message, close_descriptors, wait

pytestmark = pytest.mark.usefixtures("no_residue")

LIMIT = 30.0


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    a, b = Channel.pair()
    yield a, b
    a.close()
    b.close()


@contextmanager
def child(act: Callable[[Channel], None]) -> Iterator[tuple[Channel, int]]:
    """A forked process that runs `act` on its end of a channel; yields our end and the process's id."""
    ours, theirs = Channel.pair()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ours.close()
            act(theirs)
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    try:
        yield ours, pid
    finally:
        ours.close()
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def everything(channel: Channel) -> list[Message]:
    """All messages until the peer is gone."""
    messages: list[Message] = []
    while True:
        assert wait([channel], timeout=LIMIT)
        try:
            messages += channel.feed()
        except ChannelClosed:
            return messages


def memory_file(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def read_and_close(fd: int) -> bytes:
    try:
        return os.pread(fd, 1000, 0)
    finally:
        os.close(fd)


@given(st.lists(st.tuples(st.integers(0, 255), st.lists(st.binary(max_size=200), max_size=4), st.integers(0, 3))))
def test_messages_arrive_whole_in_order_with_their_own_descriptors(
    sent: list[tuple[int, list[bytes], int]],
) -> None:
    a, b = Channel.pair()
    try:
        for number, (kind, parts, files) in enumerate(sent):
            a.post(kind, parts, [memory_file(b"%d.%d" % (number, i)) for i in range(files)])
        received: list[Message] = []
        while len(received) < len(sent):
            received += b.feed()
            a.flush()
        for number, (message, (kind, parts, files)) in enumerate(zip(received, sent, strict=True)):
            assert (message.kind, bytes(message.body)) == (kind, b"".join(parts))
            assert [read_and_close(fd) for fd in message.fds] == [b"%d.%d" % (number, i) for i in range(files)]
        assert b.feed() == []
    finally:
        a.close()
        b.close()


def test_a_message_of_80_mb_arrives_without_a_read_that_waits() -> None:
    body = os.urandom(1 << 20) * 80

    def send(channel: Channel) -> None:
        channel.send(1, [b"first"])
        channel.send(2, [body[: 1 << 20], body[1 << 20 :]])
        channel.send(3)

    with child(send) as (channel, _):
        messages = everything(channel)
    assert [message.kind for message in messages] == [1, 2, 3]
    assert messages[1].body == body


def test_recv_waits_and_leaves_what_came_with_it(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        b.recv(timeout=0.01)
    for kind in range(3):
        a.send(kind)
    assert b.recv().kind == 0
    assert wait([b], timeout=0) == [b]
    assert [message.kind for message in b.feed()] == [1, 2]
    timer = threading.Timer(0.05, a.send, (9,))
    timer.start()
    assert b.recv(timeout=LIMIT).kind == 9
    timer.join()


def test_signals_do_not_tear_a_large_message() -> None:
    ticks = []
    previous = signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    body = bytes(30 << 20)

    def send(channel: Channel) -> None:
        for _ in range(5):
            channel.send(1, [body])

    with child(send) as (channel, _):
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            sizes = [len(channel.recv(timeout=LIMIT).body) for _ in range(5)]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
    assert sizes == [len(body)] * 5
    assert ticks


def test_posts_to_a_stuck_peer_do_not_wait_and_arrive_in_order_later(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    for number in range(5000):
        a.post(1, [struct.pack("<I", number), bytes(1000)])
    assert a.pending > 1_000_000
    numbers: list[int] = []
    while len(numbers) < 5000:
        # `wait` writes what was posted as soon as the peer makes room for it.
        assert wait([a, b], timeout=LIMIT) == [b]
        numbers += [struct.unpack_from("<I", message.body)[0] for message in b.feed()]
    assert numbers == list(range(5000))
    assert a.pending == 0


def test_wait_wakes_for_other_descriptors_and_when_time_is_up(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    readable, writable = os.pipe()
    try:
        assert wait([a, b], [readable], timeout=0.01) == []
        os.write(writable, b"x")
        assert wait([a, b], [readable], timeout=LIMIT) == [readable]
    finally:
        os.close(readable)
        os.close(writable)
    b.close()
    assert wait([a], timeout=LIMIT) == [a]
    assert wait([b], timeout=LIMIT) == [b]


def test_what_arrived_whole_is_handed_over_after_the_peer_died() -> None:
    def send(channel: Channel) -> None:
        channel.send(1, [b"one"], [memory_file(b"a")])
        channel.send(2, [b"two"])
        os.kill(os.getpid(), signal.SIGKILL)

    with child(send) as (channel, pid):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        # Silent: reading is what reports the death, after what can still be read.
        channel.post(3, [b"credit"], [memory_file(b"lost")])
        messages = channel.feed()
        assert [(message.kind, message.body) for message in messages] == [(1, b"one"), (2, b"two")]
        assert read_and_close(messages[0].fds[0]) == b"a"
        with pytest.raises(ChannelClosed):
            channel.feed()
        with pytest.raises(ChannelClosed):
            channel.recv()
        with pytest.raises(ChannelClosed):
            channel.send(4, (), [memory_file(b"lost")])


@pytest.mark.parametrize("read_first", [False, True], ids=["never read", "half read"])
def test_a_peer_killed_in_the_middle_of_a_message_with_descriptors(read_first: bool) -> None:
    def send(channel: Channel) -> None:
        channel.send(1, [b"whole"], [memory_file(b"a")])
        channel.send(2, [bytes(50 << 20)], [memory_file(b"b"), memory_file(b"c")])

    with child(send) as (channel, pid):
        messages = [channel.recv(timeout=LIMIT)]
        if read_first:
            assert wait([channel], timeout=LIMIT)
            messages += channel.feed()
        os.kill(pid, signal.SIGKILL)
        messages += everything(channel)
        assert [message.body for message in messages] == [b"whole"]
        close_descriptors(messages[0].fds)


def test_close_releases_queued_undelivered_and_unparsed_descriptors() -> None:
    a, b = Channel.pair()
    b.send(1, [b"x"], [memory_file(b"1")])
    b.send(2, [b"y"], [memory_file(b"2")])
    close_descriptors(a.recv().fds)
    while a.flush():
        a.post(3, [bytes(1 << 16)], [memory_file(b"3")])
    for _ in range(2):
        a.close()
        b.close()
    assert a.closed
    with pytest.raises(ChannelClosed):
        a.feed()
    with pytest.raises(ChannelClosed):
        b.send(1, (), [memory_file(b"4")])


def test_descriptors_are_closed_on_exec_and_in_the_sender(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    fd = memory_file(b"x")
    a.send(1, (), [fd])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    (received,) = b.recv().fds
    assert fcntl.fcntl(received, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(received)


def test_too_many_descriptors_for_one_message(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(ValueError, match="at most 253 descriptors, not 254"):
        pair[0].send(1, (), [os.dup(0) for _ in range(254)])


def test_a_descriptor_that_cannot_be_taken_is_an_error_that_says_what_to_do() -> None:
    def receive(channel: Channel) -> None:
        channel.send(1)
        wait([channel], timeout=LIMIT)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with suppress(OSError):
            while True:
                os.dup(0)
        with pytest.raises(OSError, match="raise `ulimit -n`"):
            channel.feed()
        with pytest.raises(ChannelClosed):
            channel.feed()

    with child(receive) as (channel, pid):
        channel.recv(timeout=LIMIT)
        channel.send(1, (), [memory_file(b"x")])
        assert os.waitpid(pid, 0) == (pid, 0)


def test_bytes_that_are_no_message_are_refused() -> None:
    left, right = socket.socketpair()
    channel = Channel(left)
    right.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ChannelClosed, match="not the start of a message"):
        channel.feed()
    with pytest.raises(ChannelClosed):
        channel.feed()
    channel.close()
    right.close()


@pytest.mark.parametrize("step", ["_read", "_parse"])
def test_an_interrupted_read_closes_the_channel(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    a, b = pair
    a.send(1, [b"x"], [memory_file(b"1")])

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(b, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        b.feed()
    monkeypatch.undo()
    with pytest.raises(ChannelClosed):
        b.feed()
    with pytest.raises(ChannelClosed):
        b.send(2)


def test_close_from_another_thread_ends_a_wait(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    stop = threading.Timer(0.05, b.close)
    stop.start()
    with pytest.raises(ChannelClosed):
        a.recv(timeout=LIMIT)
    stop.join()
