"""Graphs in YAML: `load_graph` builds one, `dump_graph` writes one, `json_schema` describes the format to editors.

The format is on one page in docs/yaml.md. A graph is data: loading it runs no code but the constructors of known stages
and of settings objects, and it names only functions that it is given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from pipes.config_dump import dump_graph
from pipes.config_functions import Functions, load_functions
from pipes.config_nodes import BAD, MAX_BYTES, Problems, entries, nearest, plain, read_nodes
from pipes.config_schema import json_schema
from pipes.config_stages import Family, Stage, find_stage, stage_names
from pipes.config_values import Binder
from pipes.config_variables import Variables
from pipes.datapipe import IterDataPipe, MapDataPipe
from pipes.errors import brief
from pipes.node import Node as Pipe
from pipes.node import walk

__all__ = ["MAX_BYTES", "dump_graph", "json_schema", "load_functions", "load_graph", "read_graph"]

VERSION = 1
_NEEDED = {"version": f"'version: {VERSION}'", "pipe": "'pipe:' with the list of stages"}
_NAMES = re.compile(r"[A-Za-z_]\w*(\s*,\s*[A-Za-z_]\w*)*", re.ASCII)


def load_graph(
    path_or_text: str | os.PathLike[str],
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> IterDataPipe[Any]:
    """Return the graph that a YAML file describes; a str with a line break is the YAML itself.

    `functions` are those that the graph may name beside the built-in ones, `variables` the values of its `${NAME}`s,
    which otherwise come from the environment.
    Raises ConfigError for everything wrong with the YAML, all of it at once (`.errors`), with file, line and column;
    OSError when the file cannot be read.

    >>> pipe = load_graph('''
    ... version: 1
    ... pipe:
    ...   - IterableWrapper: [[1, 2, 3]]
    ...   - flatmap
    ...   - map: double
    ...   - batch: ${SIZE}
    ... ''', functions={"double": lambda x: 2 * x}, variables={"SIZE": 2})
    >>> list(pipe)
    [[2, 4], [6]]
    """
    if isinstance(path_or_text, str) and "\n" in path_or_text:
        return read_graph(path_or_text, "<text>", functions=functions, variables=variables)
    with Path(path_or_text).open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    return read_graph(data, os.fspath(path_or_text), functions=functions, variables=variables)


def read_graph(
    data: bytes | str,
    file: str,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> IterDataPipe[Any]:
    """Return the graph that `data` describes; errors call it `file`. Otherwise as `load_graph`.

    >>> list(read_graph("{version: 1, pipe: [IterableWrapper: [7]]}", "seven.yaml"))
    [7]
    """
    problems = Problems(file)
    root = read_nodes(data, problems, Variables(variables))
    pipe = _Builder(problems, Functions(functions)).graph(root)
    problems.check()
    assert isinstance(pipe, IterDataPipe)
    return pipe


class _Builder:
    """Makes pipes from checked nodes. After an error it goes on checking what does not depend on it."""

    def __init__(self, problems: Problems, functions: Functions) -> None:
        self.problems = problems
        self.binder = Binder(problems, functions, self._refer)
        self.branches: dict[str, Any] = {}
        self.defined: dict[str, tuple[Node, bool]] = {}
        self.read: dict[str, int] = {}
        self.later: frozenset[str] = frozenset()
        self.placed: set[int] = set()

    def graph(self, root: Node) -> Any:
        if not isinstance(root, MappingNode):
            return self.problems.add(root, "a graph is a mapping: 'version: 1', then 'pipe:' with a list of stages")
        top = {key.value: (key, value) for key, value in entries(root)}
        self._check_top(root, top)
        if "pipes" in top:
            self._all_branches(top["pipes"][1])
        pipe = BAD
        if "pipe" in top:
            key, value = top["pipe"]
            pipe = self.branch("pipe", value, ())
            if isinstance(pipe, MapDataPipe):
                self.problems.add(key, "the graph ends in a map pipe, which has no order; add 'to_iter_datapipe'")
        for name, (node, one_of_several) in self.defined.items():
            if name not in self.read and not one_of_several and not self.problems.errors:
                self.problems.add(node, f"nothing reads '{name}'; use it as '${name}' or remove it")
        return pipe

    def _check_top(self, root: Node, top: dict[str, tuple[ScalarNode, Node]]) -> None:
        for name, (key, _) in top.items():
            if name not in ("version", "pipe", "pipes") and not name.startswith("x-"):
                hint = (
                    nearest(name, ("version", "pipe", "pipes")) or "; it has version, pipe, pipes (and x-... is yours)"
                )
                self.problems.add(key, f"a graph has no '{name}'{hint}")
        missing = [what for name, what in _NEEDED.items() if name not in top]
        if missing:
            self.problems.add(root, f"the graph lacks {' and '.join(missing)}")
        if "version" in top and repr(plain(top["version"][1])) != repr(VERSION):
            self.problems.add(top["version"][1], f"this release reads version {VERSION} of the format only")

    def _all_branches(self, node: Node) -> None:
        if not isinstance(node, MappingNode):
            self.problems.add(node, "'pipes:' is a mapping of names to lists of stages")
            return
        lists = entries(node)
        self.later = frozenset(name for key, _ in lists for name in _split(key.value))
        for key, value in lists:
            if not _NAMES.fullmatch(key.value):
                self.problems.add(
                    key, f"{brief(key.value)} is no name; use letters, digits and _, and commas between several"
                )
                continue
            names = _split(key.value)
            made = self.branch(key.value, value, names if len(names) > 1 else ())
            for place, name in enumerate(names):
                if name in self.branches:
                    self.problems.add(key, f"the name '{name}' is already taken")
                self.branches[name] = BAD if made is BAD else made[place] if len(names) > 1 else made
                self.defined[name] = (key, len(names) > 1)

    def branch(self, name: str, node: Node, names: tuple[str, ...]) -> Any:
        """Return the pipe that a list of stages makes, or the list of pipes when it has several names."""
        if not isinstance(node, SequenceNode) or not node.value:
            return self.problems.add(node, f"'{name}' should be a list of stages, one '- stage' a line")
        pipe: Any = None
        family: Family | None = None
        for place, item in enumerate(node.value):
            last = place == len(node.value) - 1
            pipe, family = self.stage(item, pipe, family, names if last else ())
            if isinstance(pipe, list) and not (last and names):
                self.problems.add(item, "this stage gives several pipes: end a list 'a, b:' under 'pipes:' with it")
                pipe = BAD
        if names and pipe is not BAD and (not isinstance(pipe, list) or len(pipe) != len(names)):
            count = len(pipe) if isinstance(pipe, list) else 1
            return self.problems.add(node.value[-1], f"this stage gives {count}, but '{name}' are {len(names)} names")
        return pipe

    def stage(
        self, item: Node, source: Any, family: Family | None, names: tuple[str, ...]
    ) -> tuple[Any, Family | None]:
        """Return the pipe that one item of a list makes behind `source` (None: the first item), and its family."""
        key, value = self._split_item(item)
        if key is None:
            return BAD, family or "iter"
        name = key.value
        if name.startswith("$") and value is None and source is None:
            pipe = self._refer(name[1:], key)
            return pipe, "map" if isinstance(pipe, MapDataPipe) else "iter"
        stage = find_stage(name, family)
        if stage is None:
            self._unknown(key, name, family)
            return BAD, family or "iter"
        filled: dict[str, Any] = {}
        if source is not None and stage.parameters:
            first = stage.parameters[0]
            filled[first.name] = [source] if first.kind is first.kind.VAR_POSITIONAL else source
        if names and any(each.name == "num_instances" for each in stage.parameters):
            value = self._count(value, stage, names, filled)
        bound = self.binder.bind(name, key, value, stage.parameters, filled)
        if source is BAD or bound is BAD:
            return BAD, stage.gives
        return self._made(key, stage, *bound), stage.gives

    def _count(self, value: Any, stage: Stage, names: tuple[str, ...], filled: dict[str, Any]) -> Node | None:
        """Take the number of pipes from the number of names; what is written must agree, and is left out."""
        count: Node | None = value if isinstance(value, ScalarNode) and isinstance(plain(value), int) else None
        if isinstance(value, MappingNode):
            count = next((node for key, node in entries(value) if key.value == "num_instances"), None)
        if count is not None and plain(count) != len(names):
            self.problems.add(count, f"{stage.name} should give {len(names)} pipes, for the names {', '.join(names)}")
        filled["num_instances"] = len(names)
        if isinstance(value, MappingNode):
            rest = [(key, node) for key, node in entries(value) if key.value != "num_instances"]
            return MappingNode(value.tag, rest, value.start_mark, value.end_mark)
        return None if count is not None else value

    def _split_item(self, item: Node) -> tuple[ScalarNode | None, Node | None]:
        if isinstance(item, ScalarNode) and isinstance(plain(item), str):
            return item, None
        if not isinstance(item, MappingNode):
            self.problems.add(item, "a stage is a name, or 'name: parameters'")
            return None, None
        pairs = entries(item)
        if len(pairs) == 1:
            key, value = pairs[0]
            return key, None if isinstance(value, ScalarNode) and plain(value) is None else value
        if not pairs:
            self.problems.add(item, "this stage has no name")
        elif isinstance(pairs[0][1], ScalarNode) and plain(pairs[0][1]) is None:
            self.problems.add(pairs[1][0], f"indent this further if it is a parameter of '{pairs[0][0].value}'")
        else:
            self.problems.add(pairs[1][0], f"a second key in one item; begin a stage with '- {pairs[1][0].value}'")
        return None, None

    def _unknown(self, key: Node, name: str, family: Family | None) -> None:
        other: Family = "map" if family == "iter" else "iter"
        if name.startswith("$"):
            self.problems.add(key, f"'{name}' stands in the middle; a named pipe begins a list, or is a parameter")
        elif family is not None and find_stage(name, other) is not None:
            what = "an iterable" if family == "iter" else "a map"
            hint = "; put 'to_iter_datapipe' before it" if family == "map" else ""
            self.problems.add(key, f"'{name}' does not follow {what} pipe{hint}")
        else:
            hint = nearest(name, stage_names(family)) or nearest(name, stage_names(None))
            self.problems.add(key, f"there is no stage {brief(name)}{hint}")

    def _refer(self, name: str, node: Node) -> Any:
        if name not in self.branches:
            hint = nearest(name, self.branches)
            if name in self.later:
                hint = "; it is defined further down: move it up"
            return self.problems.add(node, f"there is no pipe '{name}' under 'pipes:'{hint}")
        self.read[name] = self.read.get(name, 0) + 1
        if self.read[name] > 1:
            return self.problems.add(node, f"'${name}' is read a second time; give each reader its own with 'fork'")
        return self.branches[name]

    def _made(self, key: Node, stage: Stage, args: list[Any], named: dict[str, Any]) -> Any:
        if any(each is BAD for each in (*args, *named.values())):
            return BAD
        try:
            made = stage.maker(*args, **named)
        except Exception as error:
            return self.problems.add(key, f"{stage.name}: {error or type(error).__name__}")
        for pipe in made if isinstance(made, list) else [made]:
            if isinstance(pipe, Pipe):
                self._place(pipe, (self.problems.file, key.start_mark.line + 1))
        return made

    def _place(self, pipe: Pipe, where: tuple[str, int]) -> None:
        """Have later errors say where in the YAML a pipe was built."""
        for node in walk(pipe):
            if id(node) not in self.placed:
                self.placed.add(id(node))
                vars(node)["_built"] = where


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(","))
