"""Graphs in YAML for tests: their beginning, the functions they name, and where their errors are."""

from __future__ import annotations

from typing import Any

import pytest

from pipes.config import load_graph, read_graph
from pipes.datapipe import IterDataPipe
from pipes.errors import ConfigError

HEAD = "version: 1\npipe:\n  - IterableWrapper: [[1, 2, 3, 4]]\n"


def double(value: int) -> int:
    return 2 * value


def add(value: int, amount: int = 0) -> int:
    return value + amount


def is_odd(value: int) -> bool:
    return value % 2 == 1


def parity(value: int) -> int:
    return value % 2


FUNCTIONS = {"double": double, "add": add, "is_odd": is_odd, "parity": parity}


def load(text: str, **options: Any) -> IterDataPipe[Any]:
    return load_graph(text, functions=FUNCTIONS, **options)


def errors_of(text: str | bytes, **options: Any) -> list[tuple[int, int, str]]:
    with pytest.raises(ConfigError) as caught:
        read_graph(text, "g.yaml", functions=FUNCTIONS, **options)
    assert all(error.file == "g.yaml" for error in caught.value.errors)
    first = caught.value.errors[0]
    assert (caught.value.line, caught.value.column, caught.value.message) == (first.line, first.column, first.message)
    assert str(caught.value).count("g.yaml:") >= len(caught.value.errors)
    return [(error.line, error.column, error.message) for error in caught.value.errors]
