"""torchdata's check of a graph: whether every share of the data is shuffled before it is taken."""

from __future__ import annotations

from typing import Any

from pipes.node import Node, inputs_of, walk

__all__: list[str] = []


def _check_shuffle_before_sharding(datapipe: Any) -> bool:
    """Return whether each `sharding_filter` has a shuffle above it on every way; True without `sharding_filter`.

    A shuffle that is switched off counts, as in torchdata.

    >>> from pipes.iter import IterableWrapper
    >>> pipe = IterableWrapper(range(9))
    >>> _check_shuffle_before_sharding(pipe.shuffle().sharding_filter())
    True
    >>> _check_shuffle_before_sharding(pipe.sharding_filter().shuffle())
    False
    """
    # Whether a shuffle stands on every way to a stage, that stage included; `walk` gives inputs first.
    shuffled: dict[int, bool] = {}
    for node in walk(datapipe):
        above = [shuffled[id(source)] for source in inputs_of(node)]
        shuffled[id(node)] = _is_shuffle(node) or (bool(above) and all(above))
        if callable(getattr(type(node), "apply_sharding", None)) and not shuffled[id(node)]:
            return False
    return True


def _is_shuffle(node: Node) -> bool:
    return all(callable(getattr(type(node), name, None)) for name in ("set_shuffle", "set_seed"))
