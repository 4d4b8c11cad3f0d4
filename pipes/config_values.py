"""YAML nodes bound to a stage's signature: each value is checked against its parameter's annotation."""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import typing
from collections.abc import Callable, Sequence
from inspect import Parameter as Kind
from typing import Any, Literal

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from pipes.config_functions import Functions, configured
from pipes.config_nodes import BAD, Problems, entries, nearest, plain
from pipes.config_stages import Parameter, hints_in, is_function, is_pipe, is_settings, parameters_of, spell
from pipes.errors import ConfigError, brief

__all__ = ["Arguments", "Binder"]

_REFERENCE = re.compile(r"\$[A-Za-z_]\w*", re.ASCII)

Arguments = tuple[list[Any], dict[str, Any]]


class Binder:
    """Turns the value of a stage into arguments; what is wrong goes to `problems`, and BAD comes back."""

    def __init__(self, problems: Problems, functions: Functions, refer: Callable[[str, Node], Any]) -> None:
        self.problems, self.functions, self.refer = problems, functions, refer

    def bind(
        self, name: str, at: Node, value: Node | None, takes: Sequence[Parameter], filled: dict[str, Any]
    ) -> Arguments | Any:
        """Return positional and named arguments for `takes`; `filled` has those that are known already.

        A mapping names parameters, any other value is for the first one that is not filled.
        """
        given: dict[str, tuple[Node, Node]] = {}
        free = [each for each in takes if each.name not in filled or each.kind is Kind.VAR_POSITIONAL]
        if isinstance(value, MappingNode):
            given = {key.value: (key, node) for key, node in entries(value)}
            aliased = "source" in given and takes and all(parameter.name != "source" for parameter in takes)
            if aliased and takes[0].name not in given and takes[0].name not in filled:
                given[takes[0].name] = given.pop("source")
        elif value is not None:
            if not free:
                return self.problems.add(value, f"{name} takes no parameters")
            given = {free[0].name: (value, value)}
        return self._arguments(name, at, given, takes, filled)

    def _arguments(
        self,
        name: str,
        at: Node,
        given: dict[str, tuple[Node, Node]],
        takes: Sequence[Parameter],
        filled: dict[str, Any],
    ) -> Arguments | Any:
        args: list[Any] = []
        named: dict[str, Any] = {}
        fine = True
        for parameter in takes:
            label = f"{name}: {parameter.name}"
            if parameter.kind is Kind.VAR_POSITIONAL:
                args += filled.get(parameter.name, [])
                if parameter.name in given:
                    args += (more := self._several(given.pop(parameter.name)[1], parameter, label))
                    fine = fine and not any(each is BAD for each in more)
            elif parameter.name in filled:
                args.append(filled[parameter.name])
                if parameter.name in given:
                    self.problems.add(given.pop(parameter.name)[0], f"{label} comes from above; leave it out")
                    fine = False
            elif parameter.kind is Kind.VAR_KEYWORD:
                named.update({key: plain(node) for key, (_, node) in given.items()})
                given = {}
            elif parameter.name in given:
                named[parameter.name] = self.value(given.pop(parameter.name)[1], parameter.hint, label)
                fine = fine and named[parameter.name] is not BAD
            elif parameter.required:
                self.problems.add(at, f"{name} needs '{parameter.name}' ({spell(parameter.hint)})")
                fine = False
        for key, (node, _) in given.items():
            names = [parameter.name for parameter in takes if parameter.name not in filled]
            known = f"; it takes {', '.join(names)}" if names else "; it takes none"
            self.problems.add(node, f"{name} has no parameter {brief(key)}{nearest(key, names) or known}")
            fine = False
        if fine:
            self._put_in_place(takes, args, named)
        return (args, named) if fine else BAD

    @staticmethod
    def _put_in_place(takes: Sequence[Parameter], args: list[Any], named: dict[str, Any]) -> None:
        """Move what stands before a `*parameter` or is positional-only from `named` to `args`."""
        variadic = any(parameter.kind is Kind.VAR_POSITIONAL for parameter in takes)
        front = []
        for parameter in takes:
            if parameter.kind is Kind.VAR_POSITIONAL:
                break
            if parameter.name in named and (parameter.kind is Kind.POSITIONAL_ONLY or (variadic and args)):
                front.append(named.pop(parameter.name))
        args[:0] = front

    def _several(self, node: Node, parameter: Parameter, label: str) -> list[Any]:
        items = node.value if isinstance(node, SequenceNode) and node.tag[0] != "!" else [node]
        return [self.value(item, parameter.hint, label) for item in items]

    def value(self, node: Node, hint: Any, label: str) -> Any:
        """Return the value of `node` as `hint` wants it, or BAD."""
        options = hints_in(hint)
        if isinstance(node, ScalarNode):
            found = self._scalar(node, options)
            if found is None and (other := getattr(node, "other", None)) is not None:
                found = self._scalar(other, options)
        elif isinstance(node, MappingNode):
            found = self._mapping(node, options, label)
        else:
            found = self._sequence(node, options, label)
        if found is not None:
            return found[0]
        if all(is_function(each) or is_pipe(each) or each is type(None) for each in options):
            what = "a list" if isinstance(node, SequenceNode) else brief(plain(node))
        else:
            what = {"NoneType": "null"}.get(kind := type(plain(node)).__name__, kind)
        return self.problems.add(node, f"{label} should be {spell(hint)}, not {what}")

    def _scalar(self, node: ScalarNode, options: list[Any]) -> tuple[Any] | None:
        value = plain(node)
        pipes = any(map(is_pipe, options))
        if isinstance(value, str) and _REFERENCE.fullmatch(value) and (pipes or Any in options):
            return (self.refer(value[1:], node),)
        for option in options:
            if option is Any or option is object or (type(option) is type and type(value) is option):
                return (value,)
            if typing.get_origin(option) is Literal and any(
                value == each and type(value) is type(each) for each in typing.get_args(option)
            ):
                return (value,)
        if float in options and type(value) is int:
            return (float(value),)
        if isinstance(value, range) and any(_holds(option, collections.abc.Sequence) for option in options):
            return (value,)
        if isinstance(value, str) and any(map(is_function, options)):
            words = any(typing.get_origin(option) is Literal for option in options)
            if not words or ":" in value or value in self.functions.names():
                return (self._function(node, value, None),)
        return (self._source([value]),) if isinstance(value, str) and pipes else None

    def _sequence(self, node: Node, options: list[Any], label: str) -> tuple[Any] | None:
        value = plain(node)
        if value is BAD:
            return (self.problems.add(node, "!range takes one to three ints: !range [start, stop, step]"),)
        for option in options:
            if option is Any or option is object:
                return (value,)
            origin = typing.get_origin(option) or option
            if not _holds(option, type(value)) and not (origin is tuple and isinstance(value, list)):
                continue
            if isinstance(value, range):
                return (value,)
            inner = typing.get_args(option)
            if origin is tuple and inner and inner[-1] is not ...:
                if len(inner) != len(value):
                    continue
                hints = list(inner)
            else:
                hints = [inner[0] if inner else Any] * len(value)
            items = [self.value(each, own, label) for each, own in zip(node.value, hints, strict=True)]
            if any(item is BAD for item in items):
                return (BAD,)
            if origin in (set, frozenset):
                return (origin(items),)
            return (tuple(items) if origin is tuple or type(value) is tuple else items,)
        return (self._source(value),) if any(map(is_pipe, options)) else None

    def _mapping(self, node: MappingNode, options: list[Any], label: str) -> tuple[Any] | None:
        pairs = entries(node)
        for option in options:
            if is_settings(option):
                found = self.bind(label, node, node, parameters_of(option), {})
                return (BAD if found is BAD else self._made(node, option, *found),)
            if option is Any or option is object:
                return (plain(node),)
            if _holds(option, dict):
                of = typing.get_args(option)
                of_keys, of_values = of if len(of) == 2 else (Any, Any)
                keys = [self.value(key, of_keys, label) for key, _ in pairs]
                values = [self.value(each, of_values, label) for _, each in pairs]
                return (BAD if any(item is BAD for item in (*keys, *values)) else dict(zip(keys, values, strict=True)),)
        if any(map(is_function, options)) and len(pairs) == 1:
            key, settings = pairs[0]
            return (self._function(key, key.value, settings),)
        return None

    def _source(self, data: Any) -> Any:
        from pipes.iter import IterableWrapper

        return IterableWrapper(data)

    def _function(self, node: Node, name: str, settings: Node | None) -> Any:
        try:
            function = self.functions.find(name)
        except ConfigError as error:
            return self.problems.add(node, error.message)
        if settings is None:
            return function
        data = plain(settings)
        named, args = (data, []) if isinstance(data, dict) else ({}, data if isinstance(data, list) else [data])
        try:
            takes = parameters_of(function)
        except (TypeError, ValueError, StopIteration):
            takes = ()
        if takes and isinstance(settings, MappingNode) and isinstance(function, type):
            bound = self.bind(name, node, settings, takes, {})
            if bound is BAD:
                return BAD
            args, named = bound
        return self._made(node, lambda *args, **named: configured(function, list(args), named), args, named, name)

    def _made(
        self, node: Node, maker: Callable[..., Any], args: list[Any], named: dict[str, Any], name: str = ""
    ) -> Any:
        try:
            return maker(*args, **named)
        except Exception as error:
            return self.problems.add(node, f"{name or getattr(maker, '__name__', 'value')}: {error}")


def _holds(option: Any, kind: type) -> bool:
    """Tell whether a hint is a container that a value of type `kind` satisfies."""
    origin = typing.get_origin(option) or option
    if not isinstance(origin, type) or origin is str or dataclasses.is_dataclass(origin):
        return False
    return issubclass(origin, collections.abc.Iterable) and issubclass(kind, origin)
