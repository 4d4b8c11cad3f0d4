"""Graphs in YAML: what is accepted, and what becomes of functions and variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yaml_graphs import HEAD, errors_of, load

import pipes.config_nodes
from pipes.config import dump_graph, load_functions, load_graph, read_graph
from pipes.config_functions import Functions
from pipes.config_variables import Variables
from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.errors import ConfigError


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("[IterableWrapper: [3, 4]]", [3, 4]),
        ("[IterableWrapper: {iterable: [3], deepcopy: false}]", [3]),
        ("[IterableWrapper: {source: [3]}]", [3]),
        ("[IterableWrapper: !range 3]", [0, 1, 2]),
        ("[IterableWrapper: !range [4, 0, -2]]", [4, 2]),
        ("[IterableWrapper: [!tuple [1, [2]]]]", [(1, [2])]),
        ("[IterableWrapper: [1, 2], map: double]", [2, 4]),
        ("[IterableWrapper: [1, 2], Mapper: {fn: double}]", [2, 4]),
        ("[IterableWrapper: [1, 2], map: {fn: {add: {amount: 5}}}]", [6, 7]),
        ("[IterableWrapper: [[1, 2]], map: {fn: {itemgetter: 1}}]", [2]),
        ("[IterableWrapper: [[1, 2]], map: {fn: {itemgetter: [1, 0]}}]", [(2, 1)]),
        ("[IterableWrapper: [[1, 2]], map: {fn: add, input_col: [0, 1], output_col: 0}]", [[3, 2]]),
        ("[IterableWrapper: [1, 2], map: 'builtins:str']", ["1", "2"]),
        ("[IterableWrapper: [1, 2, 3], filter: is_odd, {batch: {batch_size: 2, wrapper_class: tuple}}]", [(1, 3)]),
        ("[IterableWrapper: [1, 2, 3], header: {limit: null}]", [1, 2, 3]),
        ("[SequenceWrapper: [5, 6], map: double, to_iter_datapipe: ]", [10, 12]),
        ("[zip: {datapipes: [[1, 2], [3, 4]]}]", [(1, 3), (2, 4)]),
        ("[concat: [[1], [2, 3]]]", [1, 2, 3]),
        ("[IterableWrapper: [no, 12:30, 1e2, 0x10, 1_000, 010, .5]]", ["no", "12:30", 100.0, 16, 1000, 10, 0.5]),
        ("[IterableWrapper: [2001-01-01, ~, 'null', TRUE]]", ["2001-01-01", None, "null", True]),
    ],
)
def test_what_a_list_of_stages_gives(items: str, expected: list[Any]) -> None:
    assert list(load(f"version: 1\npipe: {items}\n")) == expected


def test_branches_are_joined_and_split() -> None:
    pipe = load("""
version: 1
x-mine: &settings {drop_last: false}
pipes:
  numbers:
    - IterableWrapper: !range 6
  even, odd:
    - $numbers
    - demux: parity
  words: [{IterableWrapper: [a, b, c]}]
  left, right:
    - $words
    - fork: {buffer_size: 7}
pipe:
  - $even
  - zip: [$odd, $left, $right]
  - batch: {<<: *settings, batch_size: 2}
""")
    assert list(pipe) == [[(0, 1, "a", "a"), (2, 3, "b", "b")], [(4, 5, "c", "c")]]


def test_a_fork_may_state_its_number() -> None:
    text = "version: 1\npipes:\n  a, b:\n    - IterableWrapper: [1]\n    - fork: {}\npipe:\n  - zip: [$a, $b]\n"
    assert list(load(text.replace("{}", "2"))) == [(1, 1)]
    assert list(load(text.replace("{}", "{num_instances: 2, copy: deep}"))) == [(1, 1)]
    assert errors_of(text.replace("{}", "3")) == [(5, 13, "fork should give 2 pipes, for the names a, b")]


def test_a_stage_knows_its_line() -> None:
    with pytest.raises(TypeError) as caught:
        list(read_graph(HEAD + "  - flatmap\n  - map: len\n", "g.yaml"))
    assert any("built at g.yaml:5" in note for note in caught.value.__notes__)


def test_a_users_own_stage_may_be_named() -> None:
    @functional_datapipe("config_test_repeat")
    class ConfigTestRepeat(IterDataPipe[Any]):
        stateless = True

        def __init__(self, source: IterDataPipe[Any], times: int = 2) -> None:
            self.source = source
            self.times = times

        def __iter__(self) -> Any:
            for element in self.source:
                yield from [element] * self.times

    try:
        pipe = load("version: 1\npipe:\n  - IterableWrapper: [1]\n  - config_test_repeat: 3\n")
        assert list(pipe) == [1, 1, 1]
        assert "config_test_repeat: 3" in dump_graph(pipe)
        by_class = load("version: 1\npipe: [IterableWrapper: [1], ConfigTestRepeat: {times: 1}]")
        assert list(by_class) == [1]
    finally:
        del IterDataPipe.functions["config_test_repeat"]
        del IterDataPipe.config_test_repeat  # type: ignore[attr-defined]


def test_variables_come_from_the_caller_then_the_environment_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPES_TEST_A", "environment")
    monkeypatch.delenv("PIPES_TEST_B", raising=False)
    items = "['${PIPES_TEST_A}', '${PIPES_TEST_B:-default}', '${PIPES_TEST_B:-}', '$${PIPES_TEST_B}']"
    text = f"version: 1\npipe:\n  - IterableWrapper: {items}\n"
    assert list(load_graph(text)) == ["environment", "default", "", "${PIPES_TEST_B}"]
    assert list(load_graph(text, variables={"PIPES_TEST_A": 1})) == ["1", "default", "", "${PIPES_TEST_B}"]


def test_a_variable_outside_quotes_has_the_type_of_its_value() -> None:
    text = "version: 1\npipe:\n  - IterableWrapper:\n      - ${A}\n      - ${A}0\n      - '${A}'\n      - ${NONE:-}\n"
    assert list(load_graph(text, variables={"A": 4})) == [4, 40, "4", None]
    assert list(load_graph(text, variables={"A": "[x]"})) == ["[x]", "[x]0", "[x]", None]


def test_a_variable_has_the_type_that_the_parameter_wants() -> None:
    text = HEAD + "  - batch: {batch_size: '${N}'}\n"
    assert list(load_graph(text, variables={"N": 2})) == [[[1, 2, 3, 4]]]
    assert "should be int, not str" in errors_of(text, variables={"N": "two"})[0][2]


def test_secrets_of_the_environment_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    text = "version: 1\npipe: [IterableWrapper: ['${AWS_SECRET_ACCESS_KEY}']]"
    ((line, column, message),) = errors_of(text)
    assert (line, column) == (2, 27)
    assert "looks like a secret" in message
    assert "hush" not in message
    assert list(load_graph(text + "\n", variables={"AWS_SECRET_ACCESS_KEY": "mine"})) == ["mine"]


@given(st.text(max_size=30))
def test_text_without_a_dollar_is_left_as_it_is(text: str) -> None:
    text = text.replace("$", "")
    assert Variables({}).put_into(text) == (text, [])
    assert Variables({"X": text}).put_into("a${X}b") == (f"a{text}b", [])


def test_functions_of_a_file_may_be_named(tmp_path: Path) -> None:
    file = tmp_path / "config_test_augment.py"
    file.write_text("from os import system\ndef triple(x):\n    return 3 * x\ndef _hidden(x):\n    return x\n")
    found = load_functions([str(file)])
    assert list(found) == ["triple"]
    text = HEAD + "  - flatmap\n  - map: {}\n"
    for name in ("triple", "'config_test_augment:triple'"):
        assert list(load_graph(text.replace("{}", name), functions=found)) == [3, 6, 9, 12]
    with pytest.raises(ImportError, match="there is no file"):
        load_functions([str(tmp_path / "other.py")])


def test_what_is_not_callable_is_no_function() -> None:
    with pytest.raises(TypeError, match="which cannot be called"):
        Functions({"a": 3})  # type: ignore[dict-item]


def test_a_path_a_name_and_text_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(HEAD)
    for source in (file, str(file), HEAD):
        assert list(load_graph(source)) == [[1, 2, 3, 4]]
    with pytest.raises(FileNotFoundError):
        load_graph(tmp_path / "none.yaml")


def test_limits_hold_before_the_file_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "big.yaml"
    with file.open("wb") as stream:
        stream.truncate(1 << 30)
    read: list[int] = []
    original = pipes.config_nodes.read_nodes

    def counted(data: Any, *rest: Any) -> Any:
        read.append(len(data))
        return original(data, *rest)

    monkeypatch.setattr("pipes.config.read_nodes", counted)
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_graph(file)
    assert read == [(1 << 20) + 1]


def test_the_documentation_is_true() -> None:
    text = (Path(__file__).parents[1] / "docs" / "yaml.md").read_text()
    blocks = re.findall(r"```(yaml|python)\n(.*?)```", text, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["yaml", "python", "yaml", "yaml", "python"]
    for kind, block in blocks:
        if kind == "python":
            exec(block, {})
        else:
            assert isinstance(load_graph(block), IterDataPipe)
