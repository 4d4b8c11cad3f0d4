"""All elements of an iterable pipe, read by key: `.to_map_datapipe`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from pipes.context import Context
from pipes.datapipe import IterDataPipe, MapDataPipe, length_of
from pipes.error_policy import check_budget, tell
from pipes.errors import GraphError, brief
from pipes.node import built_at, walk
from pipes.seeds import GlobalGenerators, seed_globals
from pipes.stages.columns import check_columns
from pipes.stages.wrapping import as_pipe

__all__ = ["IterToMapConverter"]


class IterToMapConverter(MapDataPipe[Any]):
    """Give the values of all pairs `(key, value)` of an iterable pipe by key, from a dict that is made at first use.

    Args:
        datapipe: gives the pairs, or elements of any kind with `key_value_fn`.
        key_value_fn: makes the pair of an element.

    Each process reads all of `datapipe` once, and keeps it in memory for all its epochs; what is random in it is the
    same everywhere. Of equal keys the last counts, and a warning says so. `len` is that of `datapipe` until it was
    read; where that has none, it is read.
    Raises TypeError if `key_value_fn` is not callable, GraphError for a `sharding_filter` in `datapipe`; when it is
    read, TypeError or ValueError for what is no pair; IndexError for a key that is not there.

    >>> from pipes.iter import IterableWrapper
    >>> squares = IterableWrapper(range(5)).to_map_datapipe(lambda x: (x, x * x))
    >>> squares[3], len(squares), list(squares.batch(2).to_iter_datapipe())
    (9, 5, [[0, 1], [4, 9], [16]])
    """

    _opaque = frozenset({"_map"})

    def __init__(
        self, datapipe: IterDataPipe[Any], key_value_fn: Callable[[Any], tuple[Any, Any]] | None = None
    ) -> None:
        if key_value_fn is not None:
            check_columns(key_value_fn, None)
        self.datapipe = as_pipe(datapipe)
        self.key_value_fn = key_value_fn
        self._map: dict[Any, Any] | None = None
        for node in walk(self.datapipe):
            if type(node)._shards:
                raise GraphError(
                    f"to_map_datapipe reads all elements, but {type(node).__name__}{built_at(node)} splits them: put "
                    ".sharding_filter() behind .to_iter_datapipe() instead"
                )

    def __getitem__(self, index: Any) -> Any:
        found = self._read()
        try:
            return found[index]
        except KeyError:
            raise IndexError(f"IterToMapConverter{built_at(self)} has no key {brief(index)}") from None

    def __len__(self) -> int:
        if self._map is None:
            try:
                return length_of(self.datapipe)
            except TypeError:  # it has none until it is read
                pass
        return len(self._read())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def _read(self) -> dict[Any, Any]:
        """Return the dict; the first time, read it with draws that depend on nothing, and leave all others alone."""
        if self._map is None:
            context, generators = (
                Context(self.datapipe, seed=0, shard_automatically=False),
                GlobalGenerators.set_aside(),
            )
            try:
                seed_globals(0)
                self._map = self._gathered(context)
                counts = context.tallies.counts()
                check_budget(counts, ended=True)
                tell(counts)
            finally:
                context.close()
                generators.restore()
        return self._map

    def _gathered(self, context: Context) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        again: list[Any] = []
        for element in context.start():
            key, value = self._pair(element)
            if key in found:
                again.append(key)
            found[key] = value
        if again:
            warnings.warn(
                f"IterToMapConverter{built_at(self)}: {brief(again[0])} and {len(again) - 1} more keys came again; the "
                "last element of a key counts, so there are fewer than were read",
                stacklevel=4,
            )
        return found

    def _pair(self, element: Any) -> tuple[Any, Any]:
        pair = element if self.key_value_fn is None else self.key_value_fn(element)
        if not isinstance(pair, tuple | list):
            raise TypeError(
                f"IterToMapConverter{built_at(self)} needs pairs (key, value), not a {type(pair).__name__}: "
                f"{brief(pair)}; give key_value_fn= to make them"
            )
        if len(pair) != 2:
            raise ValueError(
                f"IterToMapConverter{built_at(self)} needs pairs (key, value), not {len(pair)} items: {brief(pair)}"
            )
        return pair[0], pair[1]


IterDataPipe.register_datapipe_as_function("to_map_datapipe", IterToMapConverter)
