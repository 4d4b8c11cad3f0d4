"""Whether the shard points of a graph give each element once, and pairs whose parts belong together.

A stage's output is described by a `Flow`: which shard points feed it, by which levels those split, and what was done
since to the places of elements. Two branches that were split apart fit together only if both did the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipes.errors import GraphError
from pipes.node import BOTH_LEVELS, Node, built_at, inputs_of, stage_names, walk

__all__ = ["Flow", "check_shard_points", "flows_of", "level_share", "splits_by_level"]


@dataclass(frozen=True)
class Flow:
    """What the streams see of one stage's output."""

    #: The shard points that feed it; none: every stream sees all of it.
    points: frozenset[int] = frozenset()
    #: The levels ("rank", "worker") by which it is split.
    levels: frozenset[str] = frozenset()
    #: What moved elements from place to place since the split, in words; () is nothing.
    places: tuple[str, ...] = ()
    #: The first stage since the split after which the number of an element depends on the elements.
    breaker: Node | None = None


def level_share(levels: frozenset[str], stream: int, streams: int, world: int) -> tuple[int, int]:
    """Return (number of the share, number of shares) that a stream takes where a graph is split by `levels`.

    Stream s belongs to rank s % world. By rank, then by worker is the same as by stream:

    >>> level_share(frozenset({"rank"}), 5, 6, 2), level_share(frozenset({"worker"}), 5, 6, 2)
    ((1, 2), (2, 3))
    >>> level_share(frozenset({"rank", "worker"}), 5, 6, 2)
    (5, 6)
    """
    if levels == BOTH_LEVELS:
        return stream, streams
    return (stream % world, world) if "rank" in levels else (stream // world, streams // world)


def splits_by_level(last: Node) -> bool:
    """Return whether a stage splits the graph by ranks or by workers alone, so that their numbers must stay."""
    return any(type(node)._shards and type(node)._splits(node) != BOTH_LEVELS for node in walk(last))


def check_shard_points(last: Node, streams: int = 1, world: int = 1) -> None:
    """Refuse, with GraphError naming the stages, a graph whose shard points lose, double or mismatch elements."""
    nodes = walk(last)
    if not any(type(node)._shards for node in nodes):
        return
    flow = flows_of(nodes)[id(last)]
    missing = BOTH_LEVELS - flow.levels
    for level, shares in (("rank", world), ("worker", streams // world)):
        if flow.points and level in missing and shares > 1:
            raise GraphError(
                f"the graph is split by {'rank' if level == 'worker' else 'worker'} only, so the {shares} "
                f"{'streams of a rank' if level == 'worker' else 'ranks'} would each give all of a share: leave out "
                "the argument of sharding_filter, or put a second one, for the other level, below it"
            )


def flows_of(nodes: Sequence[Node]) -> dict[int, Flow]:
    """Return the flow behind each of `nodes` (as `walk` gives them), by id; refuses what can give wrong elements."""
    names = stage_names(nodes[-1])
    flows: dict[int, Flow] = {}
    for node in nodes:
        inputs = inputs_of(node)
        if type(node)._iterable:  # what it reads by key, every stream has as a whole
            inputs = [source for source in inputs if type(source)._iterable] or inputs
        if type(node)._shards:
            flows[id(node)] = _split(node, [flows[id(source)] for source in inputs], names)
        elif len(inputs) == 1:
            flows[id(node)] = _passed(node, flows[id(inputs[0])])
        else:
            flows[id(node)] = _joined(node, inputs, flows, names)
    return flows


def _split(node: Node, above: list[Flow], names: dict[int, str]) -> Flow:
    levels = type(node)._splits(node)
    known = frozenset[str]().union(*(flow.levels for flow in above))
    if levels & known:
        first = next(names[point] for flow in above for point in flow.points)
        raise GraphError(
            f"stage {names[id(node)]}{built_at(node)} splits what {first} has split already, so a stream would get a "
            "share of its share and the rest would be lost: remove one of the two sharding_filters"
        )
    return Flow(frozenset({id(node)}), levels | known)


def _passed(node: Node, above: Flow) -> Flow:
    if not above.points or above.breaker is not None:
        return above
    places = _places_of(node)
    return replace(above, breaker=node) if places is None else replace(above, places=above.places + places)


def _joined(node: Node, inputs: list[Node], flows: dict[int, Flow], names: dict[int, str]) -> Flow:
    split = [flows[id(source)] for source in inputs if flows[id(source)].points]
    if not split:
        return Flow()
    points = frozenset[int]().union(*(flow.points for flow in split))
    levels = frozenset.intersection(*(flow.levels for flow in split))
    pairs = type(node)._pairs and _places_of(node) is not None
    fits = all(flow.breaker is None and flow.places == split[0].places for flow in split)
    if pairs and len(points) > 1 and not fits:
        raise GraphError(_mismatch(node, split, names))
    aligned = pairs and fits and len(split) == len(inputs)
    return Flow(points, levels, split[0].places if aligned else (), None if aligned else node)


def _mismatch(node: Node, split: list[Flow], names: dict[int, str]) -> str:
    filters = " and ".join(sorted(names[point] for flow in split for point in flow.points))
    breaker = next((flow.breaker for flow in split if flow.breaker is not None), None)
    if breaker is None:
        why = "the branches gather elements differently: " + " against ".join(
            ", ".join(flow.places) or "one by one" for flow in split
        )
    else:
        why = f"{names[id(breaker)]}{built_at(breaker)} stands between, and moves elements to other places"
    return (
        f"stage {names[id(node)]}{built_at(node)} pairs elements that {filters} split apart, and {why}, so streams "
        f"would pair what does not belong together: put one sharding_filter behind {names[id(node)]} instead"
    )


def _places_of(node: Node) -> tuple[str, ...] | None:
    # A user's own __iter__ in a class derived from a stage may do anything; on_error may leave elements out.
    if getattr(type(node), "_own_iter", None) is not None or getattr(node, "on_error", "raise") != "raise":
        return None
    return type(node)._places(node)
