"""The engine without workers: the same streams, merged in the same order, in the calling process.

Contract: as `engine.py`, less processes. A user's draws from the global generators are seeded as in a worker, and the
caller's own generators are put back after every `next`, so that iterating never moves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipes.datapipe import IterDataPipe
from pipes.error_policy import StageCounts, check_budget, summed
from pipes.errors import ErrorBudgetExceeded, add_note
from pipes.loader2.copies import Copies
from pipes.loader2.dealing import Dealer, DealtSource
from pipes.loader2.iterator import NOTHING
from pipes.loader2.merge import RoundRobin
from pipes.loader2.random import seeds_of
from pipes.loader2.sharding import adapted
from pipes.loader2.sharing import list_once, with_listings
from pipes.loader2.slot import Counts
from pipes.loader2.streams import Plan, Stream, StreamState, describe, given_up, runs_users_code
from pipes.loader2.worker import WorkerInfo
from pipes.run import walk
from pipes.seeds import GlobalGenerators
from pipes.shares import reading_a_share
from pipes.stages.wrapping import as_pipe

__all__ = ["InProcessEngine", "ServiceEngine"]


class InProcessEngine:
    """Runs the streams of one graph in the calling process."""

    #: A forked child has streams of its own, which go on from where main's stood.
    inherited = False

    def __init__(self, graph: IterDataPipe[Any], init_fn: Any = None, reset_fn: Any = None) -> None:
        self._info = WorkerInfo(1, 0)
        self._listings = list_once(graph)
        self._initial = graph if init_fn is None else adapted(graph, init_fn, self._info)
        self._reset_fn = reset_fn
        self._copies = Copies()
        self._streams: dict[int, Stream] = {}
        self._states: dict[int, StreamState] = {}
        self._turns = RoundRobin({})
        self._dealer: Dealer | None = None
        self.drew_above: str | None = None
        # Outputs of earlier epochs.
        self._earlier = 0
        # The stream that was asked for the newest output.
        self._newest = -1
        self.counts: list[Counts] = []
        self._counted: dict[int, Mapping[str, StageCounts]] = {}

    @property
    def inner(self) -> IterDataPipe[Any]:
        """What the loader's iterator forwards unknown attributes to."""
        return self._initial

    @property
    def batches(self) -> int:
        """The outputs given since the engine was made."""
        begun = self._states
        return self._earlier + sum(stream.given - begun[number].given for number, stream in [*self._streams.items()])

    def begin(self, plan: Plan, states: dict[int, StreamState], dealer: Dealer | None) -> None:
        """Begin an epoch: run the streams `states`, by number, each from its state; drops the epoch before."""
        if self._reset_fn is None:
            states = dict(given_up(self._streams, states.items()))
        self.close()
        self._plan, self._states, self._dealer = with_listings(plan, self._listings), states, dealer
        self._counted = {number: state.counts for number, state in states.items()}
        self._graph = self._initial
        if self._reset_fn is not None:
            seeds = seeds_of(plan.seed, plan.epoch).spawn(0)
            self._graph = adapted(self._graph, self._reset_fn, self._info, seeds)
        self._seeded = runs_users_code(walk(self._graph))
        self._turns = RoundRobin(
            {stream: state.given for stream, state in states.items()},
            [stream for stream, state in states.items() if state.ended],
        )

    def next(self) -> Any:
        """Return the next output; raises StopIteration at the end, and what the streams raise."""
        # Of the epoch that this call began in, whatever another thread ends meanwhile.
        turns = self._turns
        while (number := turns.turn()) is not None:
            if self._dealer is not None:
                DealtSource.fetch = staticmethod(self._take)
            saved = GlobalGenerators.set_aside() if self._seeded else None
            try:
                stream = self._open(number)
                self._newest = number
                with reading_a_share():
                    output = stream.next()
            except StopIteration:
                turns.end()
                self._count(number, stream)
                continue
            except BaseException as error:
                self._turns = RoundRobin({})
                opened = self._streams.get(number)
                add_note(error, self._plan.note(number, self._states[number].given if opened is None else opened.given))
                if opened is not None:
                    self._counted[number] = opened.counts()
                raise
            finally:
                if saved is not None:
                    saved.restore()
            try:
                self._count(number, stream)
            except ErrorBudgetExceeded:
                stream.fail()
                raise
            turns.advance()
            self.drew_above = self.drew_above or stream.drew_above
            return output
        check_budget(self.stage_counts(), ended=True)
        raise StopIteration

    def _count(self, number: int, stream: Stream) -> None:
        """Note what the stages of a stream have skipped; raises ErrorBudgetExceeded when that is too much."""
        counts = stream.counts()
        if counts:
            errors = sum(each.errors for each in self._counted.get(number, {}).values())
            self._counted[number] = counts
            if errors < sum(each.errors for each in counts.values()):
                try:
                    check_budget(self.stage_counts())
                except ErrorBudgetExceeded:
                    self._turns = RoundRobin({})
                    raise

    def stage_counts(self) -> dict[str, StageCounts]:
        """Return what the stages have skipped in this epoch, over all streams of this process."""
        dealt = {} if self._dealer is None else self._dealer.stage_counts()
        return summed([*self._counted.values(), dealt])

    def _open(self, number: int) -> Stream:
        if number not in self._streams:
            graph = self._copies.of(self._graph, number) if len(self._states) > 1 else self._graph
            self._streams[number] = Stream(graph, self._plan, number, self._states[number], shares=True)
        return self._streams[number]

    def _take(self, stream: int, number: int) -> Any:
        assert self._dealer is not None
        element = self._dealer.take(stream, number)
        # Nobody dies here, so nobody asks for an element twice.
        self._dealer.release(stream, number + 1)
        return element

    def next_ready(self) -> Any:
        """Return NOTHING: what is made in this process is made when it is asked for."""
        return NOTHING

    def states(self, without: int = 0) -> dict[int, StreamState]:
        """Return where each stream stands, by its number, or stood before the newest output."""
        states = dict(self._states)
        for number, stream in self._streams.items():
            counts = self._counted.get(number, {})
            less = without if number == self._newest else 0
            if stream.ended and not less:
                numbers = stream.counted() or None
                states[number] = StreamState(given=stream.given, ended=True, counts=counts, numbers=numbers)
            else:
                at, captures = stream.before_newest if less else stream.snapshot()
                table = describe(self._graph, self._plan, number, captures)
                states[number] = StreamState(table, at, stream.given - less, counts=counts)
        return states

    def pause(self) -> None:
        """Nothing runs between two calls of `next`."""

    resume = pause

    def close(self) -> None:
        """Close every file and iterator of the epoch."""
        self._turns = RoundRobin({})
        for stream in self._streams.values():
            stream.close()
        self._earlier, self._streams = self.batches, {}
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None


class ServiceEngine:
    """Runs the graph as a user's own reading service adapts it, in the calling process.

    Each epoch that began is ended by one `finalize_iteration`: at its end, after an error, or when it is given up.
    """

    inherited = False

    def __init__(self, service: Any, graph: IterDataPipe[Any]) -> None:
        self._service = service
        #: What the loader's iterator forwards unknown attributes to.
        self.inner = self._initial = service.initialize(graph)
        self._engine: InProcessEngine | None = None
        self._open = self._closed = False
        self._earlier = 0
        self.counts: list[Counts] = []

    @property
    def drew_above(self) -> str | None:
        """The stage above which users' draws from the global generators were seen."""
        return None if self._engine is None else self._engine.drew_above

    @property
    def batches(self) -> int:
        """The outputs given since the service was made."""
        return self._earlier + (0 if self._engine is None else self._engine.batches)

    def stage_counts(self) -> dict[str, StageCounts]:
        """Return what the stages have skipped in this epoch."""
        return {} if self._engine is None else self._engine.stage_counts()

    def begin(self, plan: Plan, states: dict[int, StreamState], dealer: Dealer | None) -> None:
        """Begin an epoch, with the service's hooks around it."""
        self._finish()
        self._open = True
        adapt = self._service.initialize_iteration(seeds_of(plan.seed, plan.epoch))
        self.inner = self._initial if adapt is None else adapt(self._initial)
        self._engine = InProcessEngine(as_pipe(self.inner))
        self._engine.begin(plan, states, dealer)

    def next(self) -> Any:
        """Return the next output; raises StopIteration at the end."""
        if self._engine is None:
            raise StopIteration
        try:
            output = self._engine.next()
        except BaseException:
            self._finalize_iteration()
            raise
        return output

    def next_ready(self) -> Any:
        """Return NOTHING, as InProcessEngine."""
        return NOTHING

    def states(self, without: int = 0) -> dict[int, StreamState]:
        """Return where each stream stands, by its number, or stood before the newest output."""
        return {} if self._engine is None else self._engine.states(without)

    def pause(self) -> None:
        """Call the service's own hook, when it has one."""
        getattr(self._service, "_pause", _nothing)()

    def resume(self) -> None:
        """Call the service's own hook, when it has one."""
        getattr(self._service, "_resume", _nothing)()

    def _finalize_iteration(self) -> None:
        if self._open:
            self._open = False
            self._service.finalize_iteration()

    def _finish(self) -> None:
        self._finalize_iteration()
        if self._engine is not None:
            self._engine.close()
            self._earlier, self._engine = self._earlier + self._engine.batches, None

    def close(self) -> None:
        """End the epoch and the service, once."""
        self._finish()
        if not self._closed:
            self._closed = True
            self._service.finalize()


def _nothing() -> None:
    pass
