"""Errors on their way from a worker to main, or from one rank to the others.

Contract: whatever a worker raises becomes an ordinary exception in main. It has the same type, arguments, attributes
and notes where it survives pickling unchanged; else it is a RemoteError with its class name and message. Either way
the worker's traceback is its cause, and a note names the worker, or the rank. What would end main or its loop
(SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration) is always a RemoteError, and so is an error that carries
more than 16 MiB. Neither packing nor unpacking ever raises.
"""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Sequence
from typing import Any, TypedDict

from pipes.errors import RemoteError, RemoteTraceback, notes_of

__all__ = ["pack_error", "unpack_error"]

#: Raised out of `next()` these would end the loop in silence.
_ENDS_A_LOOP = (StopIteration, StopAsyncIteration)
#: What an error carries beyond this (a batch, a file's bytes) stays in the worker: main wants to read the message.
_MOST_BYTES = 1 << 24
_LONG_ARGUMENT = 1 << 16
_LONG_TEXT = 1 << 20


class _Packed(TypedDict):
    exception: bytes | None
    type: str
    message: str
    notes: list[str]
    traceback: str
    place: str


def pack_error(exc: BaseException, place: str, notes: Sequence[str] = ()) -> bytes:
    """Return `exc`, raised in `place`, and the traceback that it carries as bytes; `notes` are added to its own.

    >>> try:
    ...     {}["a"]
    ... except KeyError as error:
    ...     packed = pack_error(error, "worker 2", notes=["in stage 1: Mapper"])
    >>> error = unpack_error(packed)
    >>> type(error), error.args, error.__notes__
    (<class 'KeyError'>, ('a',), ['in stage 1: Mapper', 'raised in worker 2'])
    """
    packed: _Packed = {
        "exception": _pickled(exc),
        "type": _type_name(type(exc)),
        "message": _message(exc),
        "notes": [_shortened(note) for note in (*notes_of(exc), *notes)],
        "traceback": _traceback(exc),
        "place": place,
    }
    return pickle.dumps(packed)


def unpack_error(packed: bytes) -> BaseException:
    """Return the exception to raise for what `pack_error` packed elsewhere."""
    data: _Packed = pickle.loads(packed)
    error = _unpickled(data)
    if error is None:
        error = RemoteError(f"{data['type']}: {data['message']}", data["type"])
    error.__cause__ = RemoteTraceback(f"\n{data['traceback'].rstrip()}")
    # Set as a whole: the pickled exception may or may not have brought its notes along.
    error.__notes__ = [*data["notes"], f"raised in {data['place']}"]
    return error


def _pickled(exc: BaseException) -> bytes | None:
    if not isinstance(exc, Exception) or isinstance(exc, _ENDS_A_LOOP):
        return None
    try:
        # Plainly, so that a class from a script or notebook is main's own class again.
        pickled = pickle.dumps(exc)
        if len(pickled) > _MOST_BYTES:
            return None
        copy = pickle.loads(pickled)
        same = type(copy) is type(exc) and _appearance(copy) == _appearance(exc)
    except BaseException:
        # User code runs here, and even a SystemExit out of it must not replace the error that is on its way.
        return None
    return pickled if same else None


def _appearance(exc: BaseException) -> str:
    # Addresses differ between an object and its copy.
    return re.sub(r"0x[0-9a-fA-F]+", "0x", f"{exc.args!r} {exc}")


def _unpickled(data: _Packed) -> BaseException | None:
    if data["exception"] is None:
        return None
    try:
        error = pickle.loads(data["exception"])
        # Attributes that cannot be set would make the raising fail later.
        error.__notes__ = []
    except (Exception, SystemExit):
        return None
    return error if isinstance(error, Exception) else None


def _message(exc: BaseException) -> str:
    try:
        if type(exc).__str__ is BaseException.__str__ and any(map(_is_long, exc.args)):
            # The text of 200 MB of bytes would take 800 MB to make.
            shown = ", ".join(
                f"<{type(arg).__name__} of {len(arg)}>" if _is_long(arg) else repr(arg) for arg in exc.args
            )
            return _shortened(shown)
        return _shortened(str(exc))
    except BaseException:
        return "<unprintable>"


def _is_long(value: Any) -> bool:
    return isinstance(value, bytes | bytearray | str | list | tuple | dict) and len(value) > _LONG_ARGUMENT


def _shortened(text: str) -> str:
    return text if len(text) <= _LONG_TEXT else f"{text[:_LONG_TEXT]}… ({len(text)} characters)"


def _type_name(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _traceback(exc: BaseException) -> str:
    try:
        if not any(map(_is_long, exc.args)):
            return _shortened("".join(traceback.format_exception(exc)))
    except BaseException:
        pass
    frames = "".join(traceback.format_tb(exc.__traceback__))
    return f"Traceback (most recent call last):\n{frames}{_type_name(type(exc))}: {_message(exc)}\n"
