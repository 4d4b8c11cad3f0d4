"""What can stand in a graph, found by following references; where a graph is split into streams."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pipes.errors import GraphError

if TYPE_CHECKING:
    from pipes.context import Context
    from pipes.run import Run

__all__ = [
    "BOTH_LEVELS",
    "Node",
    "above_shard",
    "automatic_shard_point",
    "built_at",
    "check_depth",
    "describe_automatic_sharding",
    "inputs_of",
    "label_of",
    "names_of",
    "stage_names",
    "walk",
]

BOTH_LEVELS = frozenset({"rank", "worker"})
_MOST_INPUTS = 1000
_CONTAINERS = (dict, list, tuple, set, frozenset)
# What user functions inside the deepest stage may need.
_SPARE_FRAMES = 100


class Node:
    """Marker base of all that can stand in a graph: iterable pipes and map pipes.

    Its traits are read from the class, for a user's pipe may keep what it likes under such a name.
    """

    _opaque: ClassVar[frozenset[str]] = frozenset()
    _shared: ClassVar[bool] = False
    _shards: ClassVar[bool] = False
    _iterable: ClassVar[bool] = True
    # Whether it puts together elements of its inputs that have the same place, or key.
    _pairs: ClassVar[bool] = False
    # Whether what it does costs as much as reading data, so that every stream should not do it for all elements.
    _opens: ClassVar[bool] = False
    # Whether what it gives depends on an element's number among all of its input.
    _numbers: ClassVar[bool] = False
    # Whether its constructor made the stage above it, of which its own parameters tell all.
    _made_above: bool = False
    # Attributes that hold what a user gave for it to call.
    _calls: ClassVar[tuple[str, ...]] = ()
    # How many levels of Python's recursion limit one stage takes while it runs.
    _levels: ClassVar[int] = 1

    def _make_run(self, context: Context, stage: str) -> Run:
        raise GraphError(
            f"{type(self).__name__} is read by key; give the stage below it .to_iter_datapipe() to iterate"
        )

    def _levels_by_hand(self, workers: int, world: int) -> frozenset[str]:
        """Return which of the levels "worker" and "rank" this stage splits by itself, because it was told to."""
        return frozenset()

    def _splits(self) -> frozenset[str]:
        """Return by which of the levels "rank" and "worker" a shard point splits what it reads."""
        return BOTH_LEVELS

    def _places(self) -> tuple[str, ...] | None:
        """Return what this stage does to the places of elements: () for one output an input, in their order.

        Words for what the number alone decides, as a batch; None when the elements, or draws, decide.
        """
        return None

    def _calls_user(self) -> bool:
        """Return whether this stage calls a function or class that its user gave it."""
        return any(callable(vars(self).get(name)) for name in ("on_error", *type(self)._calls))

    def _is_replayed(self) -> bool:
        """Return whether a restore replays this stage, and so all upstream of it, from the start of the epoch."""
        return False

    def _keeper(self) -> Any:
        """Return the user's object that may count epochs on itself, and is replayed by its count; None without one."""
        return self if type(self)._is_replayed(self) else None


def label_of(pipe: Node) -> str:
    """Return the class name as stage ids show it."""
    return type(pipe).__name__.lstrip("_")


def built_at(pipe: object, form: str = " (built at {})") -> str:
    """Return `form` with the file:line where the user built `pipe`; "" when that is not known."""
    built = getattr(pipe, "__dict__", {}).get("_built")
    return form.format(f"{built[0]}:{built[1]}") if isinstance(built, tuple) and len(built) == 2 else ""


def inputs_of(pipe: Node) -> list[Node]:
    """Return the pipes that `pipe` refers to, each once, found in its attributes and the containers in them.

    >>> from pipes.iter import IterableWrapper
    >>> source = IterableWrapper(range(3))
    >>> inputs_of(source.map(str)) == [source]
    True
    """
    found: dict[int, Node] = {}
    seen: set[int] = set()
    opaque = type(pipe)._opaque

    def look(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Node):
                found.setdefault(id(value), value)
            # No stage has a thousand inputs; a longer container is data, and walking it would cost seconds.
            elif isinstance(value, _CONTAINERS) and len(value) <= _MOST_INPUTS and id(value) not in seen:
                seen.add(id(value))
                look((*value.keys(), *value.values()) if isinstance(value, dict) else value)

    look(value for name, value in vars(pipe).items() if name not in opaque)
    return list(found.values())


def walk(pipe: Node) -> list[Node]:
    """Return every pipe of the graph that ends in `pipe`, each once, inputs before the stages they feed."""
    order: dict[int, Node] = {}
    entered: set[int] = set()
    stack: list[tuple[Node, bool]] = [(pipe, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order[id(node)] = node
        elif id(node) not in entered:
            entered.add(id(node))
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(inputs_of(node)))
    return list(order.values())


def stage_names(pipe: Node) -> dict[int, str]:
    """Return `{id(pipe): stage id}` for the graph; a stage id is the place in the graph and the class name."""
    return names_of(walk(pipe))


def names_of(nodes: Iterable[Node]) -> dict[int, str]:
    """Return what `stage_names` does, for a graph that was walked already."""
    return {id(node): f"{place}:{label_of(node)}" for place, node in enumerate(nodes)}


def check_depth(last: Node, nodes: Sequence[Node]) -> None:
    """Refuse a graph that would run into Python's recursion limit."""
    limit = sys.getrecursionlimit()
    if sum(type(node)._levels for node in nodes) < limit // 2:
        return
    depths: dict[int, int] = {}
    for node in nodes:
        depths[id(node)] = type(node)._levels + max(
            (depths.get(id(source), 0) for source in inputs_of(node)), default=0
        )
    used, frame = 0, sys._getframe()
    while frame.f_back is not None:
        used, frame = used + 1, frame.f_back
    if depths[id(last)] + used + _SPARE_FRAMES > limit:
        raise GraphError(
            f"the graph is {depths[id(last)]} calls deep, but Python's recursion limit of {limit} leaves room for "
            f"about {max(0, limit - used - _SPARE_FRAMES)}; merge stages (one .concat or .zip takes any number of "
            "pipes), or raise it with sys.setrecursionlimit"
        )


def above_shard(nodes: Sequence[Node], shard_after: Node | None) -> frozenset[int]:
    """Return the ids of all pipes that feed a shard point, directly or not, the shard points included."""
    above: set[int] = set()
    for node in reversed(nodes):
        if type(node)._shards or node is shard_after or id(node) in above:
            above.add(id(node))
            above.update(id(source) for source in inputs_of(node))
    return frozenset(above)


def automatic_shard_point(nodes: Sequence[Node]) -> Node | None:
    """Return the stage after which a graph without a sharding_filter is split; None when it has one.

    That is the source of a linear graph, the last stage where branches meet of any other, and a stage below it that
    goes by an element's number: `.header(5)` gives 5 elements, not 5 a stream.
    """
    if any(type(node)._shards for node in nodes):
        return None
    node = nodes[-1]
    while len(sources := [source for source in inputs_of(node) if type(source)._iterable]) == 1:
        if type(node)._numbers:
            break
        node = sources[0]
    return node


def reads_by_key(node: Node) -> bool:
    """Return whether `node` iterates a map pipe, so that a shard point right behind it reads no more than its share."""
    inputs = inputs_of(node)
    return type(node)._iterable and bool(inputs) and not any(type(source)._iterable for source in inputs)


def describe_automatic_sharding(pipe: Node) -> str | None:
    """Return where a graph without a sharding_filter is split into streams and what to do.

    None when it has one, or is split where it reads by key, which repeats nothing.
    """
    nodes = walk(pipe)
    point = automatic_shard_point(nodes)
    if point is None or reads_by_key(point):
        return None
    names = stage_names(pipe)
    where = built_at(point)
    repeated = [names[id(node)] for node in walk(point)]
    listed = ", ".join(repeated[:4]) + (f" and {len(repeated) - 4} more" if len(repeated) > 4 else "")
    return (
        f"the graph has no sharding_filter, so it is split after stage {names[id(point)]}{where}: every stream runs "
        f"{listed} in full and goes on with its share of the elements. Put .sharding_filter() where the split should "
        "be, as early as "
        'the elements are still names; or pass sharding="replicate" to DataLoader2 to give every stream all elements'
    )
