"""Elements joined with what a map pipe has under their key: `.zip_with_map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipes.datapipe import IterDataPipe, MapDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError
from pipes.errors import brief
from pipes.node import Node
from pipes.stages.columns import check_columns
from pipes.stages.mapping import AppliedPipe, AppliedRun

__all__ = ["MapKeyZipper"]


class _MapKeyZipperRun(AppliedRun):
    def input_pipes(self) -> Sequence[Node]:
        return (self.pipe.source_iterdatapipe,)


@functional_datapipe("zip_with_map")
class MapKeyZipper(AppliedPipe[Any]):
    """Give `(x, map_datapipe[key_fn(x)])` for each element x, or what `merge_fn` makes of the two.

    With `keep_key=True` it is `(key, that)`. With `on_error="skip"`, elements for which it fails are left out, up to
    `max_errors`; see the page on errors. Raises TypeError for what is no map pipe or no function; while iterating,
    KeyError for a key that the map pipe has not.

    >>> from pipes.iter import IterableWrapper
    >>> from pipes.map import SequenceWrapper
    >>> names = SequenceWrapper({0: "cat", 1: "dog"})
    >>> list(IterableWrapper([("a.jpg", 1), ("b.jpg", 0)]).zip_with_map(names, lambda pair: pair[1]))
    [(('a.jpg', 1), 'dog'), (('b.jpg', 0), 'cat')]
    """

    run_class = _MapKeyZipperRun
    _calls = ("key_fn", "merge_fn")
    _input = "source_iterdatapipe"

    def __init__(
        self,
        source_iterdatapipe: IterDataPipe[Any],
        map_datapipe: MapDataPipe[Any],
        key_fn: Callable[[Any], Any],
        merge_fn: Callable[[Any, Any], Any] | None = None,
        keep_key: bool = False,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        if not isinstance(map_datapipe, MapDataPipe):
            raise TypeError(f"map_datapipe must be a MapDataPipe, not a {type(map_datapipe).__name__}")
        check_columns(key_fn, None)
        if merge_fn is not None:
            check_columns(merge_fn, [0, 1])
        super().__init__(source_iterdatapipe, on_error, max_errors)
        self.map_datapipe = map_datapipe
        self.key_fn = key_fn
        self.merge_fn = merge_fn
        self.keep_key = keep_key

    def function(self) -> Callable[[Any], Any]:
        """Return the function of one element."""
        return self._joined

    def _joined(self, element: Any) -> Any:
        key = self.key_fn(element)
        try:
            value = self.map_datapipe[key]
        except (IndexError, KeyError) as error:
            raise KeyError(f"key_fn gave {brief(key)}, which is not a valid key in the given MapDataPipe") from error
        merged = (element, value) if self.merge_fn is None else self.merge_fn(element, value)
        return (key, merged) if self.keep_key else merged
