"""What an element is, in words and as data: shapes and types, never the bulk; secrets are masked."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pipes.errors import brief, mask
from pipes.utils import StreamWrapper

__all__ = ["Described", "describe_element", "first_elements"]

_MAX_DEPTH = 4
_MAX_ITEMS = 16
_MAX_TEXT = 60
_SIMPLE = frozenset((bool, int, float, str))


@dataclass
class Described:
    """A value's kind ("int", "tensor", …), a short text about it, and what is in it by key or place."""

    kind: str
    text: str
    inside: dict[str, Described] = field(default_factory=dict)
    left_out: int = 0

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        data: dict[str, Any] = {"kind": self.kind, "text": self.text}
        if self.inside:
            data["inside"] = {key: value.as_data() for key, value in self.inside.items()}
        if self.left_out:
            data["left_out"] = self.left_out
        return data


def first_elements(pipe: Any, count: int) -> list[Described]:
    """Run `pipe` in this process for its first `count` elements, describe them, and close all that was opened."""
    found = []
    iterator = iter(pipe)
    try:
        for element in islice(iterator, count):
            found.append(describe_element(element))
            StreamWrapper.close_streams(element)
    finally:
        iterator.close()
    return found


def describe_element(value: Any, depth: int = 0) -> Described:
    """Return what `value` is.

    >>> import numpy as np
    >>> found = describe_element({"image": np.zeros((32, 24, 3), "uint8"), "label": 3, "raw": b"abcd"})
    >>> [(key, part.kind, part.text) for key, part in found.inside.items()]
    [('image', 'array', 'uint8 32x24x3'), ('label', 'int', '3'), ('raw', 'bytes', '4 bytes')]
    """
    if value is None or isinstance(value, bool | int | float | complex):
        return Described(type(value).__name__, brief(value))
    if isinstance(value, str):
        return Described("str", _text(value))
    if isinstance(value, bytes | bytearray | memoryview):
        size = value.nbytes if isinstance(value, memoryview) else len(value)
        return Described(type(value).__name__, f"{size:,} bytes")
    array = _array(value)
    if array is not None:
        return array
    if isinstance(value, Mapping):
        return _container(
            value, {mask(str(key))[:_MAX_TEXT]: item for key, item in islice(value.items(), _MAX_ITEMS)}, depth
        )
    if isinstance(value, Sequence):
        fields = getattr(value, "_fields", None) or range(len(value))
        shown = _MAX_ITEMS if depth == 0 else 4
        return _container(
            value, {str(key): item for key, item in islice(zip(fields, value, strict=False), shown)}, depth
        )
    if isinstance(value, StreamWrapper):
        return Described("stream", _text(value.name or ""))
    return Described(type(value).__name__, brief(value))


def _text(value: str) -> str:
    shown = mask(value)
    if len(shown) > _MAX_TEXT:
        return f"{shown[:_MAX_TEXT]!r}… ({len(value):,} characters)"
    return repr(shown)


def _container(value: Any, items: dict[str, Any], depth: int) -> Described:
    size = len(value)
    kind = type(value).__name__
    counted = f"{size} item{'s' if size != 1 else ''}"
    if depth >= _MAX_DEPTH:
        return Described(kind, counted)
    if not isinstance(value, Mapping) and size and all(type(item) in _SIMPLE for item in items.values()):
        shown = ", ".join(describe_element(item).text for item in islice(value, 4 if isinstance(value[0], str) else 8))
        more = ", …" if size > (4 if isinstance(value[0], str) else 8) else ""
        return Described(kind, f"{counted}: {shown}{more}")
    inside = {}
    for key, item in items.items():
        inside[key] = found = describe_element(item, depth + 1)
        # A value may be a secret by the name it has.
        found.text = mask(f"{key}={found.text}")[len(key) + 1 :] if isinstance(item, str) else found.text
    return Described(kind, counted, inside, size - len(inside))


def _shape(shape: Any) -> str:
    return "x".join(str(size) for size in shape) or "scalar"


def _array(value: Any) -> Described | None:
    """Describe tensors, arrays and images; their libraries are asked only if they are loaded already."""
    torch, numpy, pillow = (sys.modules.get(name) for name in ("torch", "numpy", "PIL.Image"))
    if torch is not None and isinstance(value, torch.Tensor):
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        text = f"{str(value.dtype).removeprefix('torch.')} {_shape(value.shape)}{device}"
        return Described(
            "tensor", text + _few(value.tolist() if value.numel() <= 8 and value.layout == torch.strided else None)
        )
    if numpy is not None and isinstance(value, numpy.generic):
        return Described(str(value.dtype), brief(value.item()))
    if numpy is not None and isinstance(value, numpy.ndarray):
        return Described(
            "array", f"{value.dtype} {_shape(value.shape)}" + _few(value.tolist() if value.size <= 8 else None)
        )
    if pillow is not None and isinstance(value, pillow.Image):
        return Described("image", f"{value.mode} {value.width}x{value.height}")
    return None


def _few(values: Any) -> str:
    if not isinstance(values, list) or not values or isinstance(values[0], list):
        return "" if values is None or isinstance(values, list) else f": {_number(values)}"
    return f": {', '.join(_number(value) for value in values)}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
