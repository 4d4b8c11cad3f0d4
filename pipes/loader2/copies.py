"""A copy of the graph for each of several streams that one process runs, so that users' pipes do not mix them.

A built-in stage holds settings only, and its runs hold what changes. A user's pipe may keep what it likes on itself (a
buffer, an open iterator, a count of epochs), and streams that took turns on one object would see each other's.

Contract
- Each stream has pipes of its own for as long as its process runs this graph; an epoch finds them as the last left
  them.
- A user's pipe, or object that an IterableWrapper reads without a copy, is copied in depth, as when it is sent to a
  worker. Shared are what nobody changes in place (strings, functions, classes, modules) and what is data rather than
  state: arrays and tensors of `LARGE` bytes or more, whose copies would fill the memory. An attribute that cannot be
  pickled (a lock, a connection) is shared, too.
- A number that the user sets on the graph's pipe between two epochs, as the number of the epoch, is set on the copies.
- A graph without pipes of users, or that runs as one stream, is used as it is.
"""

from __future__ import annotations

import io
import pickle
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from pipes.as_built import numbers_of
from pipes.datapipe import IterDataPipe
from pipes.graph import clone
from pipes.loader2.blocks import SharedList
from pipes.node import Node, walk

__all__ = ["LARGE", "Copies"]

#: Bytes from which an array or tensor of a user's pipe is data, which streams share.
LARGE = 64 << 20
_SHARED = (SharedList, str, bytes, type, ModuleType, FunctionType, BuiltinFunctionType)


class Copies:
    """Gives every stream its copy of a graph.

    >>> from pipes.iter import IterableWrapper
    >>> class Last(IterDataPipe):
    ...     def __init__(self, source): self.source, self.seen = source, []
    ...     def __iter__(self):
    ...         for x in self.source: self.seen.append(x); yield x
    >>> graph, copies = Last(IterableWrapper([1, 2])), Copies()
    >>> list(copies.of(graph, stream=0)), copies.of(graph, stream=0).seen, copies.of(graph, stream=1).seen
    ([1, 2], [1, 2], [])
    """

    def __init__(self) -> None:
        self._graph: IterDataPipe[Any] | None = None
        # With the numbers of the graph's pipes when its copy was last asked for.
        self._by_stream: dict[int, tuple[IterDataPipe[Any], list[dict[str, Any]]]] = {}

    def of(self, graph: IterDataPipe[Any], stream: int) -> IterDataPipe[Any]:
        """Return the copy of `graph` that is the stream's, made when it is first asked for."""
        if graph is not self._graph:
            self._graph, self._by_stream = graph, {}
        users = _users(graph)
        if not users:
            return graph
        numbers = [numbers_of(_keeper(node)) for node in users]
        copied, known = self._by_stream.get(stream) or (_copied(graph), numbers)
        for node, before, now in zip(_users(copied), known, numbers, strict=True):
            vars(_keeper(node)).update({name: value for name, value in now.items() if before.get(name) != value})
        self._by_stream[stream] = copied, numbers
        return copied


def _users(graph: IterDataPipe[Any]) -> list[Node]:
    return [node for node in walk(graph) if _is_users(node)]


def _is_users(node: Node) -> bool:
    return getattr(type(node), "_own_iter", None) is not None or type(node)._keeper(node) is not None


def _keeper(node: Node) -> Any:
    keeper = type(node)._keeper(node)
    return node if keeper is None else keeper


def _copied(graph: IterDataPipe[Any]) -> IterDataPipe[Any]:
    copied = clone(graph)
    nodes = walk(copied)
    inside = {id(node) for node in nodes}
    kept = [vars(node) for node in nodes if _is_users(node)]
    try:
        # Together, so that two names of one list, or two pipes with one generator, stay that.
        copies = _deep([dict(attributes) for attributes in kept], inside)
    except Exception:
        copies = [{name: _deep_if_possible(value, inside) for name, value in each.items()} for each in kept]
    for attributes, own in zip(kept, copies, strict=True):
        attributes.update(own)
    return copied


def _deep_if_possible(value: Any, inside: set[int]) -> Any:
    try:
        return _deep(value, inside)
    except Exception:
        return value


def _deep(value: Any, inside: set[int]) -> Any:
    shared: list[Any] = []
    stream = io.BytesIO()
    _Pickler(stream, shared, inside).dump(value)
    stream.seek(0)
    return _Unpickler(stream, shared).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, shared: list[Any], inside: set[int]) -> None:
        super().__init__(stream, protocol=5)
        self._shared, self._inside = shared, inside

    def persistent_id(self, obj: Any) -> int | None:
        large = isinstance(obj, np.ndarray | torch.Tensor) and obj.nbytes >= LARGE
        # A pipe that is no part of the graph may be inside another loader, as its data set.
        if not large and not isinstance(obj, _SHARED) and id(obj) not in self._inside:
            return None
        self._shared.append(obj)
        return len(self._shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(stream)
        self._shared = shared

    def persistent_load(self, pid: int) -> Any:
        return self._shared[pid]
