"""YAML text into checked nodes that know their line and column; data only, nothing is ever run.

Contract
- Scalars follow YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema): `no` and `12:30` are strings,
  `1e3` is a number. Beside its tags, `!tuple [..]` and `!range [..]` give those two types. Every other tag is refused.
- Text, depth, and the size with all aliases written out are bounded, so a small file cannot fill the memory.
- Everything wrong is put down in `Problems` with its place; only a syntax error ends the reading.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from yaml import MappingNode, Node, ScalarNode, SequenceNode
from yaml.composer import Composer
from yaml.error import MarkedYAMLError
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from pipes.config_variables import Variables
from pipes.errors import ConfigError, brief

__all__ = ["BAD", "CoreResolver", "Problems", "add_core_schema", "entries", "nearest", "plain", "read_nodes"]

MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_VALUES = 100_000

_YAML = "tag:yaml.org,2002:"
_SCALARS = frozenset(_YAML + kind for kind in ("str", "int", "float", "bool", "null", "merge")) | {"!range"}
_SEQUENCES = frozenset((f"{_YAML}seq", "!tuple", "!range"))
_MAPPINGS = frozenset((f"{_YAML}map",))
_PATTERNS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)


class _Bad:
    def __repr__(self) -> str:
        return "BAD"


BAD: Any = _Bad()
"""Stands for a value that is wrong and was put down in `Problems`."""


def add_core_schema(resolver: Any) -> None:
    """Give a PyYAML resolver or dumper class the scalars of the core schema."""
    for kind, pattern, first in _PATTERNS:
        resolver.add_implicit_resolver(_YAML + kind, re.compile(rf"^(?:{pattern})$"), first)


class CoreResolver(BaseResolver):
    """Finds the type of a plain scalar as YAML 1.2 says."""


add_core_schema(CoreResolver)


class Problems:
    """What is wrong with one file, collected in the order of finding."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.errors: list[ConfigError] = []
        self._known: set[tuple[int, int]] = set()

    def add(self, at: Node | tuple[int, int], message: str) -> Any:
        """Put `message` down at a node, or at (line, column) from 1; returns BAD.

        Only the first at one place is kept: the others follow from it.
        """
        line, column = at if isinstance(at, tuple) else (at.start_mark.line + 1, at.start_mark.column + 1)
        if (line, column) not in self._known:
            self._known.add((line, column))
            self.errors.append(ConfigError(message, self.file, line, column))
        return BAD

    def check(self) -> None:
        """Raise ConfigError when anything was put down."""
        if self.errors:
            raise ConfigError.of(sorted(self.errors, key=lambda error: (error.line, error.column)))

    def stop(self, at: Node | tuple[int, int], message: str) -> NoReturn:
        """Put `message` down and raise."""
        self.add(at, message)
        self.check()
        raise AssertionError("unreachable")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the name most like `name`, or nothing.

    >>> nearest("shufle", ["shuffle", "batch"])
    "; did you mean 'shuffle'?"
    """
    found = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean '{found[0]}'?" if found else ""


class _Composer(Reader, Scanner, Parser, Composer, CoreResolver):
    def __init__(self, text: str, problems: Problems) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        CoreResolver.__init__(self)
        self.problems, self.depth = problems, 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            self.problems.stop(
                (mark.line + 1, mark.column + 1), f"more than {MAX_DEPTH} levels deep; no graph needs that"
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _decoded(data: bytes, problems: Problems) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_start = data.rfind(b"\n", 0, error.start) + 1
        column = len(data[line_start : error.start].decode("utf-8", "replace")) + 1
        where = data.count(b"\n", 0, error.start) + 1, column
        problems.stop(where, f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8")


def read_nodes(data: bytes | str, problems: Problems, variables: Variables) -> Node:
    """Return the root node of the one document in `data`, checked, with variables put in; raises ConfigError."""
    if len(data) > MAX_BYTES:
        problems.stop((1, 1), f"larger than {MAX_BYTES >> 20} MiB; a graph names its data, it does not hold them")
    text = _decoded(data, problems) if isinstance(data, bytes) else data.removeprefix("\ufeff")
    try:
        composer = _Composer(text, problems)
        root = composer.get_single_node()
    except ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        problems.stop((line, column), f"the character U+{ord(text[error.position]):04X} is not allowed in YAML")
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        problems.stop(where, _syntax_message(error, text))
    if root is None:
        problems.stop((1, 1), "the file is empty; a graph begins with 'version: 1' and has a list 'pipe:' of stages")
    _Check(composer, problems, variables).visit(root)
    return root


def _syntax_message(error: MarkedYAMLError, text: str) -> str:
    found = error.problem or "the YAML is not valid"
    if "'\\t'" in found:
        return "a tab cannot stand here; indent with spaces"
    mark = error.problem_mark
    if mark is not None and found.endswith("but got '{'") and text.split("\n")[mark.line][: mark.column].endswith("$"):
        return 'inside [..] and {..} a variable needs quotes: "${NAME}"'
    if found == "but found another document":
        return "a second document begins here; a file holds one graph"
    return found if error.context is None or error.context.startswith("expected") else f"{found} ({error.context})"


class _Check:
    """One visit to every node: tags, keys, variables, and the size with all aliases written out."""

    def __init__(self, composer: _Composer, problems: Problems, variables: Variables) -> None:
        self.composer, self.problems, self.variables = composer, problems, variables
        self.seen: dict[int, tuple[int, int] | None] = {}

    def visit(self, node: Node) -> tuple[int, int]:
        """Check `node` and what is in it; return how many values it holds and how deep it is."""
        if id(node) in self.seen:
            known = self.seen[id(node)]
            if known is None:
                self.problems.stop(node, "this value contains itself through an alias")
            return known
        self.seen[id(node)] = None
        inside: list[Node] = []
        if isinstance(node, ScalarNode):
            self._scalar(node)
        elif isinstance(node, SequenceNode):
            self._allow(node, _SEQUENCES)
            inside = node.value
        elif isinstance(node, MappingNode):
            self._allow(node, _MAPPINGS)
            self._keys(node)
            inside = [value for _, value in node.value]
        counts = [self.visit(each) for each in inside]
        size = 1 + sum(size for size, _ in counts)
        depth = 1 + max((depth for _, depth in counts), default=0)
        if size > MAX_VALUES or depth > MAX_DEPTH:
            much = f"{MAX_VALUES:,} values" if size > MAX_VALUES else f"{MAX_DEPTH} levels"
            self.problems.stop(node, f"more than {much} once the aliases in it are written out")
        self.seen[id(node)] = size, depth
        return size, depth

    def _allow(self, node: Node, tags: frozenset[str]) -> None:
        if node.tag not in tags:
            shown = node.tag.replace(_YAML, "!!")
            self.problems.add(node, f"the tag {brief(shown)} is not allowed here: a graph is plain data")

    def _scalar(self, node: ScalarNode) -> None:
        self._allow(node, _SCALARS)
        if "$" in node.value:
            value, wrong = self.variables.put_into(node.value)
            for offset, message in wrong:
                inside = node.start_mark.line == node.end_mark.line
                shift = offset + (node.style is not None) if inside else 0
                self.problems.add((node.start_mark.line + 1, node.start_mark.column + 1 + shift), message)
            if not wrong and value != node.value:
                tag = self.composer.resolve(ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
                tags = (tag, node.tag) if node.style is None else (node.tag, tag)
                node.value, node.tag = value, tags[0]
                # In [..] and {..} a variable needs quotes, so a number may be meant all the same.
                vars(node)["other"] = ScalarNode(tags[1], value, node.start_mark, node.end_mark, node.style)
        if node.tag in _SCALARS and _scalar_value(node) is BAD:
            self.problems.add(node, f"{brief(node.value)} is no {node.tag.removeprefix(_YAML)}")

    def _keys(self, node: MappingNode) -> None:
        seen: dict[Any, Node] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self.problems.add(key, "a key is a name, not a list or a mapping")
                continue
            if key.tag == f"{_YAML}merge":
                merged = value.value if isinstance(value, SequenceNode) else [value]
                if not all(isinstance(each, MappingNode) for each in merged):
                    self.problems.add(value, "'<<' takes a mapping or a list of mappings")
                continue
            self._allow(key, _SCALARS)
            first = seen.setdefault(key.value, key)
            if first is not key:
                line = first.start_mark.line + 1
                self.problems.add(
                    key, f"the key {brief(key.value)} stands here a second time; the first is on line {line}"
                )


def _scalar_value(node: ScalarNode) -> Any:
    kind, text = node.tag.removeprefix(_YAML), node.value
    try:
        if kind == "!range":
            return range(int(text))
        if kind == "null":
            return None if re.fullmatch(_PATTERNS[0][1], text) else BAD
        if kind == "bool":
            return {"true": True, "false": False}.get(text.lower(), BAD)
        if kind == "int":
            digits = text.replace("_", "").lower()
            return int(digits, 16 if digits[:2] == "0x" else 8 if digits[:2] == "0o" else 10)
        if kind == "float":
            return float(re.sub(r"\.(?=inf|nan)", "", text.replace("_", "").lower()))
    except ValueError:
        return BAD
    return text


def entries(node: MappingNode) -> list[tuple[ScalarNode, Node]]:
    """Return the (key, value) nodes of a mapping with `<<` merged in: what stands in it wins, then the first merged."""
    own: list[tuple[ScalarNode, Node]] = []
    merged: list[tuple[ScalarNode, Node]] = []
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            continue
        if key.tag == f"{_YAML}merge":
            sources = value.value if isinstance(value, SequenceNode) else [value]
            for source in sources:
                merged += entries(source) if isinstance(source, MappingNode) else []
        else:
            own.append((key, value))
    found: dict[Any, tuple[ScalarNode, Node]] = {}
    for key, value in (*own, *merged):
        found.setdefault(key.value, (key, value))
    return list(found.values())


def plain(node: Node) -> Any:
    """Return the data that a checked node stands for; BAD where `!range` has no sensible arguments."""
    if isinstance(node, ScalarNode):
        return _scalar_value(node)
    if isinstance(node, MappingNode):
        return {_scalar_value(key): plain(value) for key, value in entries(node)}
    values = [plain(each) for each in node.value]
    if node.tag == "!tuple":
        return tuple(values)
    if node.tag == "!range":
        try:
            return range(*values)
        except (TypeError, ValueError):
            return BAD
    return values
