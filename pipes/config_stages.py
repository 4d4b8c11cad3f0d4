"""The stages that a YAML graph may name, and what each takes, read from its signature."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter as Kind
from typing import Any, Literal, TypeVar, Union

from pipes import iter as iter_catalogue
from pipes import map as map_catalogue
from pipes.datapipe import IterDataPipe, MapDataPipe
from pipes.node import Node

__all__ = ["Family", "Parameter", "Stage", "find_stage", "hints_in", "parameters_of", "spell", "stage_names"]

Family = Literal["iter", "map"]
_BASES: dict[Family, Any] = {"iter": IterDataPipe, "map": MapDataPipe}
_MODULES: dict[Family, Any] = {"iter": iter_catalogue, "map": map_catalogue}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a stage; `default` is `inspect.Parameter.empty` where there is none."""

    name: str
    hint: Any
    default: Any
    kind: Any

    @property
    def required(self) -> bool:
        return self.default is Kind.empty and self.kind not in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD)


@dataclass(frozen=True)
class Stage:
    """A class, or a registered function, that makes a pipe."""

    name: str
    maker: Callable[..., Any]
    parameters: tuple[Parameter, ...]

    @property
    def gives(self) -> Family:
        """Return the family of what it makes."""
        is_map = isinstance(self.maker, type) and issubclass(self.maker, MapDataPipe)
        return "map" if is_map else "iter"


def _classes(family: Family) -> dict[str, Any]:
    catalogue, base = _MODULES[family], _BASES[family]
    listed = {name: getattr(catalogue, name) for name in catalogue.__all__ if name != base.__name__}
    makers = {maker.__name__: maker for maker in base.functions.values() if isinstance(maker, type)}
    return {
        name: value
        for name, value in {**makers, **listed}.items()
        if isinstance(value, type) and issubclass(value, Node)
    }


def stage_names(family: Family | None) -> dict[str, Callable[..., Any]]:
    """Return every name that may follow a pipe of `family`, or begin a list (None), with what it makes.

    >>> "Batcher" in stage_names("iter"), "batch" in stage_names("iter"), "SequenceWrapper" in stage_names(None)
    (True, True, True)
    """
    if family is None:
        return {**stage_names("map"), **stage_names("iter")}
    return {**_classes(family), **_BASES[family].functions}


def find_stage(name: str, family: Family | None) -> Stage | None:
    """Return the stage called `name`, by chained or class name."""
    maker = stage_names(family).get(name)
    return None if maker is None else Stage(name, maker, parameters_of(maker))


def parameters_of(maker: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Return what `maker` takes, `self` and `cls` left out, with annotations evaluated where they can be."""
    function: Any = maker
    own = False
    if isinstance(maker, type):
        own = True
        function = next(
            vars(cls)[name] for cls in maker.__mro__ for name in ("__init__", "__new__") if name in vars(cls)
        )
        if isinstance(function, staticmethod):
            function = function.__func__
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if own else 0 :]
    scope = vars(sys.modules.get(getattr(function, "__module__", ""), typing))
    return tuple(Parameter(p.name, _evaluated(p.annotation, scope), p.default, p.kind) for p in parameters)


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    if annotation is Kind.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, globalns=scope)["value"]
    except Exception:
        return Any  # a name that exists for type checkers only


def hints_in(hint: Any) -> list[Any]:
    """Return the alternatives of a hint: `int | None` is two; a type variable is what bounds it, or anything."""
    origin = typing.get_origin(hint)
    if origin is Union or origin is types.UnionType:
        return [each for part in typing.get_args(hint) for each in hints_in(part)]
    if origin is typing.Annotated:
        return hints_in(typing.get_args(hint)[0])
    if isinstance(hint, TypeVar):
        return hints_in(hint.__bound__) if hint.__bound__ is not None else [Any]
    return [type(None) if hint is None else hint]


def is_pipe(hint: Any) -> bool:
    """Tell whether a hint is a class of pipes."""
    origin = typing.get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Node)


def is_function(hint: Any) -> bool:
    """Tell whether a hint is a function or a class given as an argument."""
    origin = typing.get_origin(hint) or hint
    return origin is collections.abc.Callable or origin is type


def is_settings(hint: Any) -> bool:
    """Tell whether a hint is a dataclass, which YAML writes as a mapping of its fields."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _spell_one(hint: Any) -> str:
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        return " or ".join(repr(value) for value in typing.get_args(hint))
    if is_function(hint):
        return "a function"
    if is_pipe(hint):
        return "a pipe ($name)"
    if origin is type(None):
        return "null"
    if origin is bool:
        return "true or false"
    if is_settings(hint) or (isinstance(origin, type) and issubclass(origin, collections.abc.Mapping)):
        return "a mapping"
    if origin is not str and isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        items = [item for item in typing.get_args(hint) if item is not ... and not isinstance(item, TypeVar)]
        return f"a list of {spell(items[0])}" if items and items[0] is not Any else "a list"
    return getattr(origin, "__name__", str(origin))


def spell(hint: Any) -> str:
    """Return a hint in words.

    >>> spell(int | None), spell(list[str]), spell(Literal["a", "b"])
    ('int or null', 'a list of str', "'a' or 'b'")
    """
    return " or ".join(dict.fromkeys(_spell_one(each) for each in hints_in(hint)))
