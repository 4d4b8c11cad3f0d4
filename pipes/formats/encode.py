"""Encode the fields of a sample by their extension, the other way round from `pipes.formats.decode`.

    >>> encode({"__key__": "a", "json": {"k": 1}, "cls": 3, "bin": b"raw", "txt": "hello"})
    {'__key__': 'a', 'json': b'{"k": 1}', 'cls': b'3', 'bin': b'raw', 'txt': b'hello'}

Bytes stay as they are, whatever the extension. What is not here (JPEG, whose result depends on the encoder and its
settings) is encoded by a function before: `.map(to_jpeg, input_col="jpg")`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

from pipes.errors import DataError
from pipes.formats.decode import NUMBERS, TEXTS
from pipes.utils import StreamWrapper

__all__ = ["encode", "encode_value"]

_KNOWN = (
    "bytes, streams, txt (str), cls and the like (int), json, npy (arrays, CPU tensors) and png (Pillow images, uint8 "
    "arrays)"
)


def encode(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The sample with every field as bytes, in a new dict; names that begin with "__" are passed on.

    Raises:
        DataError: a field does not encode; names the sample's key and the field.
        ImportError: a PNG image, and Pillow is not installed.
    """
    encoded = {}
    for field, value in sample.items():
        if field[:2] == "__":
            encoded[field] = value
            continue
        try:
            encoded[field] = encode_value(field, value)
        except ImportError:
            raise
        except Exception as error:
            where = f"sample {sample.get('__key__')!r}: field {field!r}"
            raise DataError(f"{where} does not encode: {type(error).__name__}: {error}") from error
    return encoded


def encode_value(field: str, value: Any) -> bytes:
    """One field's value as bytes, by the last extension of its name.

    Raises:
        TypeError, ValueError: the value is not one that this extension holds.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if callable(getattr(value, "read", None)):
        return _read(value)
    extension = field.rpartition(".")[2].lower()
    if extension == "json":
        return json.dumps(value, ensure_ascii=False).encode()
    if extension in NUMBERS:
        if isinstance(value, bool) or int(value) != value:
            raise ValueError(f"{value!r} is no whole number")
        return str(int(value)).encode()
    if extension in TEXTS and isinstance(value, str):
        return value.encode()
    if extension == "npy":
        return _npy(value)
    if extension == "png":
        return _png(value)
    raise TypeError(
        f"no way is known from {type(value).__name__} to {extension!r}; known are {_KNOWN}: encode it to bytes by a "
        "map before"
    )


def _read(stream: Any) -> bytes:
    data = stream.read()
    if isinstance(stream, StreamWrapper):
        stream.close()
    return data.encode() if isinstance(data, str) else bytes(data)


def _npy(value: Any) -> bytes:
    import numpy

    buffer = io.BytesIO()
    numpy.save(buffer, numpy.asarray(value), allow_pickle=False)
    return buffer.getvalue()


def _png(value: Any) -> bytes:
    try:
        from PIL import Image as pillow
    except ImportError as error:
        raise ImportError('encoding images needs Pillow: pip install "pipes[images]"') from error
    if not isinstance(value, pillow.Image):
        import numpy

        array = numpy.asarray(value)
        if array.dtype != numpy.uint8:
            raise TypeError(f"an image has dtype uint8, this array {array.dtype}")
        value = pillow.fromarray(array)
    buffer = io.BytesIO()
    value.save(buffer, format="PNG")
    return buffer.getvalue()
