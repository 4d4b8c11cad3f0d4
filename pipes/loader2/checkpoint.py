"""The state of a loader as JSON data: made, checked and read back.

Format, version 1
    {"pipes_state": 1, "graph": {stage id: settings}, "seed": int, "epoch": int, "num_streams": int, "world": int,
     "replicate": bool, "streams": {"number": {"at": int, "given": int, "ended": bool, "table": table or None,
     "counts": {stage id: what `on_error` counted}, "numbers": {stage id: what a user's pipe counted}}}, "digest": str}

`graph` is the fingerprint: a state is refused by a graph with other stages or settings, and the error names the
difference. `streams` holds those of one rank; a list of states, one a rank, is read as one. Once the end of an epoch
was seen, the state is that of the next epoch's start. Reading never runs code. `digest` tells a damaged state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipes.datapipe import IterDataPipe
from pipes.error_policy import counts_as_data, counts_from_data
from pipes.errors import StateError
from pipes.loader2.streams import Plan, StreamState, check_counted
from pipes.saved import check_fingerprint, fingerprint, opened, sealed
from pipes.state import count_from, damaged

__all__ = ["Checkpoint", "check_place", "check_tables", "read_state"]


@dataclass(frozen=True)
class Checkpoint:
    """A loader's state, checked."""

    seed: int
    epoch: int
    num_streams: int
    world: int
    replicate: bool
    streams: dict[int, StreamState]

    def to_json(self, graph: IterDataPipe[Any]) -> dict[str, Any]:
        """Return the state as plain JSON data."""
        content = {
            "graph": fingerprint(graph),
            "seed": self.seed,
            "epoch": self.epoch,
            "num_streams": self.num_streams,
            "world": self.world,
            "replicate": self.replicate,
            "streams": {
                str(number): {
                    "at": state.at,
                    "given": state.given,
                    "ended": state.ended,
                    "table": state.table,
                    "counts": {stage: counts_as_data(counts) for stage, counts in state.counts.items()},
                    **({"numbers": state.numbers} if state.numbers else {}),
                }
                for number, state in sorted(self.streams.items())
            },
        }
        return sealed(content)


def read_state(state: Any, graph: IterDataPipe[Any], on_changed_data: str = "raise") -> Checkpoint:
    """Return the checkpoint that `state` (one rank's, or a list of all ranks') holds; raises StateError."""
    parts: Sequence[Any] = state if isinstance(state, list | tuple) else [state]
    if not parts:
        raise StateError("an empty list holds no state")
    first = _read_one(parts[0], graph, on_changed_data)
    # Before the others are read: there may be a million.
    if len(parts) > max(first.world, 1):
        raise StateError(
            f"there are {len(parts)} states, of a loader with a world size of {first.world}: pass one state a rank"
        )
    streams: dict[int, StreamState] = {}
    for number, part in enumerate(parts):
        other = _read_one(part, graph, on_changed_data) if number else first
        for name in ("seed", "epoch", "num_streams", "world", "replicate"):
            if getattr(other, name) != getattr(first, name):
                raise StateError(
                    f"the states of ranks 0 and {number} are not of one moment: {name} is {getattr(first, name)} and "
                    f"{getattr(other, name)}"
                )
        for stream, state in other.streams.items():
            if streams.setdefault(stream, state) != state:
                raise StateError(f"two of the states hold stream {stream}, at different places: pass one state a rank")
    return Checkpoint(first.seed, first.epoch, first.num_streams, first.world, first.replicate, streams)


def check_tables(graph: IterDataPipe[Any], plan: Plan, streams: dict[int, StreamState]) -> None:
    """Refuse, with StateError, tables that no stream of `graph` can have given; nothing is opened or read."""
    for number, state in streams.items():
        if state.numbers:
            check_counted(plan.context(graph, number), state.numbers)
        if state.table is not None:
            context = plan.context(graph, number)
            try:
                context.start().check_table(state.table, f"stream {number}")
            finally:
                context.close()


def _read_one(state: Any, graph: IterDataPipe[Any], on_changed_data: str) -> Checkpoint:
    state = opened(state)
    if state.get("of") == "pipe":
        raise StateError("this is the state of a pipe, not of a DataLoader2: load it into the pipe")
    check_fingerprint(state.get("graph"), graph, on_changed_data)
    streams = state.get("streams")
    if not isinstance(streams, dict):
        raise damaged("it has no streams")
    count = count_from(state, "num_streams", "the loader")
    found: dict[int, StreamState] = {}
    for key, value in streams.items():
        if len(key) > 20 or not key.isdecimal() or key != str(int(key)) or int(key) >= count:
            raise damaged(f"{key[:40]!r} is no stream of {count}")
        found[int(key)] = _stream(value, f"stream {key}")
    seed = state.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise damaged("its seed is no 64-bit number")
    epoch, world = count_from(state, "epoch", "the loader"), count_from(state, "world", "the loader")
    replicate = state.get("replicate")
    if not isinstance(replicate, bool):
        raise damaged("'replicate' is neither true nor false")
    return Checkpoint(seed, epoch, count, world, replicate, found)


def _stream(value: Any, where: str) -> StreamState:
    at, given = count_from(value, "at", where), count_from(value, "given", where)
    table, ended = value.get("table"), value.get("ended")
    if table is not None and not isinstance(table, dict):
        raise damaged(f"{where} has no table")
    if not isinstance(ended, bool):
        raise damaged(f"{where} does not say whether it ended")
    if given < at or (table is None and at):
        raise damaged(f"{where} stands at {at}, after {given}")
    numbers = value.get("numbers", {})
    if not isinstance(numbers, dict):
        raise damaged(f"{where} does not say what users' pipes counted")
    counts = value.get("counts")
    if not isinstance(counts, dict):
        raise damaged(f"{where} does not say what its stages counted")
    return StreamState(
        table, at, given, ended, {stage: counts_from_data(each, stage) for stage, each in counts.items()}, numbers
    )


def check_place(checkpoint: Checkpoint, rank: int, world: int, *, by_level: bool) -> None:
    """Raise StateError unless one of `world` ranks can go on; `by_level` says that ranks and workers split apart."""
    count = checkpoint.num_streams
    if count < 1 or count % world:
        raise StateError(f"the state's {count} streams cannot be spread over {world} ranks evenly")
    if by_level and checkpoint.world != world:
        raise StateError(
            f"the graph is split by rank and by worker apart, and the state was saved by {checkpoint.world} ranks, "
            f"not {world}: resume with as many, or split once, by .sharding_filter() without an argument"
        )
    own = range(rank, count, world)
    if sum(number in own for number in checkpoint.streams) < len(own):
        missing = list(itertools.islice((number for number in own if number not in checkpoint.streams), 8))
        raise StateError(f"the state lacks streams {missing} of rank {rank}: pass the list of the states of all ranks")
