"""How a graph of pipes is iterated: a `Context` opens one `Run` a pipe, for one stream of one epoch.

Contract
- Pipes hold settings; everything that changes while running lives in runs. A run has one iterator, made at its first use.
- `Context.open` builds the runs from the last stage up to the sources and hands each its saved position, if there is one.
- All state may be captured whenever the last stage's iterator is suspended, never in the middle of a `next`.
- `replay(count, wanted)` goes `count` elements forward and returns only those wanted; sources and 1:1 stages do so
  without making the others. It is called before a run's iterator is used, never after.
- A pipe has one live iteration. A new one closes the older, whose iterator then raises StaleIteratorError.
- Closing is explicit and complete: every generator of a context is closed, last stage first, so files close in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, ClassVar

from pipes.errors import GraphError, StateError, brief
from pipes.seeds import Draws, derive_key
from pipes.state import Capture, Captures, Position, Table, Ticks, count_from, table_of

__all__ = ["Context", "Node", "Run", "ShardRun", "inputs_of", "pull", "stage_names", "walk"]

_MOST_INPUTS = 1000
_first = itemgetter(0)


class Node:
    """Marker base of all that can stand in a graph: iterable pipes and map pipes."""

    _opaque: ClassVar[frozenset[str]] = frozenset()
    _shared: ClassVar[bool] = False
    _shards: ClassVar[bool] = False
    _iterable: ClassVar[bool] = True

    def _make_run(self, context: Context, stage: str) -> Run:
        raise GraphError(f"{type(self).__name__} cannot be iterated inside a graph")


def inputs_of(pipe: Node) -> list[Node]:
    """Return the pipes that `pipe` refers to, each once, found in its attributes and the containers in them.

    >>> from pipes.iter import IterableWrapper
    >>> source = IterableWrapper(range(3))
    >>> inputs_of(source.map(str)) == [source]
    True
    """
    found: dict[int, Node] = {}
    seen: set[int] = set()

    def look(value: Any) -> None:
        if isinstance(value, Node):
            found.setdefault(id(value), value)
        elif isinstance(value, dict | list | tuple | set | frozenset):
            # No stage has a thousand inputs; a longer container is data, and walking it would cost seconds.
            if len(value) > _MOST_INPUTS or id(value) in seen:
                return
            seen.add(id(value))
            for item in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
                look(item)

    for name, value in vars(pipe).items():
        if name not in pipe._opaque:
            look(value)
    return list(found.values())


def walk(pipe: Node) -> list[Node]:
    """Return every pipe of the graph that ends in `pipe`, each once, inputs before the stages they feed."""
    order: dict[int, Node] = {}
    entered: set[int] = set()
    stack: list[tuple[Node, bool]] = [(pipe, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order[id(node)] = node
        elif id(node) not in entered:
            entered.add(id(node))
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(inputs_of(node)))
    return list(order.values())


def stage_names(pipe: Node) -> dict[int, str]:
    """Return `{id(pipe): stage id}` for the graph; a stage id is the place in the graph and the class name."""
    return {id(node): f"{place}:{type(node).__name__}" for place, node in enumerate(walk(pipe))}


class Context:
    """One stream of one epoch of one graph, and the runs opened for it."""

    def __init__(
        self,
        last: Node,
        *,
        seed: int,
        epoch: int = 0,
        stream: int = 0,
        streams: int = 1,
        rounds: tuple[int, ...] = (),
        alone: bool = False,
        shard_automatically: bool = True,
    ) -> None:
        self.last = last
        self.seed, self.epoch, self.stream, self.streams = seed, epoch, stream, streams
        self.rounds = rounds
        self.alone = alone
        self.nodes = walk(last)
        self.names = {id(node): f"{place}:{type(node).__name__}" for place, node in enumerate(self.nodes)}
        self.shard_after = _automatic_shard_point(self.nodes) if streams > 1 and shard_automatically else None
        self.above_shard = _above_shard(self.nodes, self.shard_after)
        self.replaced_by: str | None = None
        self.runs: dict[int, Run] = {}
        self.children: list[Context] = []
        self.at_close: list[Callable[[], None]] = []
        self.adopted: set[int] = set()
        self.table: Table | None = None

    def start(self, table: Table | None = None) -> Run:
        """Open the whole graph, restored to `table` when there is one, and return the last stage's run."""
        self.table = table
        return self.open(self.last, table)

    def open(self, pipe: Node, table: Table | None) -> Run:
        """Return the run of `pipe`, with everything upstream of it, at the positions that `table` holds."""
        if id(pipe) in self.runs:
            if pipe._shared:
                return self.runs[id(pipe)]
            raise GraphError(
                f"{self.names[id(pipe)]} feeds two stages of one graph; a pipe has one iterator, "
                "so give each its own copy of the elements with .fork(2)"
            )
        stage = self.names[id(pipe)]
        run = pipe._make_run(self, stage)
        self.runs[id(pipe)] = run
        position = None if table is None else table.get(stage)
        if pipe._shared and table is not None:
            position = self._oldest_shared(stage, position)
        run.open(position, table)
        if pipe is self.shard_after:
            self.runs[id(pipe)] = run = ShardRun.behind(run, table)
        return run

    def _oldest_shared(self, stage: str, position: Position) -> Position:
        """Of all positions of a shared stage, at the end of a table or inside anchors, return the oldest one."""
        found = [position] if position is not None else []
        pending: list[Any] = [self.table]
        while pending:
            value = pending.pop()
            if isinstance(value, dict):
                for key, item in value.items():
                    if key == stage:
                        found.append(item)
                    pending.append(item)
        return min(found, key=lambda item: count_from(item.get("anchor"), "taken", stage)) if found else None

    def again(self, last: Node, *rounds: int) -> Context:
        """Return a context in which `last` and all upstream of it runs afresh within this epoch."""
        child = Context.__new__(Context)
        child.__dict__.update(self.__dict__)
        child.last, child.rounds = last, (*self.rounds, *rounds)
        child.runs, child.children, child.at_close = {}, [], []
        self.children.append(child)
        return child

    def leave(self, child: Context) -> None:
        """Close a context that `again` made and forget it."""
        child.close()
        self.children.remove(child)

    def key(self, stage: str, pipe: Node) -> int:
        """Return the key of a stage's draws; the streams share one above the shard point, and differ below it."""
        stream = -1 if id(pipe) in self.above_shard else self.stream
        own = getattr(pipe, "_seed", None)
        epoch = self.epoch
        if own is not None and self.alone:
            epoch -= getattr(pipe, "_seed_epoch", None) or 0
        return derive_key(self.seed if own is None else own, epoch, stage, stream, *self.rounds)

    def close(self) -> None:
        """Close every iterator of the context, last stage first."""
        for child in self.children:
            child.close()
        for key, run in self.runs.items():
            if key not in self.adopted:
                run.close()
        for release in self.at_close:
            release()
        self.at_close.clear()


def _above_shard(nodes: Sequence[Node], shard_after: Node | None) -> frozenset[int]:
    """Return the ids of all pipes that feed a shard point, directly or not, the shard points included."""
    above: set[int] = set()
    for node in reversed(nodes):
        if node._shards or node is shard_after or id(node) in above:
            above.add(id(node))
            above.update(id(source) for source in inputs_of(node))
    return frozenset(above)


def _automatic_shard_point(nodes: Sequence[Node]) -> Node | None:
    """Return the stage after which a graph without a sharding_filter is split; None when it has one.

    That is the source of a linear graph, and of any other the last stage where branches meet.
    """
    if any(node._shards for node in nodes):
        return None
    node = nodes[-1]
    while len(sources := [source for source in inputs_of(node) if source._iterable]) == 1:
        node = sources[0]
    return node


class Run:
    """One pipe while it is iterated. Stages subclass it and give `elements`; those with state, the other hooks too.

    `segment` holds the stages whose captures together say where this run stands: itself when `stateful`, and
    those of its inputs, unless it is `anchored`: then its own position tells all of it.
    """

    stateful: ClassVar[bool] = False
    anchored: ClassVar[bool] = False

    def __init__(self, pipe: Any, context: Context, stage: str) -> None:
        self.pipe, self.context, self.stage = pipe, context, stage
        self.inputs: list[Run] = []
        self.segment: tuple[Run, ...] = ()
        self.upstream: tuple[Run, ...] = ()
        self._iterator: Iterator[Any] | None = None

    def input_pipes(self) -> Sequence[Node]:
        """Return the pipes this stage reads, in order; one that is read twice stands there twice."""
        return inputs_of(self.pipe)

    def open(self, position: Position, table: Table | None) -> None:
        """Open what is upstream, then go to `position` (None: the start)."""
        if self.anchored:
            table = self.anchor_table(position)
        self.inputs = [self.context.open(pipe, table) for pipe in self.input_pipes()]
        self.link()
        self.restore(position)

    def link(self) -> None:
        """Work out `upstream` and `segment` from the inputs."""
        merged = {id(run): run for source in self.inputs for run in source.segment}
        self.upstream = tuple(merged.values())
        if self.anchored:
            self.segment = (self,)
        elif self.stateful:
            self.segment = (*self.upstream, self)
        else:
            self.segment = self.upstream

    def anchor_table(self, position: Position) -> Table | None:
        """Return the table inside `position` from which an anchored stage restores what is upstream."""
        if position is None:
            return None
        anchor = position.get("anchor") if isinstance(position, dict) else None
        table = anchor.get("table") if isinstance(anchor, dict) else None
        if not isinstance(table, dict):
            raise StateError(f"the saved state is damaged: stage {self.stage} has no anchor; use an earlier state")
        return table

    def restore(self, position: Position) -> None:
        """Go to `position`; None is the start of the epoch."""

    def elements(self) -> Iterator[Any]:
        """Return the iterator of what this stage gives, from the restored position on."""
        raise NotImplementedError(type(self).__name__)

    def capture(self) -> Capture:
        """Return where this stage stands, as an immutable value."""
        return None

    def describe(self, captured: Capture) -> Position:
        """Return `captured` as JSON data."""
        return captured

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        """Go `count` elements forward; return those at the offsets `wanted` (ascending, below `count`)."""
        return pull(iter(self), count, wanted, self.stage)

    def __iter__(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = self.elements()
        return self._iterator

    def close(self) -> None:
        if isinstance(self._iterator, Generator):
            try:
                self._iterator.close()
            except ValueError:  # it is executing: a stage's own function replaced the iteration
                return
        self._iterator = iter(())

    def captures(self) -> Captures:
        """Return the captures of the whole segment: where this run and all upstream of it stand."""
        return tuple([run.capture() for run in self.segment])

    def table(self, captured: Captures | None = None) -> Table:
        """Return the segment's captures (now, or those given) as a table of JSON data."""
        return table_of(self.segment, self.captures() if captured is None else captured)

    def draws(self, start: int = 0) -> Draws:
        """Return this stage's own random stream, from draw number `start`."""
        return Draws(self.context.key(self.stage, self.pipe), start)

    def note(self, error: BaseException, *element: Any) -> None:
        """Add to `error` which stage it came from, where that was built and on which element."""
        built = getattr(self.pipe, "_built", None)
        where = f" built at {built[0]}:{built[1]}" if built else ""
        what = f", on element {brief(element[0])}" if element else ""
        error.add_note(f"in stage {self.stage}{where}{what}")


def pull(iterator: Iterator[Any], count: int, wanted: Sequence[int], stage: str) -> list[Any]:
    """Take `count` elements from `iterator` and return those at the offsets `wanted`."""
    kept: list[Any] = []
    at = 0
    for offset in (*wanted, count):
        deque(islice(iterator, offset - at), maxlen=0)
        at = offset
        if offset < count:
            try:
                kept.append(next(iterator))
            except StopIteration:
                raise StateError(
                    f"stage {stage} has fewer elements than when the state was saved (wanted number {offset} after "
                    "its anchor); the data changed: resume with the data the state was made from, or start afresh"
                ) from None
            at += 1
    return kept


class ShardRun(Run):
    """Pass on every n-th element of one input: what stream `stream` of `streams` sees."""

    stateful = True

    @classmethod
    def behind(cls, run: Run, table: Table | None) -> ShardRun:
        """Return the automatic shard point after `run`, restored from `table`."""
        shard = cls(run.pipe, run.context, f"{run.stage}+shard")
        shard.inputs = [run]
        shard.link()
        shard.restore(None if table is None else table.get(shard.stage))
        return shard

    def restore(self, position: Position) -> None:
        self.ticks = Ticks(0 if position is None else count_from(position, "given", self.stage))

    def share(self) -> tuple[int, int]:
        """Return (number of this stream, number of streams)."""
        return self.context.stream, self.context.streams

    def elements(self) -> Iterator[Any]:
        index, total = self.share()
        first = index if self.ticks.count == 0 else total - 1
        chosen = islice(iter(self.inputs[0]), first, None, total)
        return map(_first, zip(chosen, self.ticks, strict=False))

    def capture(self) -> Capture:
        return self.ticks.count

    def describe(self, captured: Capture) -> Position:
        return {"given": captured}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        if count == 0:
            return []
        index, total = self.share()
        first = index if self.ticks.count == 0 else total - 1
        kept = self.inputs[0].replay(first + (count - 1) * total + 1, [first + offset * total for offset in wanted])
        self.ticks = Ticks(self.ticks.count + count)
        return kept
