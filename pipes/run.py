"""How a graph of pipes is iterated: a `Context` opens one `Run` a pipe, for one stream of one epoch.

Contract
- Pipes hold settings; everything that changes while running lives in runs. A run has one iterator, made at first use.
- `Context.open` makes the runs from the last stage up to the sources, then opens them from the sources down, each at
  its saved position, if there is one. It does not recurse, so the depth of a graph is limited by its iteration alone.
- All state may be captured whenever the last stage's iterator is suspended, never in the middle of a `next`.
- `replay(count, wanted)` goes `count` elements forward and returns only those wanted; sources and 1:1 stages do so
  without making the others. It is called before a run's iterator is used, never after.
- A pipe has one live iteration. A new one closes the older, whose iterator then raises StaleIteratorError.
- Closing is explicit and complete: every generator of a context is closed, last stage first, so files close in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, ClassVar

from pipes.errors import GraphError, add_note, brief, notes_of
from pipes.node import (
    Node,
    above_shard,
    automatic_shard_point,
    built_at,
    check_depth,
    describe_automatic_sharding,
    inputs_of,
    label_of,
    stage_names,
    walk,
)
from pipes.seeds import Draws, derive_key
from pipes.state import (
    Capture,
    Captures,
    Position,
    Remembers,
    Table,
    Ticks,
    anchor_of,
    check_positions,
    count_from,
    positions_in,
    pull,
    table_of,
)
from pipes.tallies import Tallies, Tally, open_tally

__all__ = [
    "Context",
    "Node",
    "Run",
    "ShardRun",
    "automatic_shard_point",
    "describe_automatic_sharding",
    "inputs_of",
    "pull",
    "stage_names",
    "walk",
]

_first = itemgetter(0)


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
        world: int = 1,
        rounds: tuple[int, ...] = (),
        alone: bool = False,
        on_changed_data: str = "raise",
        shard_automatically: bool = True,
        listings: Mapping[str, Any] | None = None,
    ) -> None:
        self.last = last
        self.seed, self.epoch, self.stream, self.streams, self.world = seed, epoch, stream, streams, world
        self.rounds, self.alone, self.on_changed_data = rounds, alone, on_changed_data
        #: By stage, what was listed once for all streams.
        self.listings = {} if listings is None else listings
        self.nodes = walk(last)
        self.names = stage_names(last)
        self.shard_after = automatic_shard_point(self.nodes) if streams > 1 and shard_automatically else None
        self.above_shard = above_shard(self.nodes, self.shard_after)
        self.replaced_by: str | None = None
        self.runs: dict[int, Run] = {}
        self.children: list[Context] = []
        self.at_close: list[Callable[[], None]] = []
        self.adopted: set[int] = set()
        self.tallies = Tallies()
        # Notes that an error refused to take; whoever carries the error elsewhere adds them there.
        self.loose_notes: list[str] = []
        self.table: Table | None = None

    def start(self, table: Table | None = None) -> Run:
        """Open the whole graph, restored to `table` when there is one, and return the last stage's run."""
        self.table = table
        check_depth(self.last, self.nodes)
        return self.open(self.last, table)

    def open(self, pipe: Node, table: Table | None) -> Run:
        """Return the run of `pipe`, with everything upstream of it, at the positions that `table` holds."""
        known = self._known(pipe)
        return known if known is not None else self.open_run(pipe, self._new_run(pipe), table)

    def open_run(self, pipe: Node, run: Run, table: Table | None) -> Run:
        """Open `run`, a new run of `pipe`, with everything upstream of it; return what stages below it read."""
        stack = [_Opening(pipe, run, *self._positions(pipe, run, table))]
        while True:
            top = stack[-1]
            if top.inputs:
                feed = top.inputs.popleft()
                known = self._known(feed)
                if known is not None:
                    top.run.inputs.append(known)
                else:
                    fresh = self._new_run(feed)
                    stack.append(_Opening(feed, fresh, *self._positions(feed, fresh, top.below)))
                continue
            stack.pop()
            top.run.open(top.position, top.table)
            done = top.run
            if top.pipe is self.shard_after and self.runs.get(id(top.pipe)) is done:
                self.runs[id(top.pipe)] = done = ShardRun.behind(done, top.table)
            if not stack:
                return done
            stack[-1].run.inputs.append(done)

    def _known(self, pipe: Node) -> Run | None:
        """Return the run of `pipe` if it is open and may be shared; refuse a second reader of any other."""
        run = self.runs.get(id(pipe))
        if run is not None and not type(pipe)._shared:
            raise GraphError(
                f"{self.names[id(pipe)]} feeds two stages of one graph; a pipe has one iterator, "
                "so give each its own copy of the elements with .fork(2)"
            )
        return run

    def _new_run(self, pipe: Node) -> Run:
        run = self.runs[id(pipe)] = type(pipe)._make_run(pipe, self, self.names[id(pipe)])
        return run

    def _positions(self, pipe: Node, run: Run, table: Table | None) -> tuple[Position, Table | None, Table | None]:
        """Return the position of `run`, the table it stands in, and the table for what is upstream of it."""
        position = None if table is None else table.get(run.stage)
        if type(pipe)._shared and self.table is not None:
            position = self._oldest_shared(pipe, run.stage, position)
        return position, table, run.anchor_table(position) if run.anchored else table

    def _oldest_shared(self, pipe: Node, stage: str, position: Position) -> Position:
        """Of all positions of a shared stage, at the end of a table or inside anchors, return the oldest one."""
        found = [*([] if position is None else [position]), *positions_in(self.table, stage)]
        if not found:
            return None
        if any(each is pipe for node in self.nodes if type(node)._is_replayed(node) for each in walk(node)):
            # A child's reader is replayed from the start, so the shared stage must be, too.
            taken = max(count_from(item, "taken", stage) for item in found)
            return {"taken": taken, "anchor": {"taken": 0, "table": {}}}
        return min(found, key=lambda item: count_from(anchor_of(item, stage), "taken", stage))

    def again(self, last: Node, *rounds: int) -> Context:
        """Return a context in which `last` and all upstream of it runs afresh within this epoch."""
        child = Context.__new__(type(self))
        child.__dict__.update(self.__dict__)
        child.last, child.rounds = last, (*self.rounds, *rounds)
        child.runs, child.children, child.at_close = {}, [], []
        self.children.append(child)
        return child

    def nested(self, last: Node, stage: str, number: int) -> Context:
        """Return a context for a graph that stage `stage` built, or found, while it ran: its iteration `number`."""
        child = self.again(last, number)
        child.nodes = walk(last)
        own = {id(node): f"{stage}/{place}:{label_of(node)}" for place, node in enumerate(child.nodes)}
        child.names = {**own, **self.names}
        return child

    def leave(self, child: Context) -> None:
        """Close a context that `again` or `nested` made and forget it."""
        child.close()
        self.tallies.drop(child.runs.values())
        self.children = [each for each in self.children if each is not child]

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


class _Opening:
    """A run whose inputs are being opened."""

    __slots__ = ("below", "inputs", "pipe", "position", "run", "table")

    def __init__(self, pipe: Node, run: Run, position: Position, table: Table | None, below: Table | None) -> None:
        self.pipe, self.run = pipe, run
        self.position, self.table, self.below = position, table, below
        self.inputs = deque(run.input_pipes())


class Run:
    """One pipe while it is iterated. Stages subclass it and give `elements`; those with state, the other hooks too.

    `segment` holds the stages whose captures together say where this run stands: itself when `stateful`, and
    those of its inputs, unless it is `anchored`: then its own position tells all of it. `count_fields` names those of
    a position that are counts. A stage with `on_error`, or one that `leaves_out` things by rule, has a `tally`, which
    stands in the segment behind it.
    """

    stateful: ClassVar[bool] = False
    anchored: ClassVar[bool] = False
    count_fields: ClassVar[tuple[str, ...]] = ()
    leaves_out: ClassVar[bool] = False
    optional: ClassVar[bool] = False

    def __init__(self, pipe: Any, context: Context, stage: str) -> None:
        self.pipe, self.context, self.stage = pipe, context, stage
        self.inputs: list[Run] = []
        self.segment: tuple[Remembers, ...] = ()
        self.upstream: tuple[Remembers, ...] = ()
        self.tally: Tally | None = None
        self._iterator: Iterator[Any] | None = None

    def input_pipes(self) -> Sequence[Node]:
        """Return the pipes this stage reads, in order; one that is read twice stands there twice."""
        return inputs_of(self.pipe)

    def open(self, position: Position, table: Table | None) -> None:
        """Go to `position` (None: the start) in `table`; what `input_pipes` names is open and stands in `inputs`."""
        self.tally = open_tally(self, table)
        self.tolerant = self.tally if self.tally is not None and self.tally.tolerant else None
        self.link()
        if position is not None:
            self.check(position)
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
        if self.tally is not None:
            self.segment = (*self.segment, self.tally)

    def anchor_table(self, position: Position) -> Table | None:
        """Return the table inside `position` from which an anchored stage restores what is upstream."""
        return None if position is None else anchor_of(position, self.stage)["table"]

    def check(self, position: Position) -> None:
        """Refuse, with StateError, a position that `describe` never gives; an anchor's table is not looked into."""
        for field in self.count_fields:
            count_from(position, field, self.stage)
        if self.anchored:
            count_from(anchor_of(position, self.stage), "taken", self.stage)

    def check_table(self, table: Any, where: str) -> None:
        """Refuse, with StateError, a table that `table()` never gives; `where` says where it stands."""
        check_positions(self.segment, table, where)

    def check_upstream(self, position: Position) -> None:
        """Refuse, with StateError, a position whose anchor's table does not fit what is upstream."""
        if self.anchored:
            check_positions(self.upstream, anchor_of(position, self.stage)["table"], f"the anchor of {self.stage}")

    def restore(self, position: Position) -> None:
        """Go to `position`, which `check` has let pass; None is the start of the epoch."""

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
        where = built_at(self.pipe, " built at {}")
        what = f", on element {brief(element[0])}" if element else ""
        context = self.context
        stream = f", in stream {context.stream} of {context.streams}" if context.streams > 1 else ""
        note = f"in stage {self.stage}{where}{what}{stream}"
        if not add_note(error, note):
            context.loose_notes.append(note)

    def note_once(self, error: BaseException) -> None:
        """Add the note unless a stage above has added one: for stages through which errors from above pass."""
        if not any(note.startswith("in stage ") for note in notes_of(error)):
            self.note(error)


class ShardRun(Run):
    """Pass on every n-th element of one input: what stream `stream` of `streams` sees."""

    stateful = True
    count_fields = ("given",)

    @classmethod
    def behind(cls, run: Run, table: Table | None) -> ShardRun:
        """Return the automatic shard point after `run`, restored from `table`."""
        shard = cls(run.pipe, run.context, f"{run.stage}+shard")
        shard.inputs = [run]
        shard.link()
        position = None if table is None else table.get(shard.stage)
        if position is not None:
            shard.check(position)
        shard.restore(position)
        return shard

    def restore(self, position: Position) -> None:
        self.ticks = Ticks(0 if position is None else position["given"])

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
