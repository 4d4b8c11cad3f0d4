"""What each stage of a graph does with sharding, state, length and memory, without running it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from pipes.config_stages import parameters_of
from pipes.context import Context
from pipes.datapipe import IterDataPipe, chained_name, length_of
from pipes.errors import brief, mask
from pipes.node import Node, above_shard, automatic_shard_point, inputs_of, stage_names, walk
from pipes.run import Run
from pipes.stages.bucketing import BucketBatcher, MaxTokenBucketizer
from pipes.stages.flattening import ExpandingRun
from pipes.stages.shuffling import Shuffler
from pipes.user_run import UserRun

__all__ = ["Report", "StageReport", "describe_graph"]


@dataclass(frozen=True)
class StageReport:
    """The facts about one stage; all of it is plain data.

    `sharding`: "all" (every stream runs it in full), "point" (the split is here), "point after" (the automatic split is
    right behind it), "share" (each stream runs it on its own elements).
    `state`: "none" (what feeds it says all), "position" (a count), "anchor" (counts, and `rereads` inputs are read
    again on a restore), "own" (its state_dict), "replay" (from the start of the epoch), "by key" (a map pipe).
    `length` is that of all streams together; None is unknown, and `length_note` says why.
    `buffer` is how many elements one stream may hold, -1 without limit; `held` that of all streams.
    """

    id: str
    name: str
    parameters: dict[str, str]
    inputs: list[str]
    built: str
    sharding: str
    state: str
    rereads: int | None
    length: int | None
    length_note: str
    buffer: int
    held: int


@dataclass(frozen=True)
class Report:
    """The facts about a graph, its sources first; `notes` are sentences on what a reader may not expect."""

    streams: int
    stages: list[StageReport]
    notes: list[str]

    def as_data(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {"streams": self.streams, "stages": [asdict(stage) for stage in self.stages], "notes": self.notes}


def describe_graph(pipe: IterDataPipe[Any], streams: int = 1) -> Report:
    """Return what the graph that ends in `pipe` does when `streams` streams run it.

    >>> from pipes.iter import IterableWrapper
    >>> report = describe_graph(IterableWrapper(range(10)).sharding_filter().shuffle(4).batch(3), streams=2)
    >>> [(stage.name, stage.sharding, stage.state, stage.length, stage.held) for stage in report.stages]
    [('IterableWrapper', 'all', 'position', 10, 0), ('sharding_filter', 'point', 'position', 10, 0),
     ('shuffle', 'share', 'anchor', 10, 8), ('batch', 'share', 'none', 4, 6)]
    """
    nodes = walk(pipe)
    names = stage_names(pipe)
    point = automatic_shard_point(nodes)
    above = above_shard(nodes, point)
    context = Context(pipe, seed=0, streams=streams)
    stages = []
    for node in nodes:
        where = _sharding(node, point, above)
        run = type(node)._make_run(node, context, names[id(node)]) if type(node)._iterable else None
        length, length_note = _length(node, where, streams, point)
        buffer = _buffer(node, run)
        built = getattr(node, "_built", None)
        stages.append(
            StageReport(
                id=names[id(node)],
                name=name_of(node),
                parameters=_parameters(node),
                inputs=[names[id(source)] for source in inputs_of(node)],
                built=f"{built[0]}:{built[1]}" if built else "",
                sharding=where,
                state=_state(run),
                rereads=_rereads(node, run),
                length=length,
                length_note=length_note,
                buffer=buffer,
                held=buffer * streams if buffer > 0 else buffer,
            )
        )
    return Report(streams, stages, _notes(nodes, stages, point, above))


def name_of(pipe: Node) -> str:
    """Return the name of a stage as a user writes it: the chained one, else that of the class."""
    if (name := chained_name(type(pipe))) is not None:
        return name
    main: Any = type(vars(pipe).get("main"))
    if hasattr(main, "chained_as"):  # a child of what split a pipe
        return f"{main.chained_as} {vars(pipe)['instance_id']}"
    return getattr(type(pipe), "chained_as", type(pipe).__name__)


def _parameters(pipe: Node) -> dict[str, str]:
    """Return the settings that differ from their defaults, shortened, secrets masked."""
    fields = vars(pipe)
    own = {id(source) for source in inputs_of(pipe)}
    shown: dict[str, str] = {}
    try:
        takes = parameters_of(type(pipe))
    except (TypeError, ValueError, StopIteration):
        takes = ()
    for each in takes:
        value = fields.get(each.name, fields.get(f"_{each.name}", each.default))
        if value is each.default or id(value) in own or each.name in ("main", "instance_id"):
            continue
        if isinstance(value, list | tuple | dict) and any(id(item) in own for item in value):
            continue
        if type(value) is type(each.default) and value == each.default:
            continue
        text = _setting(value)
        shown[each.name] = mask(f"{each.name}={text}").removeprefix(f"{each.name}=")
    return shown


def _setting(value: Any) -> str:
    if callable(value):
        name = getattr(value, "__qualname__", None)
        return brief(value, 60) if name is None else str(name).replace("<locals>.", "")
    return brief(value, 60)


def _sharding(node: Node, point: Node | None, above: frozenset[int]) -> str:
    if type(node)._shards:
        return "point"
    if node is point:
        return "point after"
    return "all" if id(node) in above else "share"


def _state(run: Run | None) -> str:
    if run is None:
        return "by key"
    if isinstance(run, UserRun):
        return "replay" if run.replays else "own" if run.remembers else "none"
    if run.anchored:
        return "anchor"
    return "position" if run.stateful else "none"


def _rereads(node: Node, run: Run | None) -> int | None:
    """Return about how many inputs an anchored stage reads again on a restore; None where it depends."""
    if run is None or not run.anchored:
        return None
    if isinstance(node, Shuffler) and node.buffer_size > 1:
        # The mean age of the oldest element in a buffer of B, in inputs.
        return round(node.buffer_size * (math.log(node.buffer_size) + 0.58))
    if isinstance(run, ExpandingRun):
        return run.anchor_every
    if isinstance(node, BucketBatcher | MaxTokenBucketizer):
        return node.buffer_size
    return None


def _length(node: Node, where: str, streams: int, point: Node | None) -> tuple[int | None, str]:
    try:
        if where != "share" or streams == 1:
            if type(node)._shards:
                return sum(length_of(node, (stream, streams)) for stream in range(streams)), ""
            return length_of(node), ""
        if point is not None:
            return None, "not known behind an automatic shard point; write sharding_filter"
        return sum(length_of(node, (stream, streams)) for stream in range(streams)), ""
    except Exception as error:
        return None, mask(str(error))


def _buffer(node: Node, run: Run | None) -> int:
    """Return how many elements a stage holds at most; other sizes, as a file's buffer in bytes, are none of that."""
    size: Any
    if isinstance(node, BucketBatcher):
        size = node.buffer_size
    elif getattr(node, "forms_batches", False) and "batch_size" in vars(node):
        size = vars(node)["batch_size"]
    else:
        size = vars(node).get("buffer_size") if run is not None and run.anchored else 0
    return size if isinstance(size, int) and not isinstance(size, bool) and size >= -1 else 0


def _notes(nodes: list[Node], stages: list[StageReport], point: Node | None, above: frozenset[int]) -> list[str]:
    names = {id(node): stage.name for node, stage in zip(nodes, stages, strict=True)}
    notes = []
    if point is not None:
        notes.append(
            f"There is no sharding_filter, so the graph is split right behind {names[id(point)]}: every stream runs "
            "all that is above it. Put sharding_filter where elements are still names."
        )
    if any(type(node)._shards and any(type(each)._shards for each in walk(node)[:-1]) for node in nodes):
        notes.append(
            "A shard point stands below another one: unless they split by different groups, a stream gets a share of "
            "its share and the rest is lost. Keep the first."
        )
    heavy = [names[id(node)] for node in nodes if id(node) in above and type(node)._calls_user(node)]
    if heavy:
        notes.append(
            f"{', '.join(heavy)}: above the shard point, so every stream calls these functions for all elements. "
            "Put sharding_filter before them."
        )
    replayed = [stage.name for stage in stages if stage.state == "replay"]
    if replayed:
        notes.append(
            f"{', '.join(replayed)}: without state of their own, so a resume replays them from the start of the epoch. "
            "Give the class state_dict() and load_state_dict(), or `stateless = True`."
        )
    unlimited = [stage.name for stage in stages if stage.buffer == -1]
    if unlimited:
        notes.append(f"{', '.join(unlimited)}: a buffer without limit grows with the distance between its readers.")
    return notes
