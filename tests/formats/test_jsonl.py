"""JSON lines in chunks of any size."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipes.errors import DataError
from pipes.formats.chunks import decompress
from pipes.formats.jsonl import JsonLines

LONG = {"s": "x" * 5_000_000}
HARD = '{"a":"\u2028x"}\n\n{"a":"é€😀"}\r\n'.encode() + json.dumps(LONG).encode() + b'\n{"last":1}'
VALUES: list[Any] = [{"a": "\u2028x"}, {"a": "é€😀"}, LONG, {"last": 1}]


def drain(rows: Iterable[Any], into: list[Any]) -> None:
    for row in rows:
        into.append(row)


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 3, 16, 4096, 1 << 20, 1 << 23])
def test_hard_lines_in_any_chunks(size: int) -> None:
    rows = JsonLines(pieces(HARD, size), "a.jsonl")
    got = []
    for value in rows:
        got.append((value, rows.position, rows.line))
    assert [value for value, _, _ in got] == VALUES
    assert [line for _, _, line in got] == [1, 3, 4, 5]
    assert got[-1][1] == len(HARD)


@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=5)) | st.none()), st.integers(1, 30), st.booleans()
)
def test_random_values_and_every_position(values: list[Any], size: int, ended: bool) -> None:
    lines = ["" if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    data = ("\n".join(lines) + ("\n" if ended else "")).encode()
    expected = [value for value in values if value is not None]
    rows = JsonLines(pieces(data, size), "a.jsonl")
    got = []
    for value in rows:
        got.append(value)
        later = JsonLines(pieces(data[rows.position :], size), "a.jsonl", position=rows.position, line=rows.line)
        assert list(later) == expected[len(got) :]
        assert later.position == len(data)
    assert got == expected


def test_gzip_of_two_members() -> None:
    packed = gzip.compress(b'{"a": 1}\n{"a"') + gzip.compress(b': 2}\n{"a": 3}')
    for size in (1, 7, 1000):
        assert list(JsonLines(decompress(pieces(packed, size), "a.jsonl.gz"), "a.jsonl.gz")) == [
            {"a": n} for n in (1, 2, 3)
        ]


def test_a_bad_line_is_named_with_number_and_byte() -> None:
    rows = JsonLines([b'{"a": 1}\n[2]\n{"a":\n{"a": 4}\n'], "s3://bkt/a.jsonl")
    got = []
    with pytest.raises(DataError, match=r"s3://bkt/a\.jsonl: line 3, which begins at byte 13, is not JSON"):
        drain(rows, got)
    assert got == [{"a": 1}, [2]]
    with pytest.raises(DataError, match="line 1, which begins at byte 0"):
        list(JsonLines([b'"\xff"\n'], "a"))


def test_a_line_that_nests_too_deeply_is_bad_and_no_more() -> None:
    data = b"[1]\n" + b"[" * 100_000 + b"]" * 100_000 + b"\n[3]\n"
    with pytest.raises(
        DataError, match=r"line 2, which begins at byte 4, is not JSON: (maximum recursion|Stack overflow)"
    ):
        list(JsonLines([data], "a"))
    assert list(JsonLines([data], "a", on_bad=lambda error: None)) == [[1], [3]]


def test_byte_order_mark_empty_text_and_own_loads() -> None:
    assert list(JsonLines([b"\xef\xbb\xbf[1]\n"], "a")) == [[1]]
    assert list(JsonLines([], "a")) == []
    assert list(JsonLines([b"\n \r\n"], "a")) == []
    assert list(JsonLines([b"[1]\n[2]"], "a", loads=len)) == [3, 3]


@pytest.mark.parametrize(
    "line", ['  {"a": 1} \t', "1 2", "[1] x", "", "NaN", '{"a": 1}}', "\x0b1", "1\x0b", '"\ud800"', "01"]
)
def test_every_line_is_what_json_makes_of_it(line: str) -> None:
    data = line.encode("utf-8", "surrogatepass")
    try:
        expected = [json.loads(data.decode())] if line.strip() else []
    except ValueError:
        with pytest.raises(DataError, match="line 1, which begins at byte 0"):
            list(JsonLines([data], "a"))
    else:
        assert repr(list(JsonLines([data], "a"))) == repr(expected)
