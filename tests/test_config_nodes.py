"""Every error in a YAML graph has its place; hostile files do no harm."""

from __future__ import annotations

import pickle
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yaml_graphs import HEAD, errors_of, load

from pipes.config import read_graph
from pipes.errors import ConfigError

WRONG = {
    "nothing but a list": ("- a\n", [(1, 1, "a graph is a mapping")]),
    "nothing needed": ("x-a: 1\n", [(1, 1, "lacks 'version: 1' and 'pipe:'")]),
    "unknown top key": ("version: 1\npip: []\npipe: [IterableWrapper: [1]]", [(2, 1, "did you mean 'pipe'?")]),
    "version": ("version: 2\npipe: [IterableWrapper: [1]]", [(1, 10, "reads version 1")]),
    "version of another type": ("version: '1'\npipe: [IterableWrapper: [1]]", [(1, 10, "reads version 1")]),
    "no stages": ("version: 1\npipe: []\n", [(2, 7, "list of stages")]),
    "unknown stage": (HEAD + "  - shufle: 3\n", [(4, 5, "no stage 'shufle'; did you mean 'shuffle'?")]),
    "unknown first": ("version: 1\npipe:\n  - IterableWraper: []\n", [(3, 5, "did you mean 'IterableWrapper'?")]),
    "unknown parameter": (
        HEAD + "  - batch: {batch_sise: 3}\n",
        [(4, 5, "needs"), (4, 13, "did you mean 'batch_size'?")],
    ),
    "parameter list": (HEAD + "  - shuffle: {zzz: 3}\n", [(4, 15, "it takes buffer_size, unbatch_level")]),
    "no parameters": (HEAD + "  - SequenceWrapper\n", [(4, 5, "does not follow an iterable pipe")]),
    "missing": (HEAD + "  - batch\n", [(4, 5, "batch needs 'batch_size' (int)")]),
    "str for int": (HEAD + "  - shuffle: ten\n", [(4, 14, "shuffle: buffer_size should be int, not str")]),
    "bool for int": (HEAD + "  - shuffle: true\n", [(4, 14, "should be int, not bool")]),
    "list for int": (HEAD + "  - batch: [1]\n", [(4, 12, "should be int, not list")]),
    "int for bool": (HEAD + "  - batch: {batch_size: 2, drop_last: 1}\n", [(4, 39, "true or false, not int")]),
    "str for a list": ("version: 1\npipe: [IterableWrapper: abc]", [(2, 25, "should be a list, not str")]),
    "value refused": (HEAD + "  - shuffle: 0\n", [(4, 5, "shuffle: buffer_size must be at least 1, not 0")]),
    "given twice": (HEAD + "  - shuffle: {datapipe: 1}\n", [(4, 15, "comes from above; leave it out")]),
    "function refused": (HEAD + "  - map: os:system\n", [(4, 10, "'os:system' is not allowed")]),
    "dotted function": (HEAD + "  - map: os.system\n", [(4, 10, "functions={'system': system}")]),
    "eval": (HEAD + "  - map: eval\n", [(4, 10, "'eval' is not allowed")]),
    "near function": (HEAD + "  - map: doubel\n", [(4, 10, "did you mean 'double'?")]),
    "no function": (HEAD + "  - map: 3\n", [(4, 10, "map: fn should be a function, not 3")]),
    "function setting": (HEAD + "  - map: {fn: {Decoder: {image: pil}}}\n", [(4, 26, "did you mean 'images'?")]),
    "setting refused": (HEAD + "  - map: {fn: {Decoder: {images: gif}}}\n", [(4, 34, "'numpy' or 'pil' or 'torch'")]),
    "no literal": (HEAD + "  - map: {fn: double, rng: maybe}\n", [(4, 28, "true or false")]),
    "parameters not indented": (HEAD + "  - map:\n    fn: double\n", [(5, 5, "indent this further")]),
    "two stages in one": (HEAD + "  - batch: 2\n    shuffle: 3\n", [(5, 5, "begin a stage with '- shuffle'")]),
    "stage is a list": (HEAD + "  - [batch, 2]\n", [(4, 5, "a stage is a name")]),
    "stage is a number": (HEAD + "  - 3\n", [(4, 5, "a stage is a name")]),
    "stage is empty": (HEAD + "  - {}\n", [(4, 5, "no name")]),
    "no such pipe": (HEAD + "  - zip: $othr\n", [(4, 10, "no pipe 'othr'")]),
    "in the middle": (HEAD + "  - $a\n", [(4, 5, "stands in the middle")]),
    "fork in the chain": (HEAD + "  - fork: 2\n", [(4, 5, "gives several pipes")]),
    "map pipe at the end": ("version: 1\npipe: [SequenceWrapper: [1]]", [(2, 1, "to_iter_datapipe")]),
    "iter stage on a map pipe": (
        "version: 1\npipe: [SequenceWrapper: [1], header: 2]",
        [(2, 30, "does not follow a map pipe; put 'to_iter_datapipe' before it")],
    ),
    "pipes is a list": ("version: 1\npipes: []\npipe: [IterableWrapper: []]", [(2, 8, "is a mapping of names")]),
    "no name": ("version: 1\npipes: {5a: [IterableWrapper: []]}\npipe: [IterableWrapper: []]", [(2, 9, "is no name")]),
    "name taken": (
        "version: 1\npipes:\n  a: [IterableWrapper: []]\n  'a,b': [IterableWrapper: [], fork: 2]\npipe: [$a]",
        [(4, 3, "'a' is already taken")],
    ),
    "later": (
        "version: 1\npipes:\n  a: [$b]\n  b: [IterableWrapper: []]\npipe: [$a]",
        [(3, 7, "it is defined further down: move it up")],
    ),
    "itself": ("version: 1\npipes:\n  a: [$a]\npipe: [$a]", [(3, 7, "further down")]),
    "twice": (
        "version: 1\npipes:\n  a: [IterableWrapper: []]\npipe:\n  - $a\n  - zip: $a\n",
        [(6, 10, "read a second time; give each reader its own with 'fork'")],
    ),
    "unread": (
        "version: 1\npipes:\n  a: [IterableWrapper: []]\npipe: [IterableWrapper: []]",
        [(3, 3, "nothing reads 'a'")],
    ),
    "names for one pipe": (
        "version: 1\npipes:\n  a, b: [IterableWrapper: [], batch: 2]\npipe: [zip: [$a, $b]]",
        [(3, 31, "gives 1, but 'a, b' are 2 names")],
    ),
    "duplicate key": (
        HEAD + "  - shuffle: {buffer_size: 3,\n     buffer_size: 4}\n",
        [(5, 6, "the first is on line 4")],
    ),
    "duplicate top key": (HEAD + "pipe: [IterableWrapper: []]\n", [(4, 1, "the first is on line 2")]),
    "variable": (HEAD + "  - header: ${PIPES_TEST_NONE}\n", [(4, 13, "${PIPES_TEST_NONE} has no value")]),
    "variable inside": ("version: 1\npipe: [IterableWrapper: ['ab${PIPES_TEST_NONE}']]", [(2, 29, "has no value")]),
    "variable cut": (HEAD + "  - header: ${OH\n", [(4, 13, "a literal '${' is '$${'")]),
    "range": ("version: 1\npipe: [IterableWrapper: !range [0, 1, 0]]", [(2, 25, "!range takes one to three ints")]),
    "python tag": (HEAD + "  - map: !!python/name:os.system\n", [(4, 10, "'!!python/name:os.system' is not allowed")]),
    "python object": (
        "version: 1\npipe: [IterableWrapper: !!python/object/apply:os.system [id]]",
        [(2, 25, "is not allowed here: a graph is plain data")],
    ),
    "own tag": (HEAD + "  - header: !mine 3\n", [(4, 13, "the tag '!mine'")]),
    "wrong int": (HEAD + "  - header: !!int three\n", [(4, 13, "'three' is no int")]),
    "list key": ("version: 1\n? [a]\n: 1\npipe: [IterableWrapper: []]", [(2, 3, "a key is a name")]),
    "merge": (HEAD + "  - header: {<<: 3}\n", [(4, 18, "'<<' takes a mapping")]),
    "tab": ("version: 1\npipe:\n\t- shuffle\n", [(3, 1, "indent with spaces")]),
    "variable without quotes": (HEAD + "  - batch: {batch_size: ${N}}\n", [(4, 26, 'needs quotes: "${NAME}"')]),
    "syntax": ("version: 1\npipe: [a\n", [(3, 1, "expected ',' or ']'")]),
    "colon": ("version: 1\npipe: a: b\n", [(2, 8, "mapping values are not allowed here")]),
    "unknown alias": ("version: 1\npipe: *oh\n", [(2, 7, "found undefined alias")]),
    "two documents": (HEAD + "---\nversion: 1\n", [(4, 1, "a file holds one graph")]),
    "control character": ("version: 1\npipe: [\x01]\n", [(2, 8, "U+0001 is not allowed")]),
    "contains itself": ("version: 1\npipe: &a\n  - *a\n", [(2, 7, "contains itself")]),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_error_has_its_place(case: str) -> None:
    text, expected = WRONG[case]
    found = errors_of(text)
    assert [(line, column) for line, column, _ in found] == [(line, column) for line, column, _ in expected]
    for (_, _, message), (_, _, part) in zip(found, expected, strict=True):
        assert part in message


def test_all_errors_come_at_once_in_the_order_of_lines() -> None:
    found = errors_of(
        "version: 3\npipes:\n  a: [Iterable: []]\npipe:\n  - $a\n  - shuffle: x\n  - map: os:system\n  - batc: 1\n"
    )
    assert [(line, column) for line, column, _ in found] == [(1, 10), (3, 7), (6, 14), (7, 10), (8, 5)]


def test_an_error_survives_pickling() -> None:
    with pytest.raises(ConfigError) as caught:
        load("version: 3\npipe: [shufle]\n")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert [(each.line, each.column) for each in again.errors] == [(1, 10), (2, 8)]


@pytest.mark.parametrize(
    ("data", "place", "part"),
    [
        (b"", (1, 1), "the file is empty"),
        (b"# only a comment\n", (1, 1), "the file is empty"),
        (b"version: 1\npipe: [\xc3\xa9\xff]\n", (2, 9), "byte 0xff is not UTF-8"),
        ("version: 1".encode("utf-16"), (1, 1), "is not UTF-8"),
        (b"x" * (1 << 20) + b"x", (1, 1), "larger than 1 MiB"),
        (b"[" * 100, (1, 41), "more than 40 levels"),
        (b"a: " + b"{a: " * 100, (1, 157), "more than 40 levels"),
    ],
)
def test_hostile_bytes(data: bytes, place: tuple[int, int], part: str) -> None:
    found = errors_of(data)
    assert [(line, column) for line, column, _ in found] == [place]
    assert part in found[0][2]


def test_a_byte_order_mark_is_no_error() -> None:
    assert list(read_graph(b"\xef\xbb\xbf" + HEAD.encode(), "g.yaml")) == [[1, 2, 3, 4]]


def test_a_billion_laughs_are_cut_short() -> None:
    lines = ["version: 1", "x-0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    for n in range(1, 9):
        lines.append(f"x-{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]")
    found = errors_of("\n".join([*lines, "pipe: [IterableWrapper: *a8]"]))
    assert found == [(6, 6, "more than 100,000 values once the aliases in it are written out")]


def test_a_long_chain_of_aliases_is_refused() -> None:
    lines = ["version: 1", "x-0: &a0 [1]", *(f"x-{n}: &a{n} [*a{n - 1}]" for n in range(1, 2000))]
    assert "more than 40 levels" in errors_of("\n".join([*lines, "pipe: [IterableWrapper: *a1999]"]))[0][2]


@given(st.text(max_size=200) | st.text(alphabet="[]{}:,&*!|>-$ab1\n '\"", max_size=120))
def test_any_text_gives_a_pipe_or_a_config_error(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for data in (text, f"version: 1\npipe:\n  - IterableWrapper: [1]\n  - {text}"):
            places = []
            try:
                read_graph(data, "g.yaml")
            except ConfigError as error:
                places = [(each.line, each.column) for each in error.errors]
            assert all(line >= 1 and column >= 1 for line, column in places)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_config_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        read_graph(data, "g.yaml")
