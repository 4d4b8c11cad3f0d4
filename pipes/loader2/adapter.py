"""torchdata's adapters: what a `DataLoader2` does to a graph before it runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pipes.graph import apply_shuffle_settings

__all__ = ["Adapter", "Shuffle", "ShuffleSpec"]


class Adapter(ABC):
    """Base of adapters: called with a graph, returns the graph to run. Any function that does so will do as well.

    >>> from pipes.iter import IterableWrapper
    >>> from pipes.loader2 import DataLoader2
    >>> class First(Adapter):
    ...     def __call__(self, datapipe): return datapipe.header(2)
    >>> list(DataLoader2(IterableWrapper(range(9)), First()))
    [0, 1]
    """

    @abstractmethod
    def __call__(self, datapipe: Any) -> Any:
        """Return the graph to run."""


class Shuffle(Adapter):
    """Switch all shuffles of a graph on (True) or off (False), or leave them as they are (None).

    True adds one at the end of a graph that has none, with a UserWarning.

    >>> from pipes.iter import IterableWrapper
    >>> from pipes.loader2 import DataLoader2
    >>> list(DataLoader2(IterableWrapper(range(5)).shuffle(), Shuffle(False)))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, enable: bool | None = True) -> None:
        self.enable = enable

    def __call__(self, datapipe: Any) -> Any:
        return apply_shuffle_settings(datapipe, self.enable)


class ShuffleSpec(ABC):  # noqa: B024
    """The empty base class of torchdata's name, for code that imports it."""
