"""The state of a pipe that is iterated by `iter(pipe)`, without a loader.

Contract
- A state tells where the newest iteration stood after the last element it gave, while it runs and after it was given up
  (`break`); once its end was seen, the start of the next epoch. After an error there is none.
- It holds what a loader's does for one stream, and the seed; users' draws from the global generators are their own
  affair here, as in any loop.
- A state that was loaded is used up by the next iteration that is asked for an element.
- Children of a fork or demux, iterated one by one, share a stage that no state of one of them describes: refused,
  unless the graph has all of them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from pipes.context import Context
from pipes.errors import StateError
from pipes.node import Node, inputs_of, stage_names, walk
from pipes.run import Run
from pipes.saved import check_fingerprint, fingerprint, opened, sealed
from pipes.state import Captures, Table, count_from, damaged

__all__ = ["Iteration", "Loaded", "loaded_into", "read", "state_at"]


@dataclass(frozen=True)
class Loaded:
    """The checked state of a pipe, with the fingerprint of its graph.

    `seeded` holds, by stage, the epoch in which it was given a seed of its own.
    """

    graph: dict[str, str]
    seed: int
    epoch: int
    stream: int
    streams: int
    table: Table | None
    seeded: dict[str, int]
    on_changed_data: str = "raise"

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON data."""
        content = {name: value for name, value in vars(self).items() if name != "on_changed_data"}
        return sealed({"of": "pipe", **content})

    def check_stream(self, stream: int, streams: int) -> None:
        """Refuse to go on in another stream than the one that saved this."""
        if (stream, streams) != (self.stream, self.streams):
            raise StateError(
                f"the state was saved in stream {self.stream} of {self.streams} (workers and ranks), and this is "
                f"stream {stream} of {streams}: load each state where it was saved, or use DataLoader2, which resumes "
                "anywhere"
            )


class Iteration:
    """What a pipe remembers of its newest iteration: nothing that would keep elements or files alive."""

    def __init__(self, context: Context, run: Run, table: Table | None) -> None:
        self._pipe = weakref.ref(context.last)
        self._run = weakref.ref(run)
        self._table = table
        self._captures: Captures | None = None
        self._error: StateError | None = None
        self.seed, self.epoch = context.seed, context.epoch
        self.stream, self.streams = context.stream, context.streams
        self.over = self.ended = False

    def __reduce__(self) -> Any:
        # Users' classes that pickle all of their attributes pickle this one, too.
        return type(None), ()

    def give_up(self) -> None:
        """Remember where it stands, before its files are closed."""
        self.over, run = True, self._run()
        try:
            self._captures = None if run is None else run.captures()
        except Exception as error:  # a user's own state_dict() fails, and nobody may ask for it
            self._error = StateError(f"where the iteration stood when it was given up is not known: {error}")

    def fail(self) -> None:
        """Remember that where it stands is not known."""
        self.over = True
        self._error = StateError("the iteration failed, and where it stands is not known: resume from an earlier state")

    def end(self) -> None:
        """Remember that its end was seen."""
        self.over = self.ended = True

    def table(self) -> Table | None:
        """Return where it stands; raises StateError after an error."""
        if self._error is not None:
            raise StateError(str(self._error))
        run = self._run()
        if run is not None and not self.over:
            return run.table()
        pipe = self._pipe()
        if self._captures is None or pipe is None:
            return self._table  # never asked for an element
        context = Context(pipe, seed=self.seed, epoch=self.epoch, stream=self.stream, streams=self.streams, alone=True)
        try:
            return context.start().table(self._captures)
        finally:
            context.close()


def state_at(pipe: Node, seed: int, stream: int, streams: int) -> Loaded:
    """Return where `pipe` stands; without an iteration, the start of its next epoch in stream `stream`."""
    _refuse_shared(pipe)
    iteration: Iteration | None = pipe.__dict__.get("_iteration")
    epoch, table = pipe.__dict__.get("_pipes_epoch", 0), None
    if iteration is not None:
        seed, stream, streams = iteration.seed, iteration.stream, iteration.streams
        if not iteration.ended:
            epoch, table = iteration.epoch, iteration.table()
    # A seed that was set since belongs to the next iteration.
    seeded = {name: epoch if at is None else at for name, at in _seeded(pipe).items()}
    return Loaded(fingerprint(pipe), seed, epoch, stream, streams, table, seeded)


def _seeded(pipe: Node) -> dict[str, int | None]:
    """Return the stages that have a seed of their own, and the epoch from which on they have it."""
    names = stage_names(pipe)
    return {
        names[id(node)]: node.__dict__.get("_seed_epoch")
        for node in walk(pipe)
        if node.__dict__.get("_seed") is not None
    }


def read(pipe: Node, state: Any, on_changed_data: str = "raise") -> Loaded:
    """Return what `state` holds, checked against the graph that ends in `pipe`; raises StateError."""
    content = opened(state)
    if content.get("of") != "pipe":
        raise StateError("this is the state of a DataLoader2, not of a pipe: load it into a DataLoader2 of this graph")
    _refuse_shared(pipe)
    check_fingerprint(content.get("graph"), pipe, on_changed_data)
    seed, table, seeded = content.get("seed"), content.get("table"), content.get("seeded")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise damaged("its seed is no 64-bit number")
    epoch, stream, streams = (count_from(content, name, "the pipe") for name in ("epoch", "stream", "streams"))
    if stream >= streams or not isinstance(seeded, dict) or seeded.keys() != _seeded(pipe).keys():
        raise damaged("its streams or its stages with a seed of their own cannot be")
    if any(count_from(seeded, name, "the pipe") > epoch for name in seeded):
        raise damaged("a stage was given its seed in a later epoch")
    if table is not None:
        context = Context(pipe, seed=seed, epoch=epoch, stream=stream, streams=streams, alone=True)
        try:
            context.start().check_table(table, "the pipe")
        finally:
            context.close()
    return Loaded(fingerprint(pipe), seed, epoch, stream, streams, table, seeded, on_changed_data)


def loaded_into(pipe: Node) -> Loaded | None:
    """Return the state that the next iteration of `pipe` goes on from; refuse one that it would pass by."""
    for node in walk(pipe):
        if node is not pipe and "_loaded" in node.__dict__:
            raise StateError(
                f"a state was loaded into {type(node).__name__}, which {type(pipe).__name__} now reads: load the state "
                "of a graph into its last stage, or into the DataLoader2 that runs it"
            )
    loaded: Loaded | None = pipe.__dict__.get("_loaded")
    if loaded is not None:  # set_seed() may have come after it
        check_fingerprint(loaded.graph, pipe)
    return loaded


def _refuse_shared(pipe: Node) -> None:
    nodes = walk(pipe)
    for node in nodes:
        if type(node)._shared and sum(node in inputs_of(each) for each in nodes) < vars(node)["num_instances"]:
            raise StateError(
                "the graph has some of the children of a fork or demux, and the others may be iterated by themselves, "
                "so it has no state outside a loader: use DataLoader2, also for one process"
            )
