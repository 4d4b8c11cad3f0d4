"""Which columns of an element a function reads and where its result goes: `input_col` and `output_col`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["apply_to_columns", "check_columns", "pick_columns"]


def pick_columns(fn: Callable[..., Any], input_col: Any) -> Callable[..., Any]:
    """Return `fn` reading the columns `input_col` of an element: one key or index, or a sequence of them."""
    if input_col is None:
        return fn
    if isinstance(input_col, list | tuple):
        columns = tuple(input_col)
        return lambda element, **named: fn(*[element[column] for column in columns], **named)
    return lambda element, **named: fn(element[input_col], **named)


def apply_to_columns(fn: Callable[..., Any], input_col: Any, output_col: Any) -> Callable[..., Any]:
    """Return a function of one element that puts the result of `fn` where `output_col` says.

    Lists and dicts are edited in place, a tuple gives a new tuple. Without `output_col` the result replaces the
    (first) input column and the other input columns are deleted; `-1` appends.
    """
    read = pick_columns(fn, input_col)
    if input_col is None:
        return read
    columns = tuple(input_col) if isinstance(input_col, list | tuple) else (input_col,)
    target = output_col[0] if isinstance(output_col, list | tuple) else output_col

    def applied(element: Any, **named: Any) -> Any:
        result = read(element, **named)
        whole: Any = list(element) if isinstance(element, tuple) else element
        if target is None:
            whole[columns[0]] = result
            rest = columns[1:]
            if not isinstance(whole, dict):
                size = len(whole)
                rest = tuple(sorted((column % size for column in rest), reverse=True))
            for column in rest:
                del whole[column]
        elif target == -1 and not isinstance(whole, dict):
            whole.append(result)
        else:
            whole[target] = result
        if isinstance(element, tuple):
            make = getattr(type(element), "_make", None)
            return make(whole) if make is not None and len(whole) == len(element) else tuple(whole)
        return whole

    return applied


def check_columns(fn: Any, input_col: Any, output_col: Any = None, *, rng: bool = False) -> None:
    """Refuse, when a stage is built, what cannot work: TypeError if `fn` is not callable, else ValueError."""
    if not callable(fn):
        raise TypeError(f"expected a function, got {fn!r} of type {type(fn).__name__}")
    if output_col is not None:
        if input_col is None:
            raise ValueError("output_col needs input_col: it says where the result of those columns goes")
        if isinstance(output_col, list | tuple) and len(output_col) != 1:
            raise ValueError(f"output_col names one column, not {len(output_col)}: {output_col!r}")
    several = isinstance(input_col, Sequence) and not isinstance(input_col, str | bytes)
    given = len(input_col) if several else 1
    _check_signature(fn, given, rng)


def _check_signature(fn: Callable[..., Any], given: int, rng: bool) -> None:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return  # a builtin that shows no signature
    kinds = inspect.Parameter
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    named = [p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY and p.default is kinds.empty]
    missing = [each for each in named if not (rng and each == "rng")]
    if missing:
        raise ValueError(
            f"{name} needs the keyword {missing[0]!r}, which no column can give; bind it with functools.partial"
        )
    open_ended = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    takes = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if rng:
        takes = [p for p in takes if p.name != "rng"]
        if not any(p.name == "rng" or p.kind is kinds.VAR_KEYWORD for p in parameters):
            raise ValueError(f"rng=True passes a generator as the keyword 'rng', which {name} does not take")
    needed = sum(p.default is kinds.empty for p in takes)
    if given < needed or (given > len(takes) and not open_ended):
        wants = (
            f"at least {needed}" if open_ended else f"{needed}" if needed == len(takes) else f"{needed} to {len(takes)}"
        )
        raise ValueError(f"{name} takes {wants} arguments, but input_col gives {given}")
