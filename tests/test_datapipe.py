from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data

from pipes import DataChunk, IterDataPipe, MapDataPipe, functional_datapipe
from pipes.datapipe import parameters_of
from pipes.errors import GraphError
from pipes.iter import IterableWrapper, Mapper
from pipes.map import SequenceWrapper
from pipes.tree import setting


def numbers(size: int) -> IterableWrapper[int]:
    return IterableWrapper(range(size))


@pytest.fixture(autouse=True)
def _no_new_names() -> Iterator[None]:
    """Take back the chained names that a test registered."""
    families: list[Any] = [IterDataPipe, MapDataPipe]
    before = [dict(family.functions) for family in families]
    yield
    for family, known in zip(families, before, strict=True):
        for name in set(family.functions) - set(known):
            delattr(family, name)
        family.functions.clear()
        family.functions.update(known)


class Doubled(IterDataPipe[int]):
    def __init__(self, source: Any, *, by: int = 2) -> None:
        self.source, self.by = source, by

    def __iter__(self) -> Iterator[int]:
        return (self.by * x for x in self.source)


# Chained names.


def test_a_registered_name_chains_on_every_pipe_of_its_family() -> None:
    assert functional_datapipe("test_doubled")(Doubled) is Doubled
    pipe: Any = numbers(3)
    assert list(pipe.test_doubled()) == [0, 2, 4]
    assert list(pipe.map(abs).test_doubled(by=3)) == [0, 3, 6]
    assert "test_doubled" in dir(pipe)
    assert "Returns `Doubled(self, ...)`" in str(pipe.test_doubled.__doc__)
    with pytest.raises(AttributeError):
        _ = SequenceWrapper([1]).test_doubled  # type: ignore[attr-defined]


def test_a_map_class_registers_with_the_other_family() -> None:
    @functional_datapipe("test_negated")
    class Negated(MapDataPipe[int]):
        def __init__(self, source: Any) -> None:
            self.source = source

        def __getitem__(self, index: Any) -> int:
            return -self.source[index]  # type: ignore[no-any-return]

    pipe: Any = SequenceWrapper([1, 2])
    assert pipe.test_negated()[1] == -2
    assert not hasattr(numbers(1), "test_negated")


@pytest.mark.parametrize("name", ["shuffle", "map", "list_files"])
def test_a_taken_name_is_refused(name: str) -> None:
    with pytest.raises(GraphError, match=rf"'{name}' is already taken by \w+; choose another.*\.then\(Doubled"):
        functional_datapipe(name)(Doubled)


@pytest.mark.parametrize("name", ["then", "register_function", "two words", "1st", ""])
def test_a_name_that_cannot_be_a_method_is_refused(name: str) -> None:
    with pytest.raises(GraphError, match="cannot be a chained name"):
        functional_datapipe(name)(Doubled)


def test_only_pipes_are_decorated() -> None:
    with pytest.raises(TypeError, match="decorates IterDataPipe and MapDataPipe classes, not"):
        functional_datapipe("test_wrong")(dict)
    with pytest.raises(ValueError, match="data-frame tracing does not exist"):
        functional_datapipe("test_wrong", enable_df_api_tracing=True)


def test_functions_register_too() -> None:
    IterDataPipe.register_function("test_every_other", lambda source, first=0: source.skip(first).batch(2))
    pipe: Any = numbers(5)
    assert list(pipe.test_every_other(1)) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("shufle", r"did you mean '\.shuffle'\?"),
        ("bacth", r"did you mean '\.batch'\?"),
        ("sharding_filer", r"did you mean '\.sharding_filter'\?"),
        ("qqqqqq", r"`dir\(pipe\)` lists the chained names"),
        ("prefetch", "leave it out: the workers of a DataLoader2 work ahead"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=rf"'IterableWrapper' object has no attribute '{name}'; {hint}"):
        getattr(numbers(3), name)


def test_private_names_are_plainly_unknown() -> None:
    with pytest.raises(AttributeError, match=r"no attribute '_shufle'$"):
        getattr(numbers(3), "_shufle")  # noqa: B009
    assert not hasattr(numbers(3), "__array__")


def test_names_are_there_when_only_the_base_was_imported() -> None:
    code = (
        "from pipes import IterDataPipe\n"
        "class Own(IterDataPipe):\n"
        "    def __iter__(self): yield from 'ab'\n"
        "print(list(Own().map(str.upper).batch(2)))\n"
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, check=True
    )
    assert done.stdout == "[['A', 'B']]\n"


def test_then_applies_any_class_or_function() -> None:
    assert list(numbers(3).then(Doubled, by=5)) == [0, 5, 10]
    assert list(numbers(3).then(lambda source, n: source.batch(n), 2)) == [[0, 1], [2]]
    assert SequenceWrapper([3]).then(lambda source: source[0]) == 3


def test_cross_family_form() -> None:
    assert list(SequenceWrapper([1, 2]).to_iter_datapipe()) == [1, 2]
    assert not hasattr(numbers(1), "to_iter_datapipe")


# What a pipe is.


def test_pipes_are_torchs_datasets_but_not_torchs_pipes() -> None:
    assert isinstance(numbers(1), torch.utils.data.IterableDataset)
    assert isinstance(SequenceWrapper([1]), torch.utils.data.Dataset)
    assert not isinstance(SequenceWrapper([1]), torch.utils.data.IterableDataset)
    assert bool(numbers(0)) is True
    assert IterDataPipe.getstate_hook is None


def test_a_map_pipe_without_getitem_says_so() -> None:
    with pytest.raises(NotImplementedError, match="MapDataPipe has no __getitem__"):
        MapDataPipe[int]()[0]


def test_length_of_a_class_without_one_names_class_and_line() -> None:
    with pytest.raises(TypeError, match=r"Doubled \(built at .*test_datapipe\.py:\d+\) has no length"):
        len(Doubled(numbers(3)))
    with pytest.raises(TypeError, match="Doubled"):
        len(Doubled(numbers(3)).batch(2))


def test_a_users_length_counts() -> None:
    class Sized(Doubled):
        def __len__(self) -> int:
            return 7

    assert len(Sized(numbers(3)).batch(2)) == 4


def test_where_a_pipe_was_built_is_the_users_line() -> None:
    line = sys._getframe().f_lineno + 1
    pipe = numbers(3).map(str).shuffle()
    assert pipe._built == (__file__, line)


def test_where_a_pipe_was_built_survives_pickling() -> None:
    import pickle

    pipe = numbers(3).map(str)
    assert pickle.loads(pickle.dumps(pipe))._built == pipe._built


def test_settings_are_the_constructors_parameters() -> None:
    pipe = numbers(3).map(str, input_col=None)
    assert parameters_of(pipe) == {
        "datapipe": pipe.datapipe,
        "fn": str,
        "input_col": None,
        "output_col": None,
        "rng": False,
        "on_error": "raise",
        "max_errors": 0.1,
    }
    assert parameters_of(Doubled(numbers(1), by=4))["by"] == 4


def test_data_chunks_are_lists() -> None:
    chunk = DataChunk([3, 4])
    assert (chunk, chunk.items, str(chunk)) == ([3, 4], [3, 4], "[3, 4]")


# How a graph prints.


class Secretive(IterDataPipe[int]):
    def __init__(self, source: Any, secret_key: str, url: str = "") -> None:
        self.source, self.secret_key, self.url = source, secret_key, url


def test_a_chain_is_one_line_a_stage() -> None:
    pipe = numbers(9).shuffle().map(np.sqrt).map(functools.partial(round, ndigits=2)).batch(2, drop_last=True)
    assert repr(pipe).split("\n") == [
        "0:IterableWrapper(range(0, 9))",
        "1:Shuffler()",
        "2:Mapper(sqrt)",
        "3:Mapper(partial(round, ndigits=2))",
        "4:Batcher(2, drop_last=True)",
    ]
    assert str(pipe) == repr(pipe)


def test_branches_have_bars_that_end_where_they_meet() -> None:
    left, right = numbers(9).shuffle(buffer_size=3).fork(2)
    joined = left.zip(right.map(len), numbers(2).concat(numbers(3), numbers(4)).header(5)).collate(list)
    assert repr(joined) == "\n".join(
        [
            "┌ 0:IterableWrapper(range(0, 9))",
            "│ 1:Shuffler(buffer_size=3)",
            "│ 2:ForkerSource(2)",
            "│ 3:ForkerChild(0)",
            "├ ↑ 2:ForkerSource",
            "│ 4:ForkerChild(1)",
            "│ 5:Mapper(len)",
            "├ ┌ 6:IterableWrapper(range(0, 2))",
            "│ ├ 7:IterableWrapper(range(0, 3))",
            "│ ├ 8:IterableWrapper(range(0, 4))",
            "│ └ 9:Concater()",
            "│ 10:Header(limit=5)",
            "└ 11:Zipper()",
            "12:Collator(conversion=list)",
        ]
    )


def test_the_ids_are_those_of_errors() -> None:
    def broken(x: int) -> int:
        raise ValueError("x")

    pipe = numbers(3).shuffle().map(broken)
    with pytest.raises(ValueError, match="x") as caught:
        list(pipe)
    assert "2:Mapper(" in repr(pipe).split("\n")[2]
    assert "in stage 2:Mapper " in caught.value.__notes__[0]


def test_secrets_do_not_print() -> None:
    pipe = Secretive(IterableWrapper(["https://h/?X-Amz-Signature=abcdef"]), "hushhush", url="s3://me:pass@bucket")
    shown = repr(pipe)
    assert "hushhush" not in shown
    assert "abcdef" not in shown
    assert "pass" not in shown
    assert "***" in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (len, "len"),
        (str.upper, "str.upper"),
        (Mapper, "Mapper"),
        (np.zeros((3, 2)), "ndarray(shape=(3, 2), dtype=float64)"),
        (torch.zeros(3, dtype=torch.int8), "Tensor(shape=(3,), dtype=torch.int8)"),
        (object(), "object object"),
        ([1, 2, 3], "[1, 2, 3]"),
        (list(range(7)), "[0, 1, 2, … 7 items]"),
        (dict.fromkeys(range(50)), "dict of 50 items"),
        ("x" * 200, None),
        (["y" * 100] * 9, None),
    ],
)
def test_values_are_short(value: Any, text: str | None) -> None:
    shown = setting(value)
    assert len(shown) <= 60
    assert text in (None, shown)


def test_lambdas_and_local_functions_are_found() -> None:
    def local(x: int) -> int:
        return x

    assert setting(local) == "test_lambdas_and_local_functions_are_found.local"
    assert setting(lambda x: x) == f"lambda at test_datapipe.py:{sys._getframe().f_lineno}"


def test_a_value_whose_repr_fails_does_not_stop_the_rest() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError("no")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

        __hash__ = None  # type: ignore[assignment]

    assert "url=<Bad" in repr(Secretive(numbers(1), "x", url=Bad()))  # type: ignore[arg-type]


def test_a_definition_that_is_run_again_takes_its_own_name_again() -> None:
    def cell(by: int) -> Any:
        @functional_datapipe("test_scaled")
        class Scaled(IterDataPipe[int]):
            def __init__(self, source: Any) -> None:
                self.source = source

            def __iter__(self) -> Iterator[int]:
                return (by * x for x in self.source)

        return Scaled

    cell(2)
    pipe: Any = numbers(3)
    assert list(pipe.test_scaled()) == [0, 2, 4]
    cell(3)
    assert list(pipe.test_scaled()) == [0, 3, 6]
    with pytest.raises(GraphError, match="already taken"):
        functional_datapipe("test_scaled")(Doubled)
