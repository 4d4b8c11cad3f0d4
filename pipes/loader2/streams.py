"""One stream of one epoch: the part of a graph's elements that one process gives in order, with its state.

Contract
- `next()` gives the stream's outputs, then raises StopIteration at every further call. `given` counts them.
- The global generators are seeded once a unit, from (seed, epoch, stream, unit). A unit is one output of a graph whose
  last stages form batches, else 64 outputs. Graphs without user functions leave the generators alone.
- `snapshot()` is `(at, captures)`: where the graph stood after output number `at`, now or at the last unit boundary.
- An error ends the stream; its snapshot then is that before the unit that failed.
- A stream opened on a `StreamState` goes to its table, which stands at output `at`, and on to output `given`, drawing
  and dropping what lies between. It then gives what an uninterrupted stream would have given, but for draws from the
  global generators above a stage that keeps elements back; `drew_above` names that stage once such draws were seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipes.as_built import as_built, check_numbers
from pipes.context import Context
from pipes.datapipe import IterDataPipe, MapDataPipe
from pipes.error_policy import StageCounts
from pipes.errors import StateError, add_note, notes_of
from pipes.loader2.blocks import SharedList
from pipes.run import Node, Run, inputs_of, walk
from pipes.seeds import GlobalGenerators, KeyFamily, seed_globals, watched
from pipes.stages.collating import Collator
from pipes.stages.filtering import Filter
from pipes.stages.mapping import Mapper
from pipes.stages.selecting import Enumerator, Header, IndexAdder, LengthSetter, Skipper
from pipes.stages.sharding import ShardingFilter
from pipes.stages.threads import ThreadPoolMapper
from pipes.stages.wrapping import IterableWrapper, SequenceWrapper
from pipes.state import Captures, Table

__all__ = [
    "Plan",
    "Snapshot",
    "Stream",
    "StreamState",
    "check_counted",
    "collates_last",
    "describe",
    "given_up",
    "runs_users_code",
    "unit_size",
    "with_numbers",
]

Snapshot = tuple[int, Captures]

_UNIT = 64
# The stages that give at most one output for an input: a unit stays one batch through them.
_PASSING = (Mapper, Filter, Enumerator, Header, IndexAdder, LengthSetter, Skipper, ShardingFilter)
_DATA = (list, tuple, range, str, bytes, dict, set, frozenset, SharedList)


@dataclass(frozen=True)
class Plan:
    """What the streams of one epoch have in common."""

    seed: int
    epoch: int
    streams: int
    replicate: bool = False
    world: int = 1
    on_changed_data: str = "raise"
    #: By stage, what was listed once for all streams; it stays in its process.
    listings: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.seed, self.epoch, self.streams, self.replicate, self.world, self.on_changed_data)

    def note(self, number: int, given: int) -> str:
        """Return the note that says at which output an error came."""
        return f"output {given} of stream {number}, epoch {self.epoch}"

    def context(self, graph: IterDataPipe[Any], number: int, make: Callable[..., Context] = Context) -> Context:
        """Return a context of stream `number` of the epoch."""
        return make(
            graph,
            seed=self.seed,
            epoch=self.epoch,
            stream=number,
            streams=self.streams,
            world=self.world,
            shard_automatically=not self.replicate,
            on_changed_data=self.on_changed_data,
            listings=self.listings,
        )


@dataclass(frozen=True)
class StreamState:
    """Where a stream stands: its table at output `at`, and the outputs given since the epoch's start.

    `counts` is what its stages have counted up to output `given`; the table has it, too, but as of `at`, and an ended
    stream has no table.
    """

    table: Table | None = None
    at: int = 0
    given: int = 0
    ended: bool = False
    counts: Mapping[str, StageCounts] = field(default_factory=dict)
    #: By stage, what users' pipes have counted where the epoch begins; of an ended stream, the next epoch. None where
    #: the pipes themselves know.
    numbers: Mapping[str, Mapping[str, Any]] | None = None

    def after(self, given: int) -> StreamState:
        """Return the state with `given` outputs given."""
        return replace(self, given=given)


def runs_users_code(nodes: list[Node]) -> bool:
    """Return whether iterating the graph runs a user's function or class."""
    return any(_is_users(node) for node in nodes)


def _is_users(node: Node) -> bool:
    if isinstance(node, IterableWrapper):
        return not isinstance(node.iterable, _DATA)
    if isinstance(node, MapDataPipe):
        return not (isinstance(node, SequenceWrapper) and isinstance(node.sequence, _DATA))
    return type(node)._calls_user(node) or getattr(type(node), "_own_iter", None) is not None


def unit_size(graph: Node) -> int:
    """Return the number of outputs that share one seeding of the global generators."""
    node = graph
    while not getattr(node, "forms_batches", False):
        sources = inputs_of(node)
        if not isinstance(node, (*_PASSING, ThreadPoolMapper)) or len(sources) != 1:
            return _UNIT
        node = sources[0]
    return 1


def collates_last(graph: Node) -> bool:
    """Return whether what the graph's collate stacks leaves the graph at once.

    A later stage that keeps or repeats elements would share their memory with main, which may change it.
    """
    node = graph
    while not isinstance(node, Collator):
        sources = inputs_of(node)
        if not isinstance(node, _PASSING) or len(sources) != 1:
            return False
        node = sources[0]
    return True


def set_counted(context: Context, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    """Set what the users' pipes of a context count."""
    for node in context.nodes:
        keeper = type(node)._keeper(node)
        if keeper is not None:
            as_built(node).set_numbers(keeper, numbers.get(context.names[id(node)], {}))


def check_counted(context: Context, numbers: Mapping[str, Any]) -> None:
    """Refuse numbers that no user's pipe of the context can have counted."""
    known = {context.names[id(node)]: type(node)._keeper(node) for node in context.nodes}
    for stage, counted in numbers.items():
        check_numbers(known.get(stage), counted, stage)


def with_numbers(states: Mapping[int, StreamState], numbers: Mapping[int, Any]) -> dict[int, StreamState]:
    """Return the states with what users' pipes had counted, by stream, where the epoch has not begun."""
    return {
        number: state
        if state.table is not None or state.numbers is not None or state.ended
        else replace(state, numbers=numbers.get(number))
        for number, state in states.items()
    }


def given_up(
    streams: Mapping[int, Stream], states: Iterable[tuple[int, StreamState]]
) -> Iterator[tuple[int, StreamState]]:
    """Give the states of the epoch after one that was given up, in which some streams had not begun to count."""
    counted = streams[min(streams)].counted(above=True) if streams else None
    for number, state in states:
        begins = state.table is None and state.numbers is None and not state.ended
        yield number, replace(state, numbers=counted) if counted and begins and number not in streams else state


def describe(graph: IterDataPipe[Any], plan: Plan, number: int, captures: Captures) -> Table:
    """Return the JSON table that `captures`, made by stream `number` in any process, stand for."""
    context = plan.context(graph, number)
    try:
        return context.start().table(captures)
    finally:
        context.close()


class Stream:
    """Runs stream `number` of an epoch from `start` on.

    `shares` says that others in this process use the global generators between two outputs of this stream; `make` makes
    its context.
    """

    def __init__(
        self,
        graph: IterDataPipe[Any],
        plan: Plan,
        number: int,
        start: StreamState | None = None,
        *,
        shares: bool = False,
        make: Callable[..., Context] = Context,
    ) -> None:
        start = start or StreamState()
        self.number = number
        self.ended = start.ended
        self.given = start.at
        self._failed = False
        self.drew_above: str | None = None
        self.unit = unit_size(graph)
        self._plan = plan
        self._keys = KeyFamily(plan.seed, plan.epoch, "unit", number)
        self._context = plan.context(graph, number, make)
        self.seeded = runs_users_code(self._context.nodes)
        # Where the draws of a unit of several outputs go on.
        self._generators: GlobalGenerators | None = None
        self._keeps_generators = shares and self.seeded and self.unit > 1
        self.last = self._context.names[id(graph)]
        if start.ended:
            self.given = start.given
            return
        if start.table is None and start.numbers is not None:
            set_counted(self._context, start.numbers)
        self._run = self._context.start(start.table)
        self._boundary: Snapshot = (start.at, self._run.captures())
        if self.seeded:
            self._watch()
        self._go_to(start.given)
        self._iterator = iter(self._run)

    def _go_to(self, given: int) -> None:
        missing = given - self.given
        if missing < 0:
            raise StateError(f"the saved state is damaged: stream {self.number} stands at {self.given}, after {given}")
        if not self.seeded:
            # No draw of a user is lost by going past the outputs without making them.
            if missing:
                self._run.replay(missing, [missing - 1])
            self.given = given
            return
        self._iterator = iter(self._run)
        for _ in range(missing):
            try:
                self.next()
            except StopIteration:
                raise StateError(
                    f"stream {self.number} ends after {self.given} outputs, but the state was saved after {given}; the "
                    "data changed: resume with the data the state was made from, or start afresh"
                ) from None

    def next(self) -> Any:
        """Return the next output; raises StopIteration at the end."""
        if self.ended:
            raise StopIteration
        if self.given % self.unit == 0:
            self._boundary = (self.given, self._run.captures())
            if self.seeded:
                seed_globals(self._keys.key(self.given // self.unit))
        elif self._generators is not None:
            self._generators.restore()
        try:
            element = next(self._iterator)
        except StopIteration:
            self.ended = True
            self.close()
            raise
        except BaseException as error:
            self._failed = True
            if isinstance(error.__cause__, StopIteration):
                # A user's function raised it, and Python made this error of it; what the stage noted is on that.
                for note in notes_of(error.__cause__):
                    add_note(error, note)
            raise
        self.given += 1
        if self._keeps_generators:
            self._generators = GlobalGenerators.set_aside()
        return element

    def fail(self) -> None:
        """End the stream before its last output, which nobody was given."""
        self.given, self._failed = self.given - 1, True

    def snapshot(self) -> Snapshot:
        """Return where the graph stands now, or stood at the newest output at which a unit of draws ended."""
        if self._failed or (self.seeded and self.given % self.unit):
            return self._boundary
        return self.given, self._run.captures()

    @property
    def before_newest(self) -> Snapshot:
        """Where the graph stood before the newest output, or at the newest place before that."""
        return self._boundary

    def counted(self, *, above: bool = False) -> dict[str, dict[str, Any]]:
        """Return, by stage, what users' pipes have counted so far; with `above`, those that all streams read."""
        context = self._context
        return {
            context.names[id(node)]: numbers
            for node in context.nodes
            if (not above or id(node) in context.above_shard) and (keeper := type(node)._keeper(node)) is not None
            if (numbers := as_built(node).numbers(keeper))
        }

    @property
    def loose_notes(self) -> list[str]:
        """The notes that the error which ended this stream refused to take."""
        return self._context.loose_notes

    @property
    def keeps_numbers(self) -> bool:
        """Whether a user's stage counts epochs, or the like, so that who replays it has to know its numbers."""
        return any(getattr(run, "numbers", None) for run in self._context.runs.values())

    def counts(self) -> dict[str, StageCounts]:
        """Return what each stage with `on_error`, or that leaves things out, has counted; empty without any."""
        return self._context.tallies.counts() if self._context.tallies else {}

    def table(self, snapshot: Snapshot) -> Table:
        """Return the JSON table that a snapshot of this stream stands for."""
        return self._run.table(snapshot[1])

    def _watch(self) -> None:
        """Notice users' draws above stages that keep elements back: a resume re-reads those with other draws."""
        for run in list(self._context.runs.values()):
            for source in run.inputs if run.anchored else ():
                if source._iterator is None and runs_users_code(walk(source.pipe)):
                    source._iterator = self._watched(source, run.stage)

    def _watched(self, source: Run, stage: str) -> Iterator[Any]:
        def tell() -> None:
            self.drew_above = self.drew_above or stage

        return watched(iter(source.elements()), tell)

    def close(self) -> None:
        """Close every iterator of the stream."""
        self._context.close()
