"""Encoding by extension: what decode reads back, and clear errors for the rest."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipes.errors import DataError
from pipes.formats.decode import Decoder, decode
from pipes.formats.encode import encode, encode_value
from pipes.utils import MemoryStream

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(value=values, number=st.integers(), text=st.text(st.characters(codec="utf-8")), raw=st.binary())
def test_what_is_encoded_is_decoded_again(value: Any, number: int, text: str, raw: bytes) -> None:
    sample = {"__key__": "a", "m.json": value, "cls": number, "txt": text, "bin": raw}
    assert decode(encode(sample)) == sample


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool"])
def test_arrays_and_tensors(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    for value in (array, torch.from_numpy(array.copy())):
        found = decode(encode({"npy": value}))["npy"]
        assert found.dtype == array.dtype
        assert (found == array).all()


def test_images_as_png_lose_nothing() -> None:
    array = np.random.default_rng(1).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    for value in (array, Image.fromarray(array)):
        data = encode({"seg.png": value})["seg.png"]
        assert data == encode({"seg.png": value})["seg.png"]
        assert (decode({"seg.png": data})["seg.png"] == array).all()
    grey = array[:, :, 0].copy()
    assert (Decoder(mode="L")(encode({"png": grey}))["png"] == grey).all()


def test_bytes_and_streams_pass_whatever_the_extension() -> None:
    stream = MemoryStream(b"jpeg", "a.jpg")
    assert encode({"jpg": stream, "png": bytearray(b"x"), "txt": io.StringIO("ü"), "cls": memoryview(b"1")}) == {
        "jpg": b"jpeg",
        "png": b"x",
        "txt": "ü".encode(),
        "cls": b"1",
    }
    assert stream.closed


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("jpg", np.zeros((2, 2, 3), np.uint8), "no way is known from ndarray to 'jpg'; known are bytes"),
        ("pkl", {"a": 1}, "no way is known from dict to 'pkl'"),
        ("txt", 3, "from int to 'txt'"),
        ("cls", 1.5, "1.5 is no whole number"),
        ("cls", True, "True is no whole number"),
        ("cls", "x", "invalid literal"),
        ("json", {1, 2}, "not JSON serializable"),
        ("npy", np.array([object()]), "allow_pickle=False"),
        ("png", np.zeros((2, 2), np.float32), "uint8, this array float32"),
        ("png", torch.zeros(2, 2, requires_grad=True), "requires grad"),
    ],
)
def test_what_does_not_encode_names_the_sample_and_the_field(field: str, value: Any, words: str) -> None:
    with pytest.raises(DataError, match=rf"sample 'a': field '{field}' does not encode: .*{words}"):
        encode({"__key__": "a", field: value})


def test_images_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pipes\[images\]"):
        encode({"png": np.zeros((2, 2), np.uint8)})
    assert encode_value("png", b"x") == b"x"
