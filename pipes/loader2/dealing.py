"""A source that can be read only once, such as a generator, under several streams: main reads it and deals.

Contract
- The graph is cut at its shard point. What is above runs in the main process, inside `next()`, in one context; element
  i goes to stream i % streams, so the order is that of any other source.
- A stream asks for its element number n. Main keeps what it dealt until `release` says that no snapshot can ask again,
  so that a restarted worker gets the same elements.
- An error of the source is raised to every stream that asks for an element which could not be read. Each stream first
  gives what it got before.
- Users' draws from the global generators above the cut are keyed by the element's number; main's own do not move.
- A resume reads the source from its start and drops what the streams had taken already; a warning says so.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pipes.context import Context
from pipes.datapipe import IterDataPipe, Shard
from pipes.error_policy import StageCounts
from pipes.errors import GraphError
from pipes.graph import clone
from pipes.loader2.streams import Plan
from pipes.run import Node, Run, automatic_shard_point, walk
from pipes.seeds import GlobalGenerators, derive_key, seed_globals
from pipes.shares import reading_a_share
from pipes.state import Capture, Position

__all__ = ["Dealer", "DealtSource", "Exhausted", "check_read_once", "cut", "positions_of"]

Fetch = Callable[[int, int], Any]


class Exhausted(Exception):
    """The dealt source has no element of that number."""


class _DealtRun(Run):
    """Asks for its elements by number; the number is its position."""

    stateful = True
    count_fields = ("at",)

    def restore(self, position: Position) -> None:
        self.taken = 0 if position is None else position["at"]

    def elements(self) -> Iterator[Any]:
        stream = self.context.stream
        while True:
            try:
                element = DealtSource.fetch(stream, self.taken)
            except Exhausted:
                return
            self.taken += 1
            yield element

    def capture(self) -> Capture:
        return self.taken

    def describe(self, captured: Capture) -> Position:
        return {"at": captured}


class DealtSource(IterDataPipe[Any]):
    """Stands in a stream's graph for what the main process reads and deals; made by `cut`."""

    run_class = _DealtRun
    _shards = True

    #: How this process gets element n of stream s; the loader or the worker sets it.
    fetch: Fetch

    def __init__(self, upstream_length: int | str) -> None:
        #: The number of elements over all streams, or why it is not known.
        self.upstream_length = upstream_length

    def _length(self, shard: Shard) -> int:
        if isinstance(self.upstream_length, str):
            raise TypeError(self.upstream_length)
        return -(-(self.upstream_length - shard[0]) // shard[1])


class Dealer:
    """Main's side: reads what is above the cut, deals it, remembers what may be asked for again."""

    def __init__(self, upstream: IterDataPipe[Any], plan: Plan, resumed: bool) -> None:
        self._plan = plan
        self._name = type(upstream).__name__
        self._context = Context(upstream, seed=plan.seed, epoch=plan.epoch)
        self._elements = iter(self._context.start())
        self._failure: Exception | None = None
        self._hands: list[deque[Any]] = [deque() for _ in range(plan.streams)]
        self._dropped = [0] * plan.streams
        self._dealt = 0
        if resumed:
            warnings.warn(
                f"{self._name} can be read only once, so this resume reads it again from its start and drops what had "
                "been taken; wrap a list, or a class whose __iter__ starts afresh, for a resume that skips",
                stacklevel=2,
            )

    def take(self, stream: int, number: int) -> Any:
        """Return element `number` of `stream`; raises Exhausted at the end, and what the source raises."""
        hand = self._hands[stream]
        if number < self._dropped[stream]:
            raise GraphError(
                f"{self._name} can be read only once, but a stage of the graph (.cycle?) reads it a second time; wrap "
                "a list, or a class whose __iter__ starts afresh"
            )
        while self._dropped[stream] + len(hand) <= number:
            if self._failure is not None:
                raise self._failure
            self._hands[self._dealt % self._plan.streams].append(self._read())
            self._dealt += 1
        return hand[number - self._dropped[stream]]

    def _read(self) -> Any:
        own = GlobalGenerators.set_aside()
        try:
            seed_globals(derive_key(self._plan.seed, self._plan.epoch, "dealt", self._dealt))
            with reading_a_share():
                element = next(self._elements, Exhausted)
        except Exception as error:
            # The iterator would end in silence if it was asked again.
            self._failure = error
            raise
        finally:
            own.restore()
        if element is Exhausted:
            raise Exhausted
        return element

    def release(self, stream: int, below: int) -> None:
        """Forget the elements of `stream` numbered below `below`."""
        hand = self._hands[stream]
        while self._dropped[stream] < below and hand:
            hand.popleft()
            self._dropped[stream] += 1

    def stage_counts(self) -> dict[str, StageCounts]:
        """Return what the stages that main runs have skipped, ahead of what was given."""
        return {f"dealt/{stage}": counts for stage, counts in self._context.tallies.counts().items()}

    def close(self) -> None:
        self._context.close()


def cut(graph: IterDataPipe[Any]) -> tuple[IterDataPipe[Any], IterDataPipe[Any] | None]:
    """Return (the graph of the streams, what main reads); (graph, None) when every source can be read many times."""
    nodes = walk(graph)
    if not any(_read_once(node) for node in nodes):
        return graph, None
    filters = [node for node in nodes if type(node)._shards]
    if filters:
        point: Any = filters[-1]
        upstream: Any = point.source_datapipe
    else:
        point = upstream = automatic_shard_point(nodes)
    if not any(_read_once(node) for node in walk(upstream)):
        return graph, None
    try:
        with warnings.catch_warnings():
            # A stage that warns of its length only guesses it.
            warnings.simplefilter("error")
            length: int | str = len(upstream)
    except (TypeError, Warning) as unknown:
        length = str(unknown)
    return clone(graph, {id(point): DealtSource(length)}), upstream


def check_read_once(graph: IterDataPipe[Any]) -> None:
    """Refuse a graph for several streams in which each would read a source that can be read once only."""
    for node in walk(graph):
        if _read_once(node):
            kind = type(vars(node)["iterable"]).__name__
            raise GraphError(
                f"{type(node).__name__} over a {kind} can be read once only, so several streams cannot each read it: "
                "put one sharding_filter below it and below all that it is joined with, or wrap a list, or a class "
                "whose __iter__ starts afresh"
            )


def _read_once(node: Node) -> bool:
    return isinstance(getattr(node, "iterable", None), Iterator)


def positions_of(table: Any, stage_class: str) -> list[int]:
    """Return every position `at` of stages of that class in a table, those inside anchors included."""
    found: list[int] = []
    pending = [table]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                if key.endswith(f":{stage_class}") and isinstance(item, dict):
                    found.append(item["at"])
                pending.append(item)
    return found
