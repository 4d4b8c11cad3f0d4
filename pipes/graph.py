"""Find, replace, remove and copy the stages of a graph: pure functions over references, nothing is pickled.

The names and behaviour of torchdata's `dataloader2.graph` and of `torch.utils.data.graph_settings`.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from pipes.datapipe import IterDataPipe, MapDataPipe
from pipes.errors import GraphError
from pipes.node import Node, inputs_of, walk

__all__ = [
    "DataPipe",
    "DataPipeGraph",
    "apply_random_seed",
    "apply_sharding",
    "apply_shuffle_settings",
    "clone",
    "find_dps",
    "get_all_graph_pipes",
    "list_dps",
    "remove_dp",
    "replace_dp",
    "set_datapipes_seed",
    "set_graph_random_seed",
    "traverse",
    "traverse_dps",
]

DataPipe = IterDataPipe[Any] | MapDataPipe[Any]
# The inputs of a pipe, by their ids: {id: (pipe, {... its inputs ...})}.
DataPipeGraph = dict[int, tuple[Any, "DataPipeGraph"]]

AnyPipe = TypeVar("AnyPipe", bound=Node)

_DEFAULT_GROUP = 1


class SeedSource(Protocol):
    """What hands out seeds: `SeedGenerator` of the loader, or anything alike."""

    def generate_shared_seed(self) -> int: ...
    def generate_seed(self) -> int: ...


def traverse_dps(datapipe: Any) -> DataPipeGraph:
    """Return the graph that ends in `datapipe` as nested dicts `{id(pipe): (pipe, {... its inputs ...})}`.

    A pipe that is reached on several ways has one and the same dict in all of them. Raises GraphError for no pipe.

    >>> from pipes.iter import IterableWrapper
    >>> source = IterableWrapper(range(3)); pipe = source.map(str)
    >>> traverse_dps(pipe) == {id(pipe): (pipe, {id(source): (source, {})})}
    True
    """
    _check(datapipe)
    made: dict[int, DataPipeGraph] = {}
    for node in walk(datapipe):
        made[id(node)] = {id(source): (source, made.get(id(source), {})) for source in inputs_of(node)}
    return {id(datapipe): (datapipe, made[id(datapipe)])}


def traverse(datapipe: Any, only_datapipe: bool | None = None) -> DataPipeGraph:
    """Return what `traverse_dps` does; deprecated, with a FutureWarning, as in torchdata."""
    warnings.warn("traverse is deprecated: use traverse_dps, which does the same", FutureWarning, stacklevel=2)
    return traverse_dps(datapipe)


def list_dps(graph: DataPipeGraph, exclude_dps: Node | Iterable[Node] | None = None) -> list[Any]:
    """Return every pipe of `graph` once, breadth first from the end; an excluded pipe takes all before it along.

    >>> from pipes.iter import IterableWrapper
    >>> pipe = IterableWrapper(range(3)).map(str).batch(2)
    >>> [type(each).__name__ for each in list_dps(traverse_dps(pipe))]
    ['Batcher', 'Mapper', 'IterableWrapper']
    """
    excluded = [exclude_dps] if isinstance(exclude_dps, Node) else list(exclude_dps or ())
    seen = {id(node) for last in excluded for node in walk(last)}
    found: list[Any] = []
    level = graph
    while level:
        below: DataPipeGraph = {}
        for key, (pipe, inputs) in level.items():
            if key not in seen:
                seen.add(key)
                found.append(pipe)
                below.update(inputs)
        level = below
    return found


def get_all_graph_pipes(graph: DataPipeGraph) -> list[Any]:
    """Return every pipe of `graph` once, as torch's function of this name does."""
    return list_dps(graph)


def find_dps(graph: DataPipeGraph, dp_type: type[AnyPipe]) -> list[AnyPipe]:
    """Return the pipes of `graph` whose class is exactly `dp_type`; subclasses are not found.

    >>> from pipes.iter import IterableWrapper, Mapper
    >>> [pipe.fn for pipe in find_dps(traverse_dps(IterableWrapper("ab").map(ord).map(hex)), Mapper)]
    [<built-in function hex>, <built-in function ord>]
    """
    return [pipe for pipe in list_dps(graph) if type(pipe) is dp_type]


def replace_dp(graph: DataPipeGraph, old_datapipe: Node, new_datapipe: Node) -> DataPipeGraph:
    """Put `new_datapipe` wherever `old_datapipe` is used, in place; return the new graph.

    `new_datapipe` may read `old_datapipe`: so a stage is inserted. Raises GraphError for a graph of several ends.

    >>> from pipes.iter import IterableWrapper
    >>> source = IterableWrapper(range(3)); pipe = source.batch(2)
    >>> graph = replace_dp(traverse_dps(pipe), source, source.map(str))
    >>> list(pipe)
    [['0', '1'], ['2']]
    """
    last = _last(graph)
    if last is old_datapipe:
        return traverse_dps(new_datapipe)
    kept = {id(node) for node in walk(new_datapipe)}
    for pipe in walk(last):
        if id(pipe) not in kept:
            _replace_inputs(pipe, old_datapipe, new_datapipe)
    return traverse_dps(last)


def remove_dp(graph: DataPipeGraph, datapipe: Node) -> DataPipeGraph:
    """Take a stage with one input out, in place; return the new graph.

    Raises GraphError for a source, or a stage with several inputs.

    >>> from pipes.iter import IterableWrapper
    >>> pipe = IterableWrapper(range(3)).map(str); last = pipe.batch(2)
    >>> graph = remove_dp(traverse_dps(last), pipe)
    >>> list(last)
    [[0, 1], [2]]
    """
    sources = inputs_of(datapipe)
    if not sources:
        raise GraphError("Cannot remove the source DataPipe from the graph; replace it with replace_dp")
    if len(sources) > 1:
        raise GraphError("Cannot remove the receiving DataPipe, which has several inputs; replace it with replace_dp")
    return replace_dp(graph, datapipe, sources[0])


def clone(datapipe: AnyPipe, instead: Mapping[int, Node] | None = None) -> AnyPipe:
    """Return a copy of the graph: new pipes with the same settings; functions and data are shared, not copied.

    `instead` maps ids of pipes to those that take their places in the copy.

    >>> from pipes.iter import IterableWrapper
    >>> pipe = IterableWrapper(range(3)).map(str); copied = clone(pipe)
    >>> copied is pipe, copied.datapipe is pipe.datapipe, list(copied)
    (False, False, ['0', '1', '2'])
    """
    _check(datapipe)
    made: dict[int, Any] = {}
    for node in walk(datapipe):
        made[id(node)] = copy.copy(node)
    copies = list(made.values())
    made.update(instead or {})
    for node in copies:
        for name, value in list(vars(node).items()):
            if name not in type(node)._opaque:
                renewed = _swapped(value, made)
                if renewed is not value:
                    node.__dict__[name] = renewed
    return made[id(datapipe)]  # type: ignore[no-any-return]


def set_graph_random_seed(datapipe: AnyPipe, seed_generator: SeedSource) -> AnyPipe:
    """Seed every stage that has `set_seed`: alike in all workers before a sharding_filter, apart after it.

    Returns the pipe.
    """
    nodes = walk(datapipe)
    above = {id(node) for filter_ in nodes if _shards(filter_) for node in walk(filter_)}
    set_datapipes_seed([node for node in nodes if id(node) in above], seed_generator, distributed_shared=True)
    set_datapipes_seed([node for node in nodes if id(node) not in above], seed_generator, distributed_shared=False)
    return datapipe


def set_datapipes_seed(datapipes: Iterable[Node], seed_generator: SeedSource, distributed_shared: bool) -> None:
    """Give each of `datapipes` that has `set_seed` the generator's next seed, shared or not."""
    for pipe in datapipes:
        if _has(pipe, "set_seed"):
            draw = seed_generator.generate_shared_seed if distributed_shared else seed_generator.generate_seed
            pipe.set_seed(draw())  # type: ignore[attr-defined]


def apply_sharding(
    datapipe: AnyPipe, num_of_instances: int, instance_id: int, sharding_group: int = _DEFAULT_GROUP
) -> AnyPipe:
    """Call `apply_sharding` of every stage that has it; returns the pipe.

    Raises GraphError when two of them stand one above the other: what passes both would be sharded twice.
    """
    nodes = [node for node in walk(datapipe) if _shards(node)]
    for node in nodes:
        heeds = getattr(node, "sharding_group_filter", None)
        for above in walk(node)[:-1]:
            if _shards(above) and getattr(above, "sharding_group_filter", None) == heeds:
                raise GraphError(
                    "Sharding twice on a single pipeline is likely unintended and will cause data loss: "
                    f"{type(above).__name__} stands above {type(node).__name__}; remove one of them"
                )
    for node in nodes:
        apply: Callable[..., None] = node.apply_sharding  # type: ignore[attr-defined]
        if len(inspect.signature(apply).parameters) < 3:
            apply(num_of_instances, instance_id)
        else:
            apply(num_of_instances, instance_id, sharding_group=sharding_group)
    return datapipe


def apply_shuffle_settings(datapipe: AnyPipe, shuffle: bool | None = None) -> AnyPipe | IterDataPipe[Any]:
    """Switch every shuffle of the graph on or off (None: leave them); returns the pipe.

    With True and no shuffle in the graph, one is put at the end, with a warning.
    """
    if shuffle is None:
        return datapipe
    shufflers = [node for node in walk(datapipe) if _has(node, "set_shuffle") and _has(node, "set_seed")]
    if not shufflers and shuffle and isinstance(datapipe, IterDataPipe):
        warnings.warn(
            "shuffle=True was set, but the graph has no shuffle, so one is added at its end; add it where it belongs "
            "with .shuffle()",
            stacklevel=2,
        )
        return datapipe.shuffle()
    for node in shufflers:
        node.set_shuffle(shuffle)  # type: ignore[attr-defined]
    return datapipe


def apply_random_seed(datapipe: AnyPipe, rng: Any) -> AnyPipe:
    """Seed every stage that has `set_seed` from the torch generator `rng`; returns the pipe."""
    import torch

    for node in walk(datapipe):
        if _has(node, "set_seed"):
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=rng).item())
            node.set_seed(seed)  # type: ignore[attr-defined]
    return datapipe


def _shards(node: Node) -> bool:
    return _has(node, "apply_sharding")


def _has(node: Node, method: str) -> bool:
    return callable(getattr(type(node), method, None))


def _check(datapipe: Any) -> None:
    if not isinstance(datapipe, Node):
        raise GraphError(f"expected an IterDataPipe or a MapDataPipe, not a {type(datapipe).__name__}")


def _last(graph: DataPipeGraph) -> Node:
    if len(graph) != 1:
        raise GraphError(f"expected a graph with one end, not {len(graph)}; make it with traverse_dps(pipe)")
    (last, _), *_ = graph.values()
    return last  # type: ignore[no-any-return]


def _replace_inputs(pipe: Node, old: Node, new: Node) -> None:
    for name, value in list(vars(pipe).items()):
        if name not in type(pipe)._opaque:
            renewed = _swapped(value, {id(old): new})
            if renewed is not value:
                setattr(pipe, name, renewed)


def _swapped(value: Any, new: dict[int, Any]) -> Any:
    """Return `value` with pipes exchanged as `new` says, also in containers; the same object if there are none."""
    if isinstance(value, Node):
        return new.get(id(value), value)
    if type(value) in (list, tuple, set, frozenset) and len(value) <= 1000:
        items = [_swapped(item, new) for item in value]
        if all(item is old for item, old in zip(items, value, strict=True)):
            return value
        return type(value)(items)
    if type(value) is dict and len(value) <= 1000:
        pairs = {_swapped(key, new): _swapped(item, new) for key, item in value.items()}
        same = all(a is b and value[b] is pairs[a] for a, b in zip(pairs, value, strict=True))
        return value if same else pairs
    return value
