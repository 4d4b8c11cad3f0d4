"""The state of a loader as JSON data: made, checked and read back.

Format, version 1
    {"pipes_state": 1, "graph": {stage id: settings}, "seed": int, "epoch": int, "num_streams": int, "world": int,
     "replicate": bool, "streams": {"number": {"at": int, "given": int, "ended": bool, "table": table or None}}}

`graph` is the fingerprint: a state is refused by a graph with other stages or settings, and the error names the
difference. `streams` holds those of one rank; a list of states, one a rank, is read as one. Once the end of an epoch
was seen, the state is that of the next epoch's start. Reading never runs code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipes.datapipe import IterDataPipe
from pipes.errors import StateError
from pipes.loader2.streams import StreamState
from pipes.run import Node, walk
from pipes.state import check_table, count_from

__all__ = ["Checkpoint", "fingerprint", "read_state"]

VERSION = 1


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
        return {
            "pipes_state": VERSION,
            "graph": fingerprint(graph),
            "seed": self.seed,
            "epoch": self.epoch,
            "num_streams": self.num_streams,
            "world": self.world,
            "replicate": self.replicate,
            "streams": {
                str(number): {"at": state.at, "given": state.given, "ended": state.ended, "table": state.table}
                for number, state in sorted(self.streams.items())
            },
        }


def fingerprint(graph: IterDataPipe[Any]) -> dict[str, str]:
    """Return `{stage id: settings}`: functions by qualified name, data by type and length.

    >>> from pipes.iter import IterableWrapper
    >>> fingerprint(IterableWrapper([3, 4]).batch(2))["1:Batcher"]
    'batch_size=2, drop_last=False, wrapper_class=pipes.datapipe.DataChunk'
    """
    found: dict[str, str] = {}
    for place, node in enumerate(walk(graph)):
        settings = IterDataPipe.parameters_of(node)
        parts = [f"{name}={_setting(value)}" for name, value in settings.items() if not _holds_pipes(value)]
        found[f"{place}:{type(node).__name__}"] = ", ".join(parts)
    return found


def _holds_pipes(value: Any) -> bool:
    return isinstance(value, Node) or (
        isinstance(value, list | tuple) and len(value) <= 1000 and any(isinstance(item, Node) for item in value)
    )


def _setting(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return (
            repr(value) if not isinstance(value, str | bytes) or len(value) <= 200 else f"{value[:200]!r}…{len(value)}"
        )
    if isinstance(value, functools.partial):
        return f"partial({_setting(value.func)})"
    if inspect.isroutine(value) or isinstance(value, type):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if isinstance(value, list | tuple) and len(value) <= 20:
        return f"[{', '.join(map(_setting, value))}]"
    size = f"[{len(value)}]" if hasattr(value, "__len__") else ""
    return f"{type(value).__qualname__}{size}"


def read_state(state: Any, graph: IterDataPipe[Any]) -> Checkpoint:
    """Return the checkpoint that `state` (one rank's, or a list of all ranks') holds; raises StateError."""
    parts: Sequence[Any] = state if isinstance(state, list | tuple) else [state]
    if not parts:
        raise StateError("an empty list holds no state")
    checkpoints = [_read_one(part, graph) for part in parts]
    first = checkpoints[0]
    streams: dict[int, StreamState] = {}
    for number, other in enumerate(checkpoints):
        for name in ("seed", "epoch", "num_streams", "world", "replicate"):
            if getattr(other, name) != getattr(first, name):
                raise StateError(
                    f"the states of ranks 0 and {number} are not of one moment: {name} is {getattr(first, name)} and "
                    f"{getattr(other, name)}"
                )
        streams.update(other.streams)
    return Checkpoint(first.seed, first.epoch, first.num_streams, first.world, first.replicate, streams)


def _read_one(state: Any, graph: IterDataPipe[Any]) -> Checkpoint:
    if not isinstance(state, Mapping):
        raise StateError(f"a state is a dict of JSON data (what state_dict() gave), not {type(state).__name__}")
    state = dict(state)
    if "pipes_state" not in state:
        known = "serialized_datapipe" in state
        raise StateError(
            "this state was saved by torchdata, as pickles, which are not read; start this run afresh"
            if known
            else "this is no state of a DataLoader2 of pipes: it has no 'pipes_state'"
        )
    check_table(state)
    if state["pipes_state"] != VERSION:
        raise StateError(
            f"the state has format version {state['pipes_state']}, and this release reads version {VERSION}"
        )
    _compare(state.get("graph"), fingerprint(graph))
    streams = state.get("streams")
    if not isinstance(streams, dict):
        raise StateError("the saved state is damaged: it has no streams; use an earlier state")
    count = _count(state, "num_streams", "the loader")
    found: dict[int, StreamState] = {}
    for key, value in streams.items():
        if len(key) > 20 or not key.isdecimal() or key != str(int(key)) or int(key) >= count:
            raise StateError(f"the saved state is damaged: {key[:40]!r} is no stream of {count}; use an earlier state")
        where = f"stream {key}"
        table = value.get("table") if isinstance(value, dict) else None
        if table is not None and not isinstance(table, dict):
            raise StateError(f"the saved state is damaged: {where} has no table; use an earlier state")
        at, given = _count(value, "at", where), _count(value, "given", where)
        if given < at:
            raise StateError(f"the saved state is damaged: {where} stands at {at}, after {given}; use an earlier state")
        found[int(key)] = StreamState(table, at, given, value.get("ended") is True)
    seed = state.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise StateError("the saved state is damaged: its seed is no 64-bit number; use an earlier state")
    epoch = _count(state, "epoch", "the loader")
    return Checkpoint(seed, epoch, count, _count(state, "world", "the loader"), state.get("replicate") is True, found)


def _count(position: Any, field: str, where: str) -> int:
    try:
        return count_from(position, field, where)
    except StateError:
        value = position.get(field) if isinstance(position, dict) else position
        raise StateError(
            f"the saved state is damaged: {field!r} of {where} is {str(value)[:40]!r}, which is no count; use an "
            "earlier state"
        ) from None


def _compare(saved: Any, here: dict[str, str]) -> None:
    if not isinstance(saved, dict) or not all(isinstance(settings, str) for settings in saved.values()):
        raise StateError("the saved state is damaged: it has no description of its graph; use an earlier state")
    for stage in sorted({*saved, *here}, key=lambda name: (name.split(":")[0].zfill(6), name)):
        was, now = saved.get(stage), here.get(stage)
        if was != now:
            raise StateError(
                f"the state was saved by another graph: stage {stage[:100]} "
                + (
                    "is not in the saved one"
                    if was is None
                    else "is missing here"
                    if now is None
                    else f"had {_difference(was, now)}"
                )
                + "; resume with the graph that made the state, or start afresh"
            )


def _difference(was: str, now: str) -> str:
    pairs = zip(was.split(", "), now.split(", "), strict=False)
    old, new = next(((a, b) for a, b in pairs if a != b), (was, now))
    return f"{old[:200]}, and has {new[:200]} here"
