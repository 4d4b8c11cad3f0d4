"""Which part of a batch cannot travel, and where it is: `batch["x"][2]`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from pipes.errors import brief, mask

__all__ = ["find_culprit"]

# Longer paths help nobody, and each step down packs everything below it again.
_DEEPEST = 50


def find_culprit(
    value: Any, error: Exception, failure: Callable[[Any], Exception | None]
) -> tuple[str, Any, Exception]:
    """Return the path of the innermost thing that fails by itself, that thing, and its error.

    `failure(value)` tells why a value cannot travel, None when it can; `error` is why the whole cannot.

    >>> find_culprit({"x": [1, -2]}, ValueError(), lambda value: ValueError() if "-" in str(value) else None)
    ('batch["x"][1]', -2, ValueError())
    """
    path, seen = "batch", {id(value)}
    for _ in range(_DEEPEST):
        if isinstance(error, RecursionError):
            break
        for step, child in _steps(value):
            found = None if id(child) in seen else failure(child)
            if found is not None:
                path, value, error = path + step, child, found
                seen.add(id(child))
                break
        else:
            break
    return path, value, error


def _steps(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        yield from _children(value)
    except Exception:
        # A container that cannot be looked into is the innermost thing there is to name.
        return


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield (f'["{_shorten(key)}"]' if isinstance(key, str) else f"[{brief(key)}]"), child
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", child) for name, child in zip(value._fields, value, strict=False))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject and value.dtype.names is None:
            yield from ((f"[{', '.join(map(str, place))}]", child) for place, child in np.ndenumerate(value))
    elif not isinstance(value, type | ModuleType | torch.Tensor) and not callable(value):
        yield from ((f".{name}", child) for name, child in getattr(value, "__dict__", {}).items())
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield f".{name}", getattr(value, name)


def _shorten(key: str) -> str:
    text = mask(key)
    return text if len(text) <= 60 else f"{text[:59]}…"
