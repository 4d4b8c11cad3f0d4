"""How a graph of pipes is opened for one stream of one epoch: a `Context` makes one `Run` a pipe.

Contract
- `Context.open` makes the runs from the last stage up to the sources, then opens them from the sources down, each at
  its saved position, if there is one. It does not recurse, so the depth of a graph is limited by its iteration alone.
- A pipe has one live iteration. A new one closes the older, whose iterator then raises StaleIteratorError.
- Closing is explicit and complete: every generator of a context is closed, last stage first, so files close in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from pipes.errors import GraphError
from pipes.node import Node, above_shard, automatic_shard_point, check_depth, label_of, names_of, walk
from pipes.run import Run, ShardRun
from pipes.seeds import derive_key, seed_was_asked
from pipes.state import Position, Table, anchor_of, count_from, positions_in
from pipes.tallies import Tallies

__all__ = ["Context", "feeds_two"]


def feeds_two(name: str) -> GraphError:
    """Return the error for a pipe that two stages of a graph read."""
    return GraphError(
        f"{name} feeds two stages of one graph; a pipe has one iterator, so give each its own copy of the elements "
        "with .fork(2)"
    )


class Context:
    """One stream of one epoch of one graph, and the runs opened for it."""

    #: Whether stages should finish an element before they take the next, so that it is known which one they die of.
    one_by_one = False
    #: Whether it was made inside an element, so that its draws hang on the global generators.
    inside = False

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
        self.names = names_of(self.nodes)
        point = automatic_shard_point(self.nodes) if shard_automatically else None
        self.shard_after = point if streams > 1 else None
        # By the point where it would be split, so that one stream joins the same pairs as several do.
        self.above_shard = above_shard(self.nodes, point)
        #: The pipes of graphs that users' stages built while they ran: what reads those is split already.
        self.built: frozenset[int] = frozenset()
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
            raise feeds_two(self.names[id(pipe)])
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

    def nested(self, last: Node, host: Run, number: int) -> Context:
        """Return a context for a graph that the stage `host` built, or found, while it ran: its iteration `number`."""
        child = self.again(last, number)
        child.nodes = walk(last)
        own = {id(node): f"{host.stage}/{place}:{label_of(node)}" for place, node in enumerate(child.nodes)}
        child.names = {**own, **self.names}
        child.built = self.built | (own.keys() - {id(node) for node in self.nodes})
        if id(host.pipe) in self.above_shard:
            # All streams read it, and split what comes of it later.
            child.above_shard = self.above_shard | child.built
        return child

    def leave(self, child: Context) -> None:
        """Close a context that `again` or `nested` made and forget it."""
        child.close()
        self.tallies.drop(child.runs.values())
        self.children = [each for each in self.children if each is not child]

    def key(self, stage: str, pipe: Node) -> int:
        """Return the key of a stage's draws; the streams share one above the shard point, and differ below it."""
        if self.inside:
            seed_was_asked()
        stream = -1 if id(pipe) in self.above_shard else self.stream
        own = getattr(pipe, "_seed", None)
        epoch = self.epoch
        if own is not None and self.alone:
            epoch -= getattr(pipe, "_seed_epoch", None) or 0
        return derive_key(self.seed if own is None else own, epoch, stage, stream, *self.rounds)

    def close(self) -> None:
        """Close every iterator of the context, last stage first, all of them also when one raises as it closes."""
        ends = [child.close for child in self.children]
        ends += [run.close for key, run in self.runs.items() if key not in self.adopted]
        ends += self.at_close
        self.at_close.clear()
        with ExitStack() as stack:
            for end in reversed(ends):
                stack.callback(end)


class _Opening:
    """A run whose inputs are being opened."""

    __slots__ = ("below", "inputs", "pipe", "position", "run", "table")

    def __init__(self, pipe: Node, run: Run, position: Position, table: Table | None, below: Table | None) -> None:
        self.pipe, self.run = pipe, run
        self.position, self.table, self.below = position, table, below
        self.inputs = deque(run.input_pipes())
