"""How a graph of pipes prints: one line a stage, in the order in which elements flow."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from pipes.errors import brief, mask
from pipes.node import Node, inputs_of, stage_names

__all__ = ["describe_stage", "parameters_of", "setting", "tree_of"]

_LONGEST_VALUE = 60
_MOST_NESTED = 12


def tree_of(pipe: Node) -> str:
    """Return the graph that ends in `pipe` as text; a line shows the stage's id, which errors and states use, too.

    Elements flow downwards. Where several pipes meet, each has its own bar; the bars end at the stage that joins them.

    >>> from pipes.iter import IterableWrapper
    >>> left, right = IterableWrapper(range(6)).shuffle(buffer_size=4).fork(2)
    >>> print(tree_of(left.map(str).zip(right).batch(2, drop_last=True)))
    ┌ 0:IterableWrapper(range(0, 6))
    │ 1:Shuffler(buffer_size=4)
    │ 2:ForkerSource(2)
    │ 3:ForkerChild(0)
    │ 4:Mapper(str)
    ├ ↑ 2:ForkerSource
    │ 5:ForkerChild(1)
    └ 6:Zipper()
    7:Batcher(2, drop_last=True)
    """
    return "\n".join(_block(pipe, stage_names(pipe), set(), 0))


def _block(pipe: Node, names: dict[int, str], shown: set[int], depth: int) -> list[str]:
    chain = [pipe]
    while len(sources := inputs_of(chain[-1])) == 1 and id(sources[0]) not in shown:
        chain.append(sources[0])
    lines: list[str] = []
    if len(sources) == 1:
        lines.append(f"↑ {names[id(sources[0])]}")
    elif depth == _MOST_NESTED and sources:
        lines.append(f"… {len(sources)} pipes")
    else:
        for place, source in enumerate(sources):
            first, *rest = (
                _block(source, names, shown, depth + 1) if id(source) not in shown else [f"↑ {names[id(source)]}"]
            )
            lines += [("├ " if place else "┌ ") + first, *[f"│ {line}" for line in rest]]
    for node in reversed(chain):
        shown.add(id(node))
        lines.append(f"{names[id(node)]}({describe_stage(node)})")
    if len(sources) > 1:
        lines[-len(chain)] = f"└ {lines[-len(chain)]}"
    return lines


def parameters_of(pipe: Node) -> dict[str, Any]:
    """Return the settings of `pipe`: the constructor's parameters that it keeps as attributes of the same name.

    >>> from pipes.iter import IterableWrapper
    >>> parameters_of(IterableWrapper([1]))
    {'iterable': [1], 'deepcopy': True}
    """
    fields = vars(pipe)
    return {name: fields[name] for name in _signature(type(pipe).__init__) if name in fields}


@functools.lru_cache(maxsize=256)  # every state asks for those of all stages
def _signature(constructor: Callable[..., None]) -> dict[str, inspect.Parameter]:
    try:
        return dict(list(inspect.signature(constructor).parameters.items())[1:])
    except (TypeError, ValueError):
        return {}


def describe_stage(pipe: Node) -> str:
    """Return the settings of one stage as they would stand in a call: no inputs, no defaults, secrets masked."""
    inputs = {id(source) for source in inputs_of(pipe)}
    signature = _signature(type(pipe).__init__)
    shown = []
    for name, value in parameters_of(pipe).items():
        parameter = signature[name]
        if _refers(value, inputs) or _is(value, parameter.default):
            continue
        text = setting(value)
        named = parameter.default is not parameter.empty or parameter.kind is parameter.KEYWORD_ONLY
        # A secret is known by its name, so that is there while masking.
        text = mask(f"{name}={text}")
        shown.append(text if named else text.removeprefix(f"{name}="))
    return ", ".join(shown)


def _refers(value: Any, inputs: set[int]) -> bool:
    if isinstance(value, list | tuple):
        return any(id(item) in inputs for item in value[:100])
    return id(value) in inputs


def _is(value: Any, default: Any) -> bool:
    try:
        return value is default or (type(value) is type(default) and bool(value == default))
    except Exception:
        return False


def setting(value: Any) -> str:
    """Return one value on one line: functions by name, long values shortened, secrets masked.

    >>> setting(functools.partial(round, ndigits=2)), setting(list(range(1000))), setting(print)
    ('partial(round, ndigits=2)', '[0, 1, 2, … 1000 items]', 'print')
    """
    if isinstance(value, functools.partial):
        given = [setting(item) for item in value.args] + [
            f"{name}={setting(item)}" for name, item in value.keywords.items()
        ]
        return _short(f"partial({', '.join([setting(value.func), *given])})")
    if inspect.isroutine(value) or isinstance(value, type) or type(value).__name__ == "ufunc":
        return _function(value)
    if isinstance(value, list | tuple) and len(value) > 3:
        return _short(f"[{', '.join(setting(item) for item in value[:3])}, … {len(value)} items]")
    if isinstance(value, dict | set | frozenset) and len(value) > 10:
        return f"{type(value).__name__} of {len(value)} items"
    if hasattr(type(value), "shape") and hasattr(type(value), "dtype"):
        return f"{type(value).__name__}(shape={tuple(value.shape)}, dtype={value.dtype})"
    plain: object = object.__repr__
    if type(value).__repr__ is plain:
        return f"{type(value).__qualname__} object"
    return _short(brief(value, _LONGEST_VALUE).replace("\n", " "))


def _function(value: Any) -> str:
    name: str = (getattr(value, "__qualname__", None) or value.__name__).replace("<locals>.", "")
    code = getattr(value, "__code__", None)
    if name.endswith("<lambda>") and code is not None:
        return f"lambda at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return name


def _short(text: str) -> str:
    """Shorten `text`, but leave the count of items that may stand at its end."""
    if len(text) > _LONGEST_VALUE and " … " in text:
        head, _, tail = text.rpartition(" … ")
        return f"{head[: _LONGEST_VALUE - len(tail) - 4]}… {tail}"
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
