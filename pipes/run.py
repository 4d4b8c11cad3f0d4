"""One pipe while it is iterated: a `Run`, which holds all that changes.

Contract
- Pipes hold settings; everything that changes while running lives in runs. A run has one iterator, made at first use.
- All state may be captured whenever the last stage's iterator is suspended, never in the middle of a `next`.
- `replay(count, wanted)` goes `count` elements forward and returns only those wanted; sources and 1:1 stages do so
  without making the others. It is called before a run's iterator is used, never after.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from pipes.as_built import as_built
from pipes.errors import add_note, brief, notes_of
from pipes.node import (
    Node,
    automatic_shard_point,
    built_at,
    describe_automatic_sharding,
    inputs_of,
    stage_names,
    walk,
)
from pipes.seeds import Draws, KeyFamily, drawing_alike, drawn_alike
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
    damaged,
    pull,
    table_of,
)
from pipes.tallies import Tally, open_tally

if TYPE_CHECKING:
    from pipes.context import Context

__all__ = [
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


class Run:
    """One pipe while it is iterated. Stages subclass it and give `elements`; those with state, the other hooks too.

    `segment` holds the stages whose captures together say where this run stands: those of its inputs, and itself when
    `stateful`; only itself when `anchored`: then its own position tells all of it. `count_fields` names those of a
    position that are counts. A stage with `on_error`, or one that `leaves_out` things by rule, has a `tally`, which
    stands in the segment behind it.
    """

    stateful: ClassVar[bool] = False
    anchored: ClassVar[bool] = False
    count_fields: ClassVar[tuple[str, ...]] = ()
    leaves_out: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    #: Whether `elements` chains `parts`, iterators over elements that are made already: none of these ever raises.
    in_parts: bool = False
    parts: Generator[Iterator[Any], None, None] | None = None

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

    def every(self, first: int, step: int) -> Iterator[Any]:
        """Return the iterator of element `first` from here on and each `step`-th after it, in place of `elements`."""
        return islice(iter(self), first, None, step)

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

    def begun(self, make: Callable[[], Iterator[Any]], keeper: Any) -> Iterator[Any]:
        """Return the iterator of a user's code that `make` begins; `keeper`, unless None, is what it keeps things on.

        Above the point where streams split, what it draws from the global generators is the same in all of them: a
        source that shuffles its list in `__iter__` would else give each another list to split.
        """
        context = self.context
        if keeper is not None:
            first = context.epoch == 0 and not context.rounds
            key = None if first else partial(context.key, self.stage, self.pipe)
            make = partial(as_built(self.pipe).elements, keeper, key, make)
        if id(self.pipe) not in context.above_shard or (context.alone and context.streams == 1):
            return make()
        return drawing_alike(make, context.key(self.stage, self.pipe))

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

    def check(self, position: Position) -> None:
        super().check(position)
        if not isinstance(position.get("drew", False), bool):
            raise damaged(f"stage {self.stage} does not say whether functions above it draw")

    def restore(self, position: Position) -> None:
        position = position or {"given": 0}
        self.ticks = Ticks(position["given"])
        # Whether functions above drew from the global generators.
        self.drew = position.get("drew", False)

    def share(self) -> tuple[int, int]:
        """Return (number of this stream, number of streams)."""
        return self.context.stream, self.context.streams

    def elements(self) -> Iterator[Any]:
        passed, first, total = self._next()
        if self._may_differ():
            every: Iterator[Any] = islice(self._alike(passed), first, None, total)
        else:
            every = self.inputs[0].every(first, total)
        return map(_first, zip(every, self.ticks, strict=False))

    def _next(self) -> tuple[int, int, int]:
        """Return how many inputs lie behind, how many more until the next that is passed on, and from then on."""
        index, total = self.share()
        given = self.ticks.count
        return (0, index, total) if given == 0 else (index + (given - 1) * total + 1, total - 1, total)

    def _may_differ(self) -> bool:
        """Return whether streams split the inputs, and functions above decide which there are."""
        if self.context.streams == 1:
            return False
        above = (node for node in walk(self.pipe) if type(node)._iterable and type(node)._calls_user(node))
        return any(node._places() != () for node in above)

    def _alike(self, passed: int) -> Iterator[Any]:
        """Return the inputs, made with the same draws in all streams, or these would not split the same elements."""
        keys = KeyFamily(self.context.key(self.stage, self.pipe))
        return drawn_alike(iter(self.inputs[0]), keys, passed, self)

    def capture(self) -> Capture:
        return self.ticks.count, self.drew

    def describe(self, captured: Capture) -> Position:
        given, drew = captured
        return {"given": given, "drew": True} if drew else {"given": given}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        if count == 0:
            return []
        passed, first, total = self._next()
        far, places = first + (count - 1) * total + 1, [first + offset * total for offset in wanted]
        if self._may_differ():
            kept = pull(self._alike(passed), far, places, self.stage)
        else:
            kept = self.inputs[0].replay(far, places)
        self.ticks = Ticks(self.ticks.count + count)
        return kept
