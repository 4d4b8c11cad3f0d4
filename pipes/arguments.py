"""Arguments that are whole numbers, checked when a stage, a loader or a reading service is built."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any

from pipes.errors import brief

__all__ = ["whole", "whole_or_none"]


def whole(name: str, value: Any) -> int:
    """Return the argument `value` as an int, also where it is NumPy's; raise TypeError for what is no whole number.

    A bool is refused, too: where a count belongs it is a mistake.

    >>> import numpy
    >>> whole("batch_size", numpy.int64(3))
    3
    >>> whole("batch_size", 3.0)
    Traceback (most recent call last):
        ...
    TypeError: batch_size must be an int, not the float 3.0
    """
    return _index(name, value, "an int")


def whole_or_none(name: str, value: Any) -> int | None:
    """Return the argument `value` as an int, or None for None; raise TypeError for what is neither.

    >>> whole_or_none("limit", None), whole_or_none("limit", 3)
    (None, 3)
    """
    return None if value is None else _index(name, value, "an int or None")


def _index(name: str, value: Any, expected: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    given = brief(value) if value is None else f"the {type(value).__name__} {brief(value)}"
    raise TypeError(f"{name} must be {expected}, not {given}")
