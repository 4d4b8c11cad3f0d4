"""Which functions a YAML graph may name. It never names others: naming one of any module would run whatever it likes.

A function is found in a table: a few harmless ones of this package and of Python, and those that the caller passes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pipes.config_nodes import nearest
from pipes.errors import ConfigError, brief

__all__ = ["Functions", "load_functions", "qualified_name"]

_OWN = {
    "DataChunk": "pipes.datapipe:DataChunk",
    "Decoder": "pipes.formats.decode:Decoder",
    "decode": "pipes.formats.decode:decode",
    "default_collate": "pipes.stages.collating:default_collate",
    "itemgetter": "operator:itemgetter",
    **{name: f"builtins:{name}" for name in ("bool", "dict", "float", "int", "len", "list", "max", "min", "set")},
    **{name: f"builtins:{name}" for name in ("sorted", "str", "sum", "tuple")},
}


def qualified_name(function: object) -> str | None:
    """Return `module:name` of a function or class that an import finds under it; None for a lambda or a local one.

    >>> from operator import itemgetter
    >>> qualified_name(itemgetter), qualified_name(lambda x: x)
    ('operator:itemgetter', None)
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


class Functions:
    """The table: by short name and, for what an import finds, by `module:name` too.

    >>> functions = Functions({"twice": lambda x: 2 * x})
    >>> functions.find("len")("abc"), functions.find("twice")(3), functions.find("builtins:len") is len
    (3, 6, True)

    Raises ConfigError from `find` for a name that is not in it, TypeError for what is not callable.
    """

    def __init__(self, given: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self._given: dict[str, Any] = {}
        for name, function in (given or {}).items():
            if not callable(function):
                raise TypeError(f"functions[{name!r}] is a {type(function).__name__}, which cannot be called")
            self._given[name] = function
            full = qualified_name(function)
            if full is not None:
                self._given.setdefault(full, function)

    def names(self) -> list[str]:
        """Return every short name."""
        return sorted({*_OWN, *(name for name in self._given if ":" not in name)})

    def find(self, name: str) -> Any:
        """Return the function called `name`."""
        if name in self._given:
            return self._given[name]
        place = _OWN.get(name, name if name in _OWN.values() else None)
        if place is not None:
            module, _, attribute = place.partition(":")
            return getattr(importlib.import_module(module), attribute)
        short = name.replace(":", ".").rpartition(".")[2]
        near = nearest(name, self.names()) or "."
        raise ConfigError(
            f"the function {brief(name)} is not allowed{near} A graph may only name functions it is given: "
            f"`pipes-inspect --functions FILE.py`, or load_graph(..., functions={{'{short}': {short}}})"
        )

    def name_of(self, function: object) -> str | None:
        """Return the name to write for `function`: the shortest in the table, else `module:name`, else None."""
        known = [name for name, value in self._given.items() if value is function]
        known += [name for name, place in _OWN.items() if self._is(place, function)]
        return min(known, key=lambda name: (":" in name, len(name)), default=None) or qualified_name(function)

    @staticmethod
    def _is(place: str, function: object) -> bool:
        module, _, attribute = place.partition(":")
        return module in sys.modules and getattr(sys.modules[module], attribute, None) is function


def configured(maker: Any, args: list[Any], settings: dict[str, Any]) -> Any:
    """Return a class called with the settings, or a function with them bound."""
    if isinstance(maker, type):
        return maker(*args, **settings)
    return functools.partial(maker, *args, **settings)


def load_functions(sources: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Import Python files (`x.py`) or modules and return the functions and classes that they define.

    This runs their code, which is why nothing but an explicit wish of the user calls it.
    Raises ImportError, or whatever the code raises.
    """
    found: dict[str, Callable[..., Any]] = {}
    for source in sources:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        public = getattr(module, "__all__", None)
        for name, value in vars(module).items():
            here = getattr(value, "__module__", None) == module.__name__ if public is None else name in public
            if here and callable(value) and not name.startswith("_"):
                found[name] = value
    return found


def _import_file(path: Path) -> ModuleType:
    free = path.stem.isidentifier() and importlib.util.find_spec(path.stem) is None
    name = path.stem if free else f"functions_of_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
