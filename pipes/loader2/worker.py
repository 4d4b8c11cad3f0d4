"""What runs in a worker process: the outputs of its streams, in turn, sent as credits allow.

Contract
- Success. After EPOCH the worker runs its streams in the order of `RoundRobin` and sends each output as one BATCH; a
  stream's end is one END. It sends no more than it has credits for, and no further output while outputs of more than
  `max_bytes` are on the way, except when none is. Snapshots go with the outputs after which they were taken.
- Failure. Whatever a stream raises, SystemExit included, is sent as ERROR in its place in the order, and so is an
  output that cannot be packed; the worker then waits for the next EPOCH. If main is gone, the worker ends.
- Pause. After PAUSE the output in the making is sent, and none is begun until RESUME or the next EPOCH.
- Stop. STOP, and the end of the channel, end the worker at the next message it looks for: between two outputs.
- Threads. The worker's own code runs in one thread; log records and warnings may come from any.
"""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipes.context import Context
from pipes.datapipe import IterDataPipe
from pipes.errors import ChannelClosed, add_note
from pipes.loader2 import fault_points
from pipes.loader2.channel import Channel, Message
from pipes.loader2.collate import collating_into, default_collate
from pipes.loader2.copies import Copies
from pipes.loader2.dealing import DealtSource, Exhausted
from pipes.loader2.forwarding import install_forwarding
from pipes.loader2.merge import RoundRobin
from pipes.loader2.messages import BATCH_HEAD, EVENT_HEAD, FATAL, Kind
from pipes.loader2.packing import Packed, pack
from pipes.loader2.progress import Reached
from pipes.loader2.random import seeds_of
from pipes.loader2.remote_error import pack_error
from pipes.loader2.sharding import adapted
from pipes.loader2.sharing import receive, with_listings
from pipes.loader2.shipping import unship
from pipes.loader2.slabs import SlabPool
from pipes.loader2.streams import Plan, Stream, StreamState, collates_last, given_up
from pipes.loader2.whereabouts import Page, Phase, Place, TracedContext, Tracing
from pipes.shares import reading_a_share
from pipes.sources.listing import Listing
from pipes.stages import collating

__all__ = ["Job", "WorkerInfo", "work"]


@dataclass(frozen=True)
class WorkerInfo:
    """Which worker this is; what `worker_init_fn` and `worker_reset_fn` get."""

    num_workers: int
    worker_id: int


@dataclass
class Job:
    """What a worker needs for its whole life; it travels once, the graph as `ship` packed it for all workers."""

    graph: bytes
    info: WorkerInfo
    generation: int
    max_bytes: int
    shared: int
    snapshot_every: int
    init_fn: Callable[[Any, WorkerInfo], Any] | None = None
    reset_fn: Callable[..., Any] | None = None
    snapshot_seconds: float = field(default=1.0)


def work(number: int, sock: socket.socket, payload: bytes) -> None:
    """Serve main over `sock` as worker `number` until it says STOP or is gone."""
    channel = Channel(sock)
    try:
        try:
            page = Page(channel.recv().fds[0])
            fault_points.reach("at the start")
            job: Job = unship(payload)
            worker = _Worker(channel, job, page)
        except BaseException as error:
            channel.send(Kind.ERROR, [EVENT_HEAD.pack(FATAL, 0, 0), pack_error(error, f"worker {number}")])
            return
        with reading_a_share():
            worker.serve()
    except ChannelClosed:
        return
    finally:
        channel.close()


class _Worker:
    def __init__(self, channel: Channel, job: Job, page: Page) -> None:
        self._channel, self._job, self._page = channel, job, page
        self._number = job.info.worker_id
        self._sending = threading.Lock()
        self._notes: deque[tuple[Kind, bytes]] = deque()
        install_forwarding(self._note, self._number)
        self._pool = SlabPool(job.generation, ended=page.ledger.take_loans)
        page.move(Phase.UNPICKLING)
        fault_points.reach("before the graph is unpickled")
        self._listings: dict[str, Listing] = {}
        for _ in range(job.shared):
            receive(channel.recv(), self._listings)
        graph = unship(job.graph)
        fault_points.reach("after the graph is unpickled")
        page.move(Phase.INIT_FN)
        self._graph: IterDataPipe[Any] = graph if job.init_fn is None else adapted(graph, job.init_fn, job.info)
        self._iteration = FATAL
        self._copies = Copies()
        self._streams: dict[int, Stream] = {}
        self._turns = RoundRobin({})
        self._credits = 0
        # What of the ledger and of the channel was taken in.
        self._granted = self._own = self._received = 0
        self._sizes: deque[int] = deque()
        self._dealt: dict[tuple[int, int], tuple[bool | None, Any]] = {}
        self._snapshots: dict[int, tuple[int, float]] = {}
        self._stopped = self._paused = self._told_of_draws = False
        collating.stack_with(default_collate)
        DealtSource.fetch = staticmethod(self._fetch)
        fault_points.reach("ready")

    def serve(self) -> None:
        while not self._stopped:
            self._take_in()
            if self._may_produce():
                self._produce()
            elif not self._stopped:
                self._sleep()

    def _take_in(self) -> None:
        """Handle the messages that have arrived, and take what main allows."""
        ledger = self._page.ledger
        if ledger.announced != self._received:
            for message in self._channel.feed():
                self._handle(message)
        granted, own = ledger.granted, ledger.own
        if granted != self._granted or own != self._own:
            fault_points.reach("before handling", Kind.CREDIT)
            self._credits += granted - self._granted
            for _ in range(own - self._own):
                self._sizes.popleft()
            self._granted, self._own = granted, own
            fault_points.reach("after handling", Kind.CREDIT)

    def _sleep(self) -> None:
        """Wait for a message, unless something came since the last look."""
        self._page.move(Phase.WAITING)
        with self._page.ledger.falling_asleep(self._own + (len(self._sizes) + 1) // 2):
            self._take_in()
            if not self._stopped and not self._may_produce():
                self._handle(self._channel.recv())

    def _may_produce(self) -> bool:
        return (
            self._credits > 0
            and not self._paused
            and self._turns.turn() is not None
            and (not self._sizes or sum(self._sizes) < self._job.max_bytes)
        )

    def _handle(self, message: Message) -> None:
        kind = message.kind
        self._received += 1
        if kind == Kind.CREDIT:
            return
        fault_points.reach("before handling", kind)
        if kind == Kind.EPOCH:
            self._begin(*pickle.loads(message.body))
        elif kind == Kind.DEAL:
            stream, number, has, element = pickle.loads(message.body)
            self._dealt[stream, number] = (has, element)
        elif kind in (Kind.PAUSE, Kind.RESUME):
            self._paused = kind == Kind.PAUSE
        elif kind == Kind.STOP:
            self._drop_streams()
            self._stopped = True
        fault_points.reach("after handling", kind)

    def _begin(
        self,
        iteration: int,
        plan: Plan,
        states: list[tuple[int, StreamState]],
        credits: int,
        traced: Place | None,
        granted: int,
        own: int,
    ) -> None:
        if self._job.reset_fn is None:
            states = list(given_up(self._streams, states))
        self._drop_streams()
        self._iteration, self._credits, self._paused = iteration, credits, False
        self._granted, self._own = granted, own
        self._sizes.clear()
        self._dealt.clear()
        self._snapshots.clear()
        self._plan, self._states = with_listings(plan, self._listings), dict(states)
        self._traced = traced
        self._tracing: Tracing | None = None
        self._epoch_graph: IterDataPipe[Any] | None = None
        self._collates_last = False
        self._turns = RoundRobin(
            {number: state.given for number, state in states}, [number for number, state in states if state.ended]
        )

    def _drop_streams(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._turns = RoundRobin({})

    def _stream(self, number: int) -> Stream:
        """Return the running stream, opened at its first turn: what it raises then is its error."""
        if number not in self._streams:
            if self._epoch_graph is None:
                self._page.move(Phase.RESET_FN)
                self._epoch_graph = self._reset_graph()
                self._collates_last = collates_last(self._epoch_graph)
            self._page.move(Phase.OUTPUT, number, self._states[number].given)
            make: Callable[..., Context] = Context
            if self._traced is not None and self._traced[0] == number:
                self._tracing = Tracing(self._page)
                make = partial(TracedContext, self._tracing)
            shares = len(self._states) > 1
            graph = self._copies.of(self._epoch_graph, number) if shares else self._epoch_graph
            stream = Stream(graph, self._plan, number, self._states[number], shares=shares, make=make)
            self._streams[number] = stream
            self._snapshots[number] = (stream.given, time.monotonic())
            if stream.keeps_numbers:
                self._send(
                    Kind.BEGUN, [EVENT_HEAD.pack(self._iteration, number, stream.given), self._snapshot_now(stream)]
                )
        return self._streams[number]

    def _reset_graph(self) -> IterDataPipe[Any]:
        job = self._job
        if job.reset_fn is None:
            return self._graph
        seeds = seeds_of(self._plan.seed, self._plan.epoch).spawn(self._number)
        return adapted(self._graph, job.reset_fn, job.info, seeds)  # type: ignore[no-any-return]

    def _produce(self) -> None:
        number = self._turns.turn()
        assert number is not None
        given = self._states[number].given
        try:
            stream = self._stream(number)
            given = stream.given
            self._page.move(Phase.OUTPUT, number, given)
            fault_points.reach("before the output")
            try:
                with collating_into(self._pool) if self._collates_last else nullcontext():
                    output = stream.next()
            except StopIteration:
                self._tell_of_counts(number, given)
                self._turns.end()
                counted = stream.counted()
                numbers = pickle.dumps(counted) if counted else b""
                self._send(Kind.END, [EVENT_HEAD.pack(self._iteration, number, given), numbers])
                return
            self._page.move(Phase.SENDING, number, given)
            fault_points.reach("after the output")
            if self._tracing is not None and (number, given) == self._traced:
                self._tracing.on, self._tracing = False, None
            self._tell_of_draws(stream)
            snapshot = self._snapshot_of(stream)
            packed = self._packed(output, stream)
            del output
        except ChannelClosed:
            raise
        except Abandoned as abandoned:
            self._handle(abandoned.message)
            return
        except BaseException as error:
            loose = self._streams[number].loose_notes if number in self._streams else []
            notes = [*loose, self._plan.note(number, given)]
            self._tell_of_counts(number, given)
            content = pack_error(error, f"worker {self._number}", notes)
            self._send(Kind.ERROR, [EVENT_HEAD.pack(self._iteration, number, given), content])
            del error
            self._drop_streams()
            return
        self._tell_of_counts(number, given)
        head = BATCH_HEAD.pack(self._iteration, number, stream.given, len(snapshot))
        self._credits -= 1
        self._turns.advance()
        self._send(Kind.BATCH, [head, snapshot, *packed.parts], packed.fds)
        self._sizes.append(packed.nbytes)

    def _snapshot_of(self, stream: Stream) -> bytes:
        """Return a pickled snapshot when one is due, else nothing."""
        at, when = self._snapshots[stream.number]
        now = time.monotonic()
        if stream.given - at < self._job.snapshot_every and now - when < self._job.snapshot_seconds:
            return b""
        self._snapshots[stream.number] = (stream.given, now)
        fault_points.reach("before the snapshot")
        snapshot = self._snapshot_now(stream)
        fault_points.reach("after the snapshot")
        return snapshot

    def _snapshot_now(self, stream: Stream) -> bytes:
        taken = stream.snapshot()
        snapshot: Reached = taken
        if self._job.init_fn is not None or self._job.reset_fn is not None:
            # Main has another graph, and could not make a table of these captures.
            snapshot = taken[0], stream.table(taken)
        return pickle.dumps(snapshot, protocol=5)

    def _packed(self, output: Any, stream: Stream) -> Packed:
        try:
            return pack(output, self._pool)
        except Exception as error:
            add_note(error, f"while the output of stage {stream.last} was sent to the main process")
            raise

    def _tell_of_draws(self, stream: Stream) -> None:
        if stream.drew_above is not None and not self._told_of_draws:
            self._told_of_draws = True
            event = EVENT_HEAD.pack(self._iteration, stream.number, 0)
            self._send(Kind.DREW, [event, stream.drew_above.encode()])

    def _tell_of_counts(self, number: int, given: int) -> None:
        """Send what the stages of a stream have counted, when it is more than main knows of."""
        stream, state = self._streams.get(number), self._states[number]
        counts = {} if stream is None else stream.counts()
        if counts and counts != state.counts:
            self._states[number] = replace(state, counts=counts)
            self._send(Kind.COUNTS, [EVENT_HEAD.pack(self._iteration, number, given), pickle.dumps(counts)])

    def _fetch(self, stream: int, number: int) -> Any:
        """Ask main for element `number` of `stream`, which only main can read."""
        self._send(Kind.NEED, [EVENT_HEAD.pack(self._iteration, stream, number)])
        while (stream, number) not in self._dealt:
            message = self._channel.recv()
            if message.kind in (Kind.EPOCH, Kind.STOP):
                raise Abandoned(message)
            self._handle(message)
        has, element = self._dealt.pop((stream, number))
        if not has:
            raise DealFailed if has is None else Exhausted
        return element

    def _send(self, kind: Kind, parts: list[bytes], fds: list[int] | None = None) -> None:
        fault_points.reach("before sending", kind)
        if fds:
            fault_points.reach("before the descriptors are sent")
        with self._sending:
            self._page.ledger.count_sending()
            self._channel.send(kind, parts, fds or ())
        if fds:
            fault_points.reach("after the descriptors are sent")
        fault_points.reach("after sending", kind)
        self._flush_notes()

    def _note(self, kind: str, payload: bytes) -> None:
        self._notes.append((Kind.LOG if kind == "log" else Kind.WARNING, payload))
        self._flush_notes()

    def _flush_notes(self) -> None:
        # A record made while this thread is sending (by a finalizer, say) waits for that send to end.
        while self._notes and self._sending.acquire(blocking=False):
            try:
                kind, payload = self._notes.popleft()
                self._page.ledger.count_sending()
                self._channel.send(kind, [payload])
            except IndexError:
                return
            finally:
                self._sending.release()


class DealFailed(BaseException):
    """Main could not read the element, and raises why when it sees this; no stage may catch it."""


class Abandoned(BaseException):
    """The iteration that a stream belongs to ended while it waited for main; no stage may catch it."""

    def __init__(self, message: Message) -> None:
        super().__init__()
        self.message = message
