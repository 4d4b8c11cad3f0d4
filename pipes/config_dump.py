"""A graph of pipes as YAML that `load_graph` reads back."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Mapping
from inspect import Parameter as Kind
from typing import Any

import yaml

from pipes.config_functions import Functions
from pipes.config_nodes import add_core_schema
from pipes.config_stages import Parameter, find_stage, parameters_of
from pipes.datapipe import IterDataPipe, MapDataPipe, chained_name
from pipes.errors import ConfigError, brief
from pipes.node import Node, inputs_of
from pipes.stages.wrapping import IterableWrapper

__all__ = ["dump_graph"]

# Settings made by methods, which the YAML has no place for: attribute -> (its value when untouched, the method).
_BY_METHOD: dict[str, tuple[Any, str]] = {
    "_seed": (None, "set_seed"),
    "_enabled": (True, "set_shuffle"),
    "_groups": ({}, "apply_sharding"),
}
_REFERENCE = re.compile(r"\$[A-Za-z_]\w*", re.ASCII)
_SECRET = re.compile(
    r"secret|token|password|access_key|customer_key|credential|authorization|^auth$|^cookies$", re.IGNORECASE
)


class _Inline(dict[str, Any]):
    """A mapping that is written on one line."""


class _InlineList(list[Any]):
    """A list that is written on one line."""


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


add_core_schema(_Dumper)
_Dumper.add_representer(_Inline, lambda d, v: d.represent_mapping("tag:yaml.org,2002:map", v.items(), flow_style=True))
_Dumper.add_representer(_InlineList, lambda d, v: d.represent_sequence("tag:yaml.org,2002:seq", v, flow_style=True))
_Dumper.add_representer(tuple, lambda d, v: d.represent_sequence("!tuple", v, flow_style=True))
_Dumper.add_representer(
    range,
    lambda d, v: (
        d.represent_scalar("!range", str(v.stop))
        if (v.start, v.step) == (0, 1)
        else d.represent_sequence("!range", (v.start, v.stop, v.step), flow_style=True)
    ),
)


def dump_graph(pipe: IterDataPipe[Any], *, functions: Mapping[str, Callable[..., Any]] | None = None) -> str:
    """Return the YAML of a graph; functions are written by their name in `functions`, else as `module:name`.

    Raises ConfigError for what YAML cannot name: a lambda or local function, an object, data that is not plain,
    a credential, a stage that does not keep its parameters as attributes of the same name, a seed set by a method.

    >>> from pipes.iter import IterableWrapper
    >>> print(dump_graph(IterableWrapper([1, 2]).map(str).batch(2)))
    version: 1
    pipe:
      - IterableWrapper: [1, 2]
      - map: str
      - batch: 2
    """
    writer = _Writer(Functions(functions))
    items = writer.chain(pipe)
    whole = {"version": 1, **({"pipes": writer.branches} if writer.branches else {}), "pipe": items}
    text: str = yaml.dump(
        whole, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=110
    )
    return text


class _Writer:
    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.branches: dict[str, list[Any]] = {}
        self.children: dict[int, list[str]] = {}
        self.count = 0

    def chain(self, pipe: Node) -> list[Any]:
        """Return the items of the list that ends in `pipe`; what else it needs goes to `branches`."""
        items: list[Any] = []
        while True:
            sources = inputs_of(pipe)
            if len(sources) == 1 and type(sources[0])._shared:
                return [f"${self._child(pipe, sources[0])}", *items]
            takes = parameters_of(type(pipe))
            main = self._main_input(pipe, takes, sources)
            items = [self._item(pipe, takes, main), *items]
            if main is None:
                return items
            pipe = inputs_of(main)[0] if pipe._made_above else main

    def branch(self, pipe: Node) -> str:
        """Return the reference to a list of its own that ends in `pipe`."""
        sources = inputs_of(pipe)
        if len(sources) == 1 and type(sources[0])._shared:
            return f"${self._child(pipe, sources[0])}"
        items = self.chain(pipe)
        self.count += 1
        self.branches[f"branch{self.count}"] = items
        return f"$branch{self.count}"

    def _child(self, child: Any, main: Any) -> str:
        if id(main) not in self.children:
            name = getattr(type(main), "chained_as", None)
            stage = find_stage(name, "iter") if name else None
            if stage is None:
                raise self._cannot(main, "is no stage that YAML knows")
            kept = {**vars(main), "copy": getattr(child, "copy", None)}
            settings = {
                each.name: self._value(main, each.name, kept[each.name])
                for each in stage.parameters[1:]
                if each.name != "num_instances" and kept[each.name] != each.default
            }
            items = [*self.chain(main.datapipe), {stage.name: _Inline(settings)} if settings else stage.name]
            self.count += 1
            self.children[id(main)] = [f"{stage.name}{self.count}_{place}" for place in range(main.num_instances)]
            self.branches[", ".join(self.children[id(main)])] = items
        number: int = child.instance_id
        return self.children[id(main)][number]

    @staticmethod
    def _main_input(pipe: Node, takes: tuple[Parameter, ...], sources: list[Node]) -> Node | None:
        if not takes:
            return None
        kept = vars(pipe).get(takes[0].name)
        if isinstance(kept, Node):
            return kept  # also one that is data to the stage, as to IterableWrapper
        if takes[0].kind is Kind.VAR_POSITIONAL and kept:
            return kept[0] if isinstance(kept[0], Node) else None
        if kept is None and takes[0].name not in vars(pipe) and len(sources) == 1:
            return sources[0]
        return None

    def _item(self, pipe: Node, takes: tuple[Parameter, ...], main: Node | None) -> Any:
        name = _name_of(pipe)
        if name is None:
            raise self._cannot(pipe, "has no name that YAML knows; give it one with @functional_datapipe")
        for attribute, (untouched, method) in _BY_METHOD.items():
            if vars(pipe).get(attribute, untouched) != untouched:
                raise self._cannot(pipe, f"was changed by {method}(), which YAML cannot say; call it after loading")
        settings = _Inline()
        for place, each in enumerate(takes):
            kept = self._kept(pipe, each, main)
            if isinstance(pipe, IterableWrapper) and type(kept) is str:
                kept = list(kept)  # a text where a list is meant is refused when it is read
            if place == 0 and main is not None:
                if each.kind is not Kind.VAR_POSITIONAL or len(kept) == 1:
                    continue
                kept = list(kept[1:])
            if each.kind is Kind.VAR_KEYWORD:
                settings.update({key: self._value(pipe, key, value) for key, value in kept.items()})
            elif not (type(kept) is type(each.default) and kept == each.default) and kept is not each.default:
                settings[each.name] = self._value(pipe, each.name, kept)
        return _shortest(name, settings, takes[1:] if main is not None and takes[0].name not in settings else takes)

    def _kept(self, pipe: Node, parameter: Parameter, main: Node | None) -> Any:
        fields = vars(pipe)
        for name in (parameter.name, f"_{parameter.name}"):
            if name in fields:
                return fields[name]
        if parameter.required and main is not None:
            return None
        raise self._cannot(pipe, f"does not keep its parameter '{parameter.name}' as an attribute of that name")

    def _value(self, pipe: Node, name: str, value: Any) -> Any:
        if _SECRET.search(name) and value is not None:
            raise self._cannot(pipe, f"{name} is a credential; leave it out, the environment gives it")
        if isinstance(value, Node):
            return self.branch(value)
        if value is None or type(value) in (bool, int, float, range):
            return value
        if type(value) is str:
            if _REFERENCE.fullmatch(value):
                raise self._cannot(pipe, f"its '{name}' is the text '{value}', which would be read as a named pipe")
            return value.replace("${", "$${")
        if type(value) in (list, tuple):
            items = [self._value(pipe, name, each) for each in value]
            return tuple(items) if type(value) is tuple else _InlineList(items)
        if type(value) is dict and all(type(key) in (str, int) or isinstance(key, Node) for key in value):
            pairs = [(self.branch(key) if isinstance(key, Node) else key, each) for key, each in value.items()]
            return _Inline({key: self._value(pipe, str(key), each) for key, each in pairs})
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kept = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            defaults = {field.name: field.default for field in dataclasses.fields(value)}
            return _Inline({key: self._value(pipe, key, each) for key, each in kept.items() if each != defaults[key]})
        return self._function(pipe, name, value)

    def _function(self, pipe: Node, name: str, value: Any) -> Any:
        if callable(value):
            known = self.functions.name_of(value)
            if known is not None:
                return known
            if type(value) is functools.partial and not (value.args and value.keywords):
                given = dict(value.keywords) or list(value.args)
                return _Inline({self._function(pipe, name, value.func): self._value(pipe, name, given)})
            if type(value) is operator.itemgetter:
                return _Inline({"itemgetter": self._value(pipe, name, list(value.__reduce__()[1]))})
            known = self.functions.name_of(type(value))
            fields = getattr(value, "__dict__", {})
            if known is not None and fields:
                takes = [each.name for each in parameters_of(type(value))]
                if set(takes) == set(fields):
                    return _Inline({known: self._value(pipe, name, {key: fields[key] for key in takes})})
        found = getattr(value, "__qualname__", None) or brief(value, 60)
        if callable(value):
            why = "which no import finds; define it at the top of a module, or pass functions={'name': it}"
        else:
            why = "which is no plain data; make it inside a stage"
        raise self._cannot(pipe, f"its '{name}' is {found}, {why}")

    @staticmethod
    def _cannot(pipe: Node, why: str) -> ConfigError:
        built = getattr(pipe, "_built", None)
        file, line = built if isinstance(built, tuple) else ("", 0)
        return ConfigError(f"{type(pipe).__name__} cannot be written as YAML: {why}", file, line, 1)


def _name_of(pipe: Node) -> str | None:
    if (name := chained_name(type(pipe)) or getattr(type(pipe), "chained_as", None)) is not None:
        return name
    if isinstance(pipe, MapDataPipe):
        return type(pipe).__name__ if find_stage(type(pipe).__name__, "map") else None
    stage = find_stage(type(pipe).__name__, "iter")
    return stage.name if stage is not None and stage.maker is type(pipe) else None


def _shortest(name: str, settings: _Inline, takes: tuple[Parameter, ...]) -> Any:
    if not settings:
        return name
    if len(settings) == 1 and takes:
        key, value = next(iter(settings.items()))
        if key == takes[0].name and value is not None and not isinstance(value, dict):
            return {name: value}
    return {name: settings}
