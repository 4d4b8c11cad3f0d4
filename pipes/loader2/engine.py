"""The main process's side of the workers: start, merge in order, back-pressure, recovery, shutdown.

Contract
- Success. `next()` gives the outputs of this rank's streams in the order of `RoundRobin`, whichever worker runs them,
  or with in_order=False as they arrive, and raises StopIteration at the end. Every output comes once.
- Back-pressure. A worker holds at most `prefetch` outputs that main has not given to the user, and no further one
  while those hold more than its part of `max_bytes_in_flight`, unless it holds none.
- Failure. An error of a stream is raised at its place in the order; then the epoch is over and the next can be begun.
  A worker that dies is started again from the newest snapshot that arrived, goes past what has arrived, and a warning
  says so; after `max_restarts` of one worker in an epoch, or with on_worker_death="raise", WorkerDiedError is raised
  instead. The next epoch starts what is missing.
  With `timeout`, no output for that many seconds raises WorkerTimeoutError with the worker's Python stack; the epoch
  is over, and the next one has another process in the place of that worker.
- Pause. After `pause()` the workers end what they are making and begin nothing until `resume()`, or the next epoch.
- Stop. `close()` is bounded (2 s for workers to end by themselves, then they are killed), may be called twice and from
  any thread, and leaves no process, descriptor or shared memory but for batches that the user still holds. Ctrl-C that
  comes meanwhile is raised when that is done.
- No thread, queue or lock: all happens inside the calls, of one thread at a time, in the process of `ownership`.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from pipes.datapipe import IterDataPipe
from pipes.devices import Device
from pipes.error_policy import StageCounts, check_budget, summed
from pipes.errors import ChannelClosed, ErrorBudgetExceeded, WorkerDiedError
from pipes.loader2 import channel as channels
from pipes.loader2.channel import Message
from pipes.loader2.dealing import Dealer, Exhausted, positions_of
from pipes.loader2.delivery import AsReady, Delivery, InOrder
from pipes.loader2.forwarding import replay_log, replay_warning
from pipes.loader2.interrupts import held
from pipes.loader2.iterator import MOST_AHEAD, NOTHING
from pipes.loader2.messages import BATCH_HEAD, EVENT_HEAD, FATAL, Kind
from pipes.loader2.ownership import Owned
from pipes.loader2.progress import Progress
from pipes.loader2.recovery import Death, give_up_on
from pipes.loader2.remote_error import unpack_error
from pipes.loader2.settings import Settings
from pipes.loader2.sharing import Sharing, with_listings
from pipes.loader2.shipping import ship
from pipes.loader2.shutdown import see_off, wake_reader
from pipes.loader2.slot import Counts, Slot
from pipes.loader2.streams import Plan, StreamState

_logger = logging.getLogger("pipes.loader2")

__all__ = ["Engine"]


class Engine(Owned):
    """Runs one graph in worker processes, epoch after epoch."""

    def __init__(
        self, graph: IterDataPipe[Any], settings: Settings, workers: int, device: Device | None = None
    ) -> None:
        super().__init__()
        self._graph, self._settings = graph, settings
        self._shared = Sharing(graph)
        self._iteration = 0
        self._plan: Plan | None = None
        self._streams: dict[int, Progress] = {}
        self._delivery: Delivery = InOrder()
        self._dealer: Dealer | None = None
        self._deal_errors: dict[int, Exception] = {}
        self._told_of_copies = False
        # What was known of their streams before the newest outputs: `states` can leave these out.
        self._newest: deque[tuple[int, int, bytes]] = deque(maxlen=MOST_AHEAD)
        self.drew_above: str | None = None
        self._budget = max(1, settings.max_bytes_in_flight // workers)
        self._workers = [Slot(number, workers, device) for number in range(workers)]
        try:
            for worker in self._workers:
                self._start(worker)
        except BaseException:
            self.close()
            raise

    @property
    def inner(self) -> IterDataPipe[Any]:
        """What the loader's iterator forwards unknown attributes to."""
        return self._graph

    @property
    def batches(self) -> int:
        """The outputs given to the user since the engine was made."""
        return sum(worker.batches for worker in self._workers)

    @property
    def counts(self) -> list[Counts]:
        """What each worker gave and took, by its number."""
        return [worker.counts for worker in self._workers]

    def begin(self, plan: Plan, states: dict[int, StreamState], dealer: Dealer | None) -> None:
        """Begin an epoch: run the streams `states`, by number, each from its state; drops the epoch before."""
        self.check_free()
        self._iteration += 1
        self._newest.clear()
        self._plan = with_listings(plan, self._shared.listings)
        self._end_dealing()
        self._dealer = dealer
        self._deal_errors.clear()
        count = len(self._workers)
        self._streams = {
            stream: Progress(stream, place % count, state)
            for place, (stream, state) in enumerate(sorted(states.items()))
        }
        order = InOrder if self._settings.in_order else AsReady
        self._delivery = order(self._streams.values(), self._workers)
        for worker in self._workers:
            worker.begin_epoch()
            if worker.runs and (worker.channel.torn or worker.stuck):
                worker.discard()
            if not worker.runs:
                self._start(worker)
            self._send_epoch(worker)

    def _send_epoch(self, worker: Slot) -> None:
        assert self._plan is not None
        states = [
            (progress.stream, progress.state(self._graph, self._plan, arrived=True))
            for progress in self._streams.values()
            if progress.worker == worker.number
        ]
        credits = max(0, self._settings.prefetch - sum(entry[0] == Kind.BATCH for entry in worker.inbox))
        ledger = worker.page.ledger
        epoch = self._iteration, self._plan, states, credits, worker.traced, ledger.granted, ledger.own
        worker.post(Kind.EPOCH, [pickle.dumps(epoch, protocol=5)])

    def next(self) -> Any:
        """Return the next output; raises StopIteration at the end, and what the streams raise."""
        return self._read(wait=True)

    def next_ready(self) -> Any:
        """Return the next output if it has arrived, else NOTHING; raises what `next` raises."""
        return self._read(wait=False)

    def _read(self, wait: bool) -> Any:
        try:
            self._reader = threading.get_ident()
            self.check_open()
            output = self._next(wait)
        finally:
            # Nothing that looks for signals comes between the call and this.
            self._reader = None
        return output

    def _next(self, wait: bool) -> Any:
        while True:
            awaited = self._delivery.awaited()
            if not awaited:
                check_budget(self.stage_counts(), ended=True)
                raise StopIteration
            worker = (
                _first_with_something(awaited) or self._look_for(awaited) or (self._wait_for(awaited) if wait else None)
            )
            if worker is None:
                return NOTHING
            kind, stream, generation, content, snapshot = worker.inbox.popleft()
            progress = self._streams[stream]
            if kind == Kind.BATCH:
                return self._deliver(worker, progress, generation, content, snapshot)
            if kind == Kind.END:
                progress.end(content)
                self._delivery.end(stream)
                continue
            if kind == Kind.COUNTS:
                self._count(progress, pickle.loads(content))
                continue
            self._delivery = InOrder()
            raise self._deal_errors.get(stream) or unpack_error(content)

    def _count(self, progress: Progress, counts: dict[str, StageCounts]) -> None:
        if progress.count(counts):
            try:
                check_budget(self.stage_counts())
            except ErrorBudgetExceeded:
                self._delivery = InOrder()
                raise

    def stage_counts(self) -> dict[str, StageCounts]:
        """Return what the stages have skipped in this epoch, over all streams of this process."""
        dealt = {} if self._dealer is None else self._dealer.stage_counts()
        return summed([*(progress.counts for progress in self._streams.values()), dealt])

    def _deliver(self, worker: Slot, progress: Progress, generation: int, parcel: Any, snapshot: bytes) -> Any:
        worker.nbytes += parcel.nbytes
        output = parcel.unpack()
        if parcel.copied and self._settings.max_held and not self._told_of_copies:
            self._told_of_copies = True
            # No warning: where those are errors, a batch that is only slower would end the epoch.
            _logger.warning(
                "batches that you keep hold the %d shared-memory blocks that may be held of a worker; further ones are "
                "copied to memory of their own (stats() counts them as copied_batches), which costs time and nothing "
                "else: drop batches that are done with, or raise max_held=",
                self._settings.max_held,
            )
        self._newest.append((progress.stream, progress.given, progress.given_snapshot))
        # Ctrl-C comes before both or behind both, as there is no call in between.
        worker.batches += 1
        progress.given += 1
        if snapshot:
            progress.given_snapshot = snapshot
        self._delivery.advance(progress.stream)
        worker.credit(1, own=1 if generation == worker.generation else 0)
        return output

    def _look_for(self, awaited: Sequence[Slot]) -> Slot | None:
        """Take in what has arrived of the workers `awaited`; return one that gave something."""
        for worker in awaited:
            if worker.has_news:
                self._take_in(worker)
        return _first_with_something(awaited)

    def _wait_for(self, awaited: Sequence[Slot]) -> Slot:
        """Take in what arrives until something of one of the workers `awaited` is there; return that worker."""
        found: Slot | None = None
        for worker in awaited:
            # Now, not with the next output: two slabs filled in turn stay in the worker's cache better than three.
            worker.credit()
        started = time.perf_counter()
        timeout = self._settings.timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while (found := _first_with_something(awaited)) is None:
                if deadline is not None and time.monotonic() >= deadline:
                    raise give_up_on(awaited, self._settings)
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = channels.wait([each.channel for each in self._workers if each.runs], timeout=left)
                for each in self._workers:
                    if each.runs and each.channel in ready:
                        self._take_in(each)
            return found
        finally:
            (found or awaited[0]).waited += time.perf_counter() - started

    def _take_in(self, worker: Slot) -> None:
        self.check_open()
        failure: Exception | None = None
        ended = False
        try:
            for message in worker.channel.feed():
                worker.taken_in += 1
                try:
                    self._handle(worker, message)
                except Exception as error:
                    # The rest must be taken in all the same: slabs are announced once.
                    failure = failure or error
        except ChannelClosed:
            ended = True
        except BaseException:
            # Ctrl-C may have lost messages; the next epoch starts another worker.
            worker.discard()
            raise
        if ended:
            self._recover(worker)
        if failure is not None:
            raise failure

    def _handle(self, worker: Slot, message: Message) -> None:
        kind, body = Kind(message.kind), message.body
        if kind == Kind.BATCH:
            iteration, stream, given, size = BATCH_HEAD.unpack_from(body)
            start = BATCH_HEAD.size + size
            parcel = worker.receiver.accept(memoryview(body)[start:], message.fds)
            if iteration != self._iteration:
                del parcel
                worker.credit()
                return
            snapshot = bytes(body[BATCH_HEAD.size : start])
            progress = self._streams[stream]
            progress.arrived = given
            if snapshot:
                progress.arrived_snapshot = snapshot
                self._release_dealt(progress)
            worker.inbox.append((kind, stream, worker.generation, parcel, snapshot))
        elif kind == Kind.LOG:
            replay_log(bytes(body))
        elif kind == Kind.WARNING:
            replay_warning(bytes(body))
        else:
            self._handle_event(worker, kind, body)

    def _handle_event(self, worker: Slot, kind: Kind, body: bytes | bytearray) -> None:
        iteration, stream, number = EVENT_HEAD.unpack_from(body)
        content = bytes(body[EVENT_HEAD.size :])
        if iteration == FATAL:
            worker.fatal = unpack_error(content)
        elif iteration != self._iteration:
            return
        elif kind == Kind.NEED:
            self._deal(worker, stream, number)
        elif kind == Kind.DREW:
            self.drew_above = content.decode()
        elif kind == Kind.BEGUN:
            self._streams[stream].begin(content)
        else:
            if kind != Kind.COUNTS:
                self._streams[stream].all_arrived = kind == Kind.END
            worker.inbox.append((kind, stream, worker.generation, content, b""))

    def _deal(self, worker: Slot, stream: int, number: int) -> None:
        assert self._dealer is not None
        try:
            answer = ship((stream, number, True, self._dealer.take(stream, number)), f"an element of stream {stream}")
        except Exhausted:
            answer = ship((stream, number, False, None))
        except Exception as error:
            # The stream's turn to give this element is when it is raised.
            self._deal_errors[stream] = error
            answer = ship((stream, number, None, None))
        worker.post(Kind.DEAL, [answer])

    def _release_dealt(self, progress: Progress) -> None:
        if self._dealer is not None:
            assert self._plan is not None
            state = progress.state(self._graph, self._plan, arrived=True)
            self._dealer.release(progress.stream, min(positions_of(state.table, "DealtSource"), default=0))

    def _recover(self, worker: Slot) -> None:
        """Start a dead worker again, or raise what its death means."""
        death = Death.of(worker, self._streams.values())
        worker.discard()
        self.check_open()
        if worker.fatal is not None:
            raise worker.fatal
        if worker.inbox and worker.inbox[-1][0] == Kind.ERROR:
            return
        try:
            death.allow_restart(worker, self._settings)
        except WorkerDiedError:
            self._delivery = InOrder()
            raise
        self._start(worker)
        self._send_epoch(worker)

    def _start(self, worker: Slot) -> None:
        worker.start(self._settings, self._shared, self._budget)

    def pause(self) -> None:
        """Let the workers begin nothing until `resume`."""
        self.check_open()
        for worker in self._workers:
            worker.post(Kind.PAUSE)

    def resume(self) -> None:
        """Let the workers go on."""
        self.check_open()
        for worker in self._workers:
            worker.post(Kind.RESUME)

    def states(self, without: int = 0) -> dict[int, StreamState]:
        """Return where each stream stands, by its number, or stood before the newest `without` outputs."""
        assert self._plan is not None
        earlier: dict[int, tuple[int, bytes]] = {}
        counted = [newest for newest in self._newest if newest[1] < self._streams[newest[0]].given]
        for stream, _, snapshot in counted[len(counted) - without :][::-1]:
            earlier[stream] = (earlier.get(stream, (0, b""))[0] + 1, snapshot)
        return {
            stream: progress.state(self._graph, self._plan, before=earlier.get(stream))
            for stream, progress in self._streams.items()
        }

    def _end_dealing(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    def close(self) -> None:
        """End the workers; see the contract."""
        with held():
            if self._closed:
                return
            # Before it is asked who reads, as a reader says so before it asks for this: one of them sees the other.
            self._closed = True
            started = [worker for worker in self._workers if worker.runs]
            if self._reader not in (None, threading.get_ident()):
                wake_reader(started, lambda: self._reader is None)
            see_off(started)
            for worker in self._workers:
                worker.discard()
                worker.inbox.clear()
            self._shared.close()
        # It may run code of the user's generator, which Ctrl-C must be able to end.
        self._end_dealing()


def _first_with_something(workers: Sequence[Slot]) -> Slot | None:
    for worker in workers:
        if worker.inbox:
            return worker
    return None
