"""What a loader says about how its graph is split into streams: lengths, and warnings of work or shares gone wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from pipes.datapipe import IterDataPipe, MapDataPipe, length_of
from pipes.errors import GraphError
from pipes.graph import clone
from pipes.node import (
    Node,
    automatic_shard_point,
    built_at,
    describe_automatic_sharding,
    inputs_of,
    reads_by_key,
    stage_names,
    walk,
)
from pipes.shard_points import flows_of, level_share, splits_by_level
from pipes.stages.filtering import Filter
from pipes.stages.sharding import ShardingFilter

__all__ = ["adapted", "length_over_streams", "warnings_of_sharding"]


def length_over_streams(graph: IterDataPipe[Any], numbers: Iterable[int], streams: int, world: int, auto: bool) -> int:
    """Return how many outputs the streams `numbers` of `streams` give together; TypeError names a stage without one."""
    point: Any = automatic_shard_point(walk(graph)) if auto else None
    if point is not None:
        graph = clone(graph, {id(point): ShardingFilter(point)})
    if not splits_by_level(graph):
        return sum(length_of(graph, (number, streams)) for number in numbers)
    return sum(length_of(_by_hand(graph, number, streams, world)) for number in numbers)


def _by_hand(graph: IterDataPipe[Any], number: int, streams: int, world: int) -> IterDataPipe[Any]:
    """Return a copy in which each sharding_filter has by hand the share that stream `number` takes there."""
    graph = clone(graph)
    for node in walk(graph):
        if isinstance(node, ShardingFilter):
            own, total = node.share()
            place, count = level_share(node._splits(), number, streams, world)
            node._groups, node.sharding_group_filter = {1: (total * count, own + total * place)}, None
    return graph


def warnings_of_sharding(graph: IterDataPipe[Any], streams: int) -> list[str]:
    """Return a sentence each for: no sharding_filter, work that every stream repeats, branches that are not split,
    streams that get nothing.

    >>> from pipes.iter import IterableWrapper
    >>> warnings_of_sharding(IterableWrapper(["a.tar", "b.tar"]).sharding_filter().open_files("rb"), 4)
    ['stage 0:IterableWrapper gives 2 elements to share among 4 streams, so 2 streams get none: use at most
    num_streams=2 (workers times ranks, unless it is given), or more, smaller shards']
    """
    nodes, names = walk(graph), stage_names(graph)
    automatic = automatic_shard_point(nodes)
    points = [node for node in nodes if type(node)._shards]
    found = [describe_automatic_sharding(graph) if automatic is not None else _repeated(points, names, streams)]
    if points:
        found.extend(_half_split(nodes, names, streams))
    found.append(_too_few(points or [automatic], names, streams))
    return [sentence for sentence in found if sentence is not None]


def _repeated(points: list[Node], names: dict[int, str], streams: int) -> str | None:
    for point in points:
        above = walk(point)[:-1]
        own_keys = all(reads_by_key(source) for source in inputs_of(point))
        # What a map pipe gathers, every process needs as a whole.
        whole = {id(each) for node in above if not type(node)._iterable for each in walk(node)[:-1]}
        heavy = [
            names[id(node)]
            for node in above
            if _is_heavy(node) and (id(node) not in whole if type(node)._iterable else not own_keys)
        ]
        if heavy:
            return (
                f"{', '.join(heavy[:4])} stand{'s' if len(heavy) == 1 else ''} above {names[id(point)]}"
                f"{built_at(point)}, so each of the {streams} streams runs {'it' if len(heavy) == 1 else 'them'} for "
                "all elements: put .sharding_filter() where the elements are still names"
            )
    return None


def _is_heavy(node: Node) -> bool:
    """Return whether a stage opens files or runs a user's function; a filter, which picks names, belongs there."""
    if isinstance(node, Filter) or not inputs_of(node):
        return False
    own = getattr(type(node), "_own_iter", None) is not None or (
        isinstance(node, MapDataPipe) and not type(node).__module__.startswith("pipes.")
    )
    return own or type(node)._calls_user(node) or type(node)._opens


def adapted(graph: IterDataPipe[Any], adapt: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a user's `worker_init_fn` or `worker_reset_fn` makes of the graph; refuse one that shards it."""
    before = {id(node): node.share() for node in walk(graph) if isinstance(node, ShardingFilter)}
    made = adapt(graph, *arguments)
    for node in walk(made) if isinstance(made, Node) else ():
        if isinstance(node, ShardingFilter) and node.share() != before.get(id(node), (0, 1)):
            raise GraphError(
                f"a worker_init_fn or worker_reset_fn called apply_sharding of the sharding_filter{built_at(node)}, "
                "which the loader splits among its streams anyway, so all would get a share of a share and the rest "
                "would be lost: leave the call out"
            )
    return made


def _half_split(nodes: list[Node], names: dict[int, str], streams: int) -> Iterable[str]:
    flows = flows_of(nodes)
    for node in nodes:
        inputs = [source for source in inputs_of(node) if type(source)._iterable]
        whole = [names[id(source)] for source in inputs if not flows[id(source)].points]
        if whole and len(whole) < len(inputs) and not type(node)._shards:
            yield (
                f"stage {names[id(node)]}{built_at(node)} joins branches that are split with {', '.join(whole)}, which "
                f"is not, so each of the {streams} streams gets all elements of the latter: put one .sharding_filter() "
                f"behind {names[id(node)]}, or one in each branch"
            )


def _too_few(points: list[Any], names: dict[int, str], streams: int) -> str | None:
    for point in points:
        source = next(iter(inputs_of(point)), point) if type(point)._shards else point
        try:
            with warnings.catch_warnings():
                # A stage that warns of its length only guesses it.
                warnings.simplefilter("error")
                count = length_of(source)
        except (TypeError, Warning):
            continue
        if count < streams:
            return (
                f"stage {names.get(id(source), names[id(point)])} gives {count} elements to share among {streams} "
                f"streams, so {streams - count} streams get none: use at most num_streams={max(1, count)} (workers "
                "times ranks, unless it is given), or more, smaller shards"
            )
    return None
