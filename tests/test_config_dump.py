"""A written graph reads back the same; the JSON Schema agrees with what loads."""

from __future__ import annotations

import functools
import json
import string
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from yaml_graphs import FUNCTIONS, HEAD, add, double, is_odd

from pipes.config import dump_graph, json_schema, load_graph
from pipes.datapipe import IterDataPipe, MapDataPipe, functional_datapipe
from pipes.errors import ConfigError
from pipes.formats.decode import Decoder
from pipes.inspector.report import describe_graph
from pipes.iter import IterableWrapper, Mapper, SampleMultiplexer, Shuffler
from pipes.map import SequenceWrapper

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(string.printable.replace("$", ""), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(string.ascii_letters + "<>:# 01", max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.lists(PLAIN, max_size=4))
def test_plain_data_is_written_and_read_back(data: list[Any]) -> None:
    pipe = IterableWrapper(data)
    text = dump_graph(pipe)
    again = load_graph(text).iterable  # type: ignore[attr-defined]
    assert again == data
    assert repr(again) == repr(data)


def test_graphs_are_written_and_read_back() -> None:
    source = IterableWrapper(range(20)).shuffle(5).sharding_filter()
    even, odd = source.map(double).filter(is_odd, input_col=None).flatmap(str).demux(2, len, drop_none=True)
    a, b = (
        IterableWrapper([{"x": 1}]).map(functools.partial(add, amount=3), input_col="x").cycle(3).fork(2, copy="deep")
    )
    graphs: list[IterDataPipe[Any]] = [
        IterableWrapper([(1, [2, None]), "1e3", "no", "${A}", 0.5], deepcopy=False),
        SequenceWrapper([1, 2]).map(double).to_iter_datapipe([1, 0]),
        IterableWrapper(range(1, 9, 2)).enumerate(3).header(2).skip(1).batch(2, wrapper_class=tuple).unbatch(-1),
        IterableWrapper(["a", "b"]).map(Decoder(images="pil", mode=None)).collate(),
        source.map(double, rng=False).batch(3, drop_last=True),
        IterableWrapper([1, 2]).shuffle(3, unbatch_level=1),
        even.zip(odd, IterableWrapper(["a", "b"]).mux(IterableWrapper([1]))),
        a.concat(b).then(Mapper, str),
        IterableWrapper(IterableWrapper([1]).map(double)).batch(2),
    ]
    for pipe in graphs:
        text = dump_graph(pipe, functions=FUNCTIONS)
        again = load_graph(text, functions=FUNCTIONS)
        assert repr(again).replace("<locals>", "") == repr(pipe).replace("<locals>", "")
        assert dump_graph(again, functions=FUNCTIONS) == text
        assert yaml.safe_load(text.replace("!tuple ", "").replace("!range ", ""))["version"] == 1


def test_a_function_is_named_by_module_when_the_caller_gives_no_name() -> None:
    text = dump_graph(IterableWrapper([1]).map(str).map(functools.partial(json.dumps, indent=2)))
    assert "map: str" in text
    assert "{'json:dumps': {indent: 2}}" in text
    with pytest.raises(ConfigError, match="'json:dumps' is not allowed"):
        load_graph(text)
    assert list(load_graph(text, functions={"to_text": json.dumps})) == ['"1"']


class Keeps(IterDataPipe[Any]):
    def __init__(self, source: IterDataPipe[Any], secret_token: Any, hidden: int = 0) -> None:
        self.source, self.secret_token = source, secret_token

    def __iter__(self) -> Any:
        return iter(self.source)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: IterableWrapper([1]).map(lambda x: x), "'fn' is .*<lambda>, which no import finds"),
        (lambda: IterableWrapper([object()]), "no plain data"),
        (lambda: IterableWrapper(iter([1])), "no plain data"),
        (lambda: IterableWrapper([{1.5: 1}]), "no plain data"),
        (lambda: IterableWrapper(["$name"]), "read as a named pipe"),
        (lambda: IterableWrapper([1]).shuffle().set_seed(1), r"set_seed\(\)"),
        (lambda: IterableWrapper([1]).shuffle().set_shuffle(False), r"set_shuffle\(\)"),
        (lambda: Keeps(IterableWrapper([1]), None), "Keeps cannot be written as YAML: has no name"),
    ],
)
def test_what_yaml_cannot_say_is_refused(make: Any, part: str) -> None:
    pipe = make()
    with pytest.raises(ConfigError, match=part) as caught:
        dump_graph(pipe)
    assert caught.value.file == __file__


def test_credentials_and_lost_parameters_are_not_written() -> None:
    functional_datapipe("config_test_keeps")(Keeps)
    try:
        with pytest.raises(ConfigError, match="does not keep its parameter 'hidden'"):
            dump_graph(Keeps(IterableWrapper([1]), None))
        with pytest.raises(ConfigError, match="secret_token is a credential") as caught:
            dump_graph(Keeps(IterableWrapper([1]), "hush"))
        assert "hush" not in str(caught.value)
    finally:
        del IterDataPipe.functions["config_test_keeps"]
        del IterDataPipe.config_test_keeps  # type: ignore[attr-defined]


def test_the_schema_accepts_what_loads_and_refuses_what_does_not() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    example = Path(__file__).parents[1] / "examples" / "graph.yaml"
    good = [
        example.read_text(),
        HEAD + "  - shuffle\n  - batch: {batch_size: 3}\n  - map: {fn: {add: {amount: 1}}}\n  - header: ${N}\n",
        "version: 1\npipes: {'a, b': [IterableWrapper: [], fork: ]}\npipe: [$a, zip: [$b]]",
    ]
    for text in good:
        validator.validate(yaml.safe_load(text))
    for text in ("shufle", "batch: {batch_sise: 1}", "batch: {}", "batch: {batch_size: x}", "{batch: 1, shuffle: 2}"):
        assert not validator.is_valid(yaml.safe_load(HEAD + f"  - {text}\n")), text
    assert json.loads(json.dumps(schema)) == schema


def test_the_schema_names_every_stage() -> None:
    names = set(json_schema()["$defs"])
    assert {"IterableWrapper", "SequenceWrapper", "Shuffler", *IterDataPipe.functions, *MapDataPipe.functions} <= names
    assert Shuffler.__doc__ is not None
    assert json_schema()["$defs"]["shuffle"]["description"] == Shuffler.__doc__.partition("\n\n")[0].replace(
        "\n    ", " "
    )


def thirds(x: int) -> int:
    return 10 * x if x % 3 != 1 else 1 // 0


def nothing(error: Exception, x: Any) -> None:
    """A handler that only logs."""


def pair_of_large(x: int) -> list[int]:
    return [x, x] if x > 20 else [1 // 0]


def test_error_policies() -> None:
    text = """version: 1
pipe:
  - IterableWrapper: !range 8
  - map: {fn: thirds, on_error: skip, max_errors: 5}
  - filter: {filter_fn: bool, on_error: log, max_errors: 0.5}
  - flatmap: {fn: pair, on_error: skip, max_errors: null}
"""
    functions = {"thirds": thirds, "log": nothing, "pair": pair_of_large}
    pipe = load_graph(text, functions=functions)
    assert list(pipe) == [30, 30, 50, 50, 60, 60]
    assert dump_graph(pipe, functions=functions).replace("'8'", "8") == text
    report = describe_graph(pipe)
    assert report.stages[1].parameters["on_error"] == "'skip'"
    assert report.stages[1].parameters["max_errors"] == "5"
    assert "it may skip elements" in report.stages[1].length_note
    for wrong, why in (("on_error: skip", "no effect"), ("on_error: 3", "'raise' or 'skip' or a function")):
        changed = text.replace("on_error: skip, max_errors: 5", wrong if "3" in wrong else "max_errors: 5")
        with pytest.raises(ConfigError, match=why):
            load_graph(changed, functions=functions)


def test_pipes_in_a_dict_have_no_place_in_yaml() -> None:
    pipe = SampleMultiplexer({IterableWrapper([1]): 2, IterableWrapper([3]): 1})
    with pytest.raises(ConfigError, match="does not keep its parameter 'pipes_to_weights_dict'"):
        dump_graph(pipe)
