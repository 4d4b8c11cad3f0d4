"""What the states of loaders and of pipes share: the graph's fingerprint, and a digest that tells damage from data.

Contract
- A sealed state is plain JSON data of its own: it shares nothing with what it was made from.
- `opened` gives the content of a sealed state, as a copy, or raises StateError; it runs no code of the state's.
- The fingerprint names functions by qualified name, and data by type, length and digest: no element stands in a state.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from pipes.changes import ADVICE, GOING_ON
from pipes.errors import StateError, mask
from pipes.node import Node, walk
from pipes.state import check_table
from pipes.tree import parameters_of

__all__ = ["VERSION", "check_fingerprint", "fingerprint", "opened", "sealed"]

VERSION = 1
_POLICY = re.compile(r"(, )?\bon_error=[^,]*")
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
# Of longer data so many elements, spread over all of it, are digested: at every save it costs milliseconds.
_MOST_DIGESTED = 10_000


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `content`, JSON data, as a state of its own: with its digest, and a version unless it has one.

    Raises StateError for what `opened` would refuse.

    >>> state = sealed({"seed": 7})
    >>> state == sealed({"seed": 7}), opened(state)["seed"]
    (True, 7)
    """
    content = {"pipes_state": VERSION, **content}
    content.pop("digest", None)
    check_table(content)
    text = json.dumps(content, allow_nan=False)
    copy: dict[str, Any] = json.loads(text)
    return {**copy, "digest": _digest(copy)}


def opened(state: Any) -> dict[str, Any]:
    """Return the content of a sealed state; raises StateError for what is none, is damaged or of another version."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state is a dict of JSON data (what state_dict() gave), not {type(state).__name__}")
    if "pipes_state" not in state:
        raise StateError(
            "this state was saved by torchdata, as pickles, which are not read; start this run afresh"
            if "serialized_datapipe" in state
            else "this is no state of pipes: it has no 'pipes_state'"
        )
    content = dict(state)
    check_table(content)
    if content["pipes_state"] != VERSION:
        raise StateError(
            f"the state has format version {str(content['pipes_state'])[:40]}, and this release reads version {VERSION}"
        )
    digest = content.pop("digest", None)
    copy: dict[str, Any] = json.loads(json.dumps(content))
    if digest != _digest(copy):
        raise StateError(
            "the saved state is damaged: it has other content than when it was saved (its digest differs); use an "
            "earlier state"
        )
    return copy


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def fingerprint(graph: Node) -> dict[str, str]:
    """Return `{stage id: settings}`: functions by qualified name, data by type, length and digest, secrets masked.

    The error policy "raise" is left out, and so is the budget: a run that failed may go on with `on_error="skip"`.

    >>> from pipes.iter import IterableWrapper
    >>> fingerprint(IterableWrapper([3, 4]).batch(2))["1:Batcher"]
    'batch_size=2, drop_last=False, wrapper_class=pipes.datapipe.DataChunk'
    """
    found: dict[str, str] = {}
    for place, node in enumerate(walk(graph)):
        data = type(node)._opaque
        parts = [
            mask(f"{name}={_data(value) if name in data else _setting(value)}")
            for name, value in parameters_of(node).items()
            if not _holds_pipes(value) and name != "max_errors" and (name, value) != ("on_error", "raise")
        ]
        if node.__dict__.get("_seed") is not None:
            parts.append(f"set_seed={node.__dict__['_seed']}")
        found[f"{place}:{type(node).__name__}"] = ", ".join(parts)
    return found


def _holds_pipes(value: Any) -> bool:
    return isinstance(value, Node) or (
        isinstance(value, list | tuple) and len(value) <= 1000 and any(isinstance(item, Node) for item in value)
    )


def _data(value: Any) -> str:
    """Return what tells data from other data, without an element of it."""
    if type(value) is range:
        return f"range({value.start}:{value.stop}:{value.step})"
    size = f"[{len(value)}]" if hasattr(value, "__len__") else ""
    items = list(value) if type(value) is dict else value if type(value) in (list, tuple) else []
    items = [value] if type(value) in (str, bytes) else items[:: -(-len(items) // _MOST_DIGESTED) or 1]
    if not items or not _ATOMS.issuperset(map(type, items)):
        return f"{type(value).__qualname__}{size}"
    digest = hashlib.blake2b(repr(items).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    return f"{type(value).__qualname__}{size}#{digest}"


def _setting(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return (
            repr(value) if not isinstance(value, str | bytes) or len(value) <= 200 else f"{value[:200]!r}…{len(value)}"
        )
    if isinstance(value, functools.partial):
        return f"partial({_setting(value.func)})"
    if inspect.isroutine(value) or isinstance(value, type):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if isinstance(value, list | tuple) and len(value) <= 20:
        return f"[{', '.join(map(_setting, value))}]"
    size = f"[{len(value)}]" if hasattr(value, "__len__") else ""
    return f"{type(value).__qualname__}{size}"


def check_fingerprint(saved: Any, graph: Node, on_changed_data: str = "raise") -> None:
    """Refuse, with the difference, the fingerprint of another graph; raises StateError.

    With `on_changed_data="warn"`, the same graph over other data in memory is only told of.
    """
    if not isinstance(saved, dict) or not all(isinstance(settings, str) for settings in saved.values()):
        raise StateError("the saved state is damaged: it has no description of its graph; use an earlier state")
    here = fingerprint(graph)
    over_data = {f"{place}:{type(node).__name__}" for place, node in enumerate(walk(graph)) if type(node)._opaque}
    for stage in sorted({*saved, *here}, key=lambda name: (name.split(":")[0].zfill(6), name)):
        was, now = saved.get(stage), here.get(stage)
        if was is not None and now is not None and "on_error=" not in was:
            now = _POLICY.sub("", now)
        if was is not None and now is not None and was != now and stage in over_data:
            changed = f"the state was saved over other data: stage {stage[:100]} had {_difference(was, now)}"
            if on_changed_data == "raise":
                raise StateError(f"{changed}; {ADVICE}")
            warnings.warn(f"{changed}; {GOING_ON}", stacklevel=5)
        elif was != now:
            raise StateError(
                f"the state was saved by another graph: stage {stage[:100]} "
                + (
                    "is not in the saved one"
                    if was is None
                    else "is missing here"
                    if now is None
                    else f"had {_difference(was, now)}"
                )
                + "; resume with the graph that made the state, or start afresh"
            )


def _difference(was: str, now: str) -> str:
    pairs = zip(was.split(", "), now.split(", "), strict=False)
    old, new = next(((a, b) for a, b in pairs if a != b), (was, now))
    return f"{old[:200]}, and has {new[:200]} here"
