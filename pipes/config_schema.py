"""The YAML format as a JSON Schema, for editors; `load_graph` itself checks against the signatures."""

from __future__ import annotations

import collections.abc
import inspect
import typing
from inspect import Parameter as Kind
from typing import Any, Literal

from pipes.config_stages import (
    Parameter,
    find_stage,
    hints_in,
    is_function,
    is_pipe,
    is_settings,
    parameters_of,
    stage_names,
)

__all__ = ["json_schema"]

_SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_REFERENCE = {"type": "string", "pattern": r"^\$[A-Za-z_]\w*$"}
_VARIABLE = {"type": "string", "pattern": r"\$\{"}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of graphs made of every stage that is registered now.

    >>> schema = json_schema()
    >>> schema["$defs"]["shuffle"]["anyOf"][0]["properties"]["buffer_size"]["default"]
    10000
    """
    names = sorted(stage_names(None))
    stages = {name: _stage(name) for name in names}
    item = {
        "anyOf": [
            {"enum": names},
            _REFERENCE,
            {
                "type": "object",
                "minProperties": 1,
                "maxProperties": 1,
                "additionalProperties": False,
                "properties": {name: {"$ref": f"#/$defs/{name}"} for name in names},
            },
        ]
    }
    listing = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/-item"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A graph of pipes",
        "type": "object",
        "required": ["version", "pipe"],
        "properties": {
            "version": {"const": 1},
            "pipes": {
                "type": "object",
                "propertyNames": {"pattern": r"^[A-Za-z_]\w*(\s*,\s*[A-Za-z_]\w*)*$"},
                "additionalProperties": {"$ref": "#/$defs/-list"},
            },
            "pipe": {"$ref": "#/$defs/-list"},
        },
        "patternProperties": {"^x-": True},
        "additionalProperties": False,
        "$defs": {"-list": listing, "-item": item, **stages},
    }


def _stage(name: str) -> dict[str, Any]:
    stage = find_stage(name, "iter") or find_stage(name, "map")
    assert stage is not None
    takes = stage.parameters
    # Whatever is first may come from the stage above, and the value alone may be for it or for the second.
    alone = [_value(each.hint) for each in takes[:2]]
    several = [{"type": "array"}] if any(each.kind is Kind.VAR_POSITIONAL for each in takes) else []
    text = (inspect.getdoc(stage.maker) or "").partition("\n\n")[0].replace("\n", " ")
    counted = {"num_instances"}
    needed = [each.name for each in takes[1:] if each.required and each.name not in counted]
    return {
        **({"description": text} if text else {}),
        "anyOf": [_mapping(takes, needed, source=bool(takes)), {"type": "null"}, *alone, *several],
    }


def _mapping(takes: tuple[Parameter, ...], needed: list[str], source: bool = False) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    extra = False
    for each in takes:
        if each.kind is Kind.VAR_KEYWORD:
            extra = True
            continue
        value = _value(each.hint)
        if each.kind is Kind.VAR_POSITIONAL:
            value = {"anyOf": [{"type": "array", "items": value}, value]}
        if isinstance(each.default, bool | int | float | str):
            value = {**value, "default": each.default}
        properties[each.name] = value
    if source and "source" not in properties:
        properties["source"] = _value(takes[0].hint)
    needed = [name for name in needed if name in properties]
    return {
        "type": "object",
        "properties": properties,
        **({"required": needed} if needed else {}),
        **({} if extra else {"additionalProperties": False}),
    }


def _value(hint: Any) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = []
    for option in hints_in(hint):
        origin = typing.get_origin(option) or option
        if option is Any or option is object:
            return {}
        if option in _SIMPLE:
            kinds.append({"type": _SIMPLE[option]})
        elif origin is Literal:
            kinds.append({"enum": list(typing.get_args(option))})
        elif is_function(option):
            kinds += [{"type": "string"}, {"type": "object", "minProperties": 1, "maxProperties": 1}]
        elif is_pipe(option):
            kinds += [_REFERENCE, {"type": "array"}, {"type": "string"}]
        elif is_settings(option):
            takes = parameters_of(option)
            kinds.append(_mapping(takes, [each.name for each in takes if each.required]))
        elif isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
            kinds.append({"type": "object"})
        elif isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
            kinds.append({"type": ["array", "string"]})
    unique = [each for place, each in enumerate([*kinds, _VARIABLE]) if each not in kinds[:place]]
    return {"anyOf": unique}
