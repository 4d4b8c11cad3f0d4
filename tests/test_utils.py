"""Streams that close themselves."""

from __future__ import annotations

import gc
import io
import pickle
from pathlib import Path
from typing import Any

import pytest

from pipes.utils import StreamWrapper, janitor, validate_pathname_binary_tuple


def test_it_is_the_wrapped_object_in_all_that_matters() -> None:
    stream = StreamWrapper(io.BytesIO(b"one\ntwo\n"))
    assert stream.readline() == b"one\n"
    assert (stream.tell(), stream.seekable()) == (4, True)
    assert list(stream) == [b"two\n"]
    stream.seek(0)
    assert next(stream) == b"one\n"
    assert stream.read(2) == b"tw"
    assert io.TextIOWrapper(stream).read() == "o\n"  # type: ignore[type-var]
    assert "getvalue" in dir(stream)
    with pytest.raises(AttributeError):
        stream.nonsense  # noqa: B018


def test_dropping_it_closes_the_file(tmp_path: Path) -> None:
    inner = (tmp_path / "a").open("wb")
    stream = StreamWrapper(inner)
    assert not inner.closed
    del stream
    gc.collect()
    assert inner.closed


def test_a_loop_over_a_temporary_reads_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n2\n3\n")
    assert [line for line in StreamWrapper((tmp_path / "a").open("rb"))] == [b"1\n", b"2\n", b"3\n"]  # noqa: C416


def test_it_closes_once_and_as_a_context() -> None:
    calls = []

    class Counted(io.BytesIO):
        def close(self) -> None:
            calls.append(1)
            super().close()

    inner = Counted()
    with StreamWrapper(inner) as stream:
        assert not stream.closed
    stream.close()
    assert stream.closed
    assert calls == [1]
    inner = Counted()
    inner.close()
    assert StreamWrapper(inner).closed
    StreamWrapper(object()).close()


def test_parents_close_with_their_last_child_when_told() -> None:
    parent = StreamWrapper(io.BytesIO())
    first, second = StreamWrapper(io.BytesIO(), parent), StreamWrapper(io.BytesIO(), parent)
    parent.autoclose()
    first.close()
    first.close()
    assert not parent.closed
    second.close()
    assert parent.closed
    other = StreamWrapper(io.BytesIO())
    StreamWrapper(io.BytesIO(), other).close()
    assert not other.closed
    other.autoclose()
    assert other.closed
    with pytest.raises(RuntimeError, match="Parent stream should be StreamWrapper"):
        StreamWrapper(io.BytesIO(), io.BytesIO())


def test_repr_with_and_without_a_name() -> None:
    inner = io.BytesIO()
    assert repr(StreamWrapper(inner)) == f"StreamWrapper<{inner!r}>"
    assert repr(StreamWrapper(inner, name="a")) == f"StreamWrapper<a,{inner!r}>"


def test_pickling_is_that_of_the_wrapped_object(tmp_path: Path) -> None:
    copied = pickle.loads(pickle.dumps(StreamWrapper(io.BytesIO(b"abc"), name="a")))
    assert (type(copied), copied.read(), copied.name) == (StreamWrapper, b"abc", "a")
    with StreamWrapper((tmp_path / "a").open("wb")) as stream, pytest.raises(TypeError, match="pickle"):
        pickle.dumps(stream)


def test_open_streams_are_listed_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamWrapper, "debug_unclosed_streams", True)
    first, second = StreamWrapper(io.BytesIO()), StreamWrapper(io.BytesIO())
    assert set(StreamWrapper.session_streams) == {first, second}
    first.close()
    assert set(StreamWrapper.session_streams) == {second}
    second.close()


@pytest.mark.parametrize("close", [StreamWrapper.close_streams, janitor])
def test_nested_streams_are_closed(close: Any) -> None:
    streams = [StreamWrapper(io.BytesIO()) for _ in range(4)]
    close({"a": [streams[0], (streams[1], {"b": streams[2]})], "c": streams[3], "d": 1})
    assert all(stream.closed for stream in streams)
    deep: Any = StreamWrapper(io.BytesIO())
    inside = deep
    for _ in range(11):
        deep = [deep]
    close(deep)
    assert not inside.closed
    close(deep[0])
    assert inside.closed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["a", io.BytesIO()], "should be tuple type"),
        (("a",), "length should be 2, but got 1"),
        ((1, io.BytesIO()), "string type pathname"),
        (("a", b"bytes"), "IOBase or its subclasses"),
    ],
)
def test_wrong_elements_are_named(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        validate_pathname_binary_tuple(data)
