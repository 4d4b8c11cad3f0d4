"""Elements in words."""

from __future__ import annotations

import io
import json
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipes.inspector.elements import describe_element, first_elements
from pipes.iter import IterableWrapper
from pipes.utils import StreamWrapper

Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, "NoneType", "None"),
        (True, "bool", "True"),
        (3, "int", "3"),
        ("short", "str", "'short'"),
        ("x" * 300, "str", f"'{'x' * 60}'… (300 characters)"),
        ("https://u:pw@h/?X-Amz-Signature=zz", "str", "'https://u:***@h/?X-Amz-Signature=***'"),
        (b"abc", "bytes", "3 bytes"),
        (memoryview(bytes(4096)), "memoryview", "4,096 bytes"),
        (torch.zeros(64, 3, 8, 8), "tensor", "float32 64x3x8x8"),
        (torch.arange(3), "tensor", "int64 3: 0, 1, 2"),
        (torch.tensor(0.123456), "tensor", "float32 scalar: 0.1235"),
        (np.zeros((4, 5), "uint8"), "array", "uint8 4x5"),
        (np.float32(2), "float32", "2.0"),
        (Image.new("RGB", (3, 4)), "image", "RGB 3x4"),
        (StreamWrapper(io.BytesIO(), name="a.jpg"), "stream", "'a.jpg'"),
        ([1, 2, 3], "list", "3 items: 1, 2, 3"),
        (list(range(20)), "list", "20 items: 0, 1, 2, 3, 4, 5, 6, 7, …"),
        (["a"] * 64, "list", "64 items: 'a', 'a', 'a', 'a', …"),
        ([], "list", "0 items"),
    ],
)
def test_each_kind(value: Any, kind: str, text: str) -> None:
    found = describe_element(value)
    assert (found.kind, found.text, found.inside) == (kind, text, {})


def test_containers_show_what_is_in_them() -> None:
    found = describe_element({"a": [{"b": b"1"}], "pair": Pair(None, "x"), **{str(n): n for n in range(30)}})
    assert found.text == "32 items"
    assert found.left_out == 16
    assert found.inside["a"].inside["0"].inside["b"].text == "1 bytes"
    assert list(found.inside["pair"].inside) == ["left", "right"]
    assert json.loads(json.dumps(found.as_data()))["left_out"] == 16


def test_what_is_named_a_secret_is_masked() -> None:
    found = describe_element({"secret_key": "hush", "n": {"password": "hush", "more": 1}})
    assert "hush" not in json.dumps(found.as_data())


def test_depth_is_bounded() -> None:
    value: Any = []
    value.append(value)
    assert "list" in json.dumps(describe_element(value).as_data())


def test_a_value_whose_repr_fails_is_described() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError

    assert describe_element(Bad()).text.startswith("<Bad instance")


def test_only_the_first_are_made_and_all_is_closed() -> None:
    made: list[int] = []
    streams: list[StreamWrapper] = []
    closed: list[bool] = []

    def make(value: int) -> StreamWrapper:
        made.append(value)
        streams.append(StreamWrapper(io.BytesIO(), name=str(value)))
        return streams[-1]

    class Source:
        def __iter__(self) -> Any:
            try:
                yield from range(100)
            finally:
                closed.append(True)

    found = first_elements(IterableWrapper(Source(), deepcopy=False).map(make), 2)
    assert [each.text for each in found] == ["'0'", "'1'"]
    assert made == [0, 1]
    assert all(stream.closed for stream in streams)


def test_a_short_graph_gives_what_it_has() -> None:
    assert [each.text for each in first_elements(IterableWrapper([7]), 5)] == ["7"]
