"""Delimited text in chunks of any size."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipes.errors import DataError, TruncatedError
from pipes.formats.delimited import DelimitedRows

HARD = b"\xef\xbb\xbf" + b'id,text\r\n1,"line one\r\nline ""two"""\r\n2,"a,b"\r\n3,\r\n'
ROWS = [["id", "text"], ["1", 'line one\r\nline "two"'], ["2", "a,b"], ["3", ""]]


def drain(rows: Iterable[Any], into: list[Any]) -> None:
    for row in rows:
        into.append(row)


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [*range(1, 17), 1000])
def test_mark_quoted_breaks_and_cr_lf(size: int) -> None:
    rows = DelimitedRows(pieces(HARD, size), "a.csv")
    positions = [(row, rows.position, rows.line) for row in rows]
    assert [row for row, _, _ in positions] == ROWS
    assert [line for _, _, line in positions] == [1, 3, 4, 5]
    for number, (_, position, line) in enumerate(positions):
        later = DelimitedRows(pieces(HARD[position:], size), "a.csv", position=position, line=line)
        assert list(later) == ROWS[number + 1 :]
        assert later.position == len(HARD)
        assert later.line == 5


fields = st.text(st.sampled_from('a,"\r\n\u2028\x85\x0b\tü'), max_size=6)


@given(
    st.lists(st.lists(fields, min_size=2, max_size=3), max_size=6),
    st.integers(1, 9),
    st.sampled_from(["\r\n", "\n", "\r"]),
    st.sampled_from([",", "\t"]),
)
def test_random_rows_equal_the_csv_module(rows: list[list[str]], size: int, end: str, delimiter: str) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end, delimiter=delimiter).writerows(rows)
    data = text.getvalue().encode()
    expected = list(csv.reader(io.StringIO(text.getvalue(), newline=""), delimiter=delimiter))
    reader = DelimitedRows(pieces(data, size), "a.csv", delimiter=delimiter)
    got = []
    for row in reader:
        got.append(row)
        rest = DelimitedRows([data[reader.position :]], "a.csv", position=reader.position, delimiter=delimiter)
        assert list(rest) == expected[len(got) :]
    assert got == expected


@given(
    st.lists(st.lists(st.text(st.sampled_from('a,"\n\u2028é'), max_size=4), min_size=1, max_size=3), max_size=40),
    st.integers(1, 400),
    st.sampled_from(["\r\n", "\n", "\r"]),
)
@settings(max_examples=60)
def test_every_row_of_many_has_its_place(rows: list[list[str]], size: int, end: str) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows(rows)
    data = text.getvalue().encode()
    expected = list(csv.reader(io.StringIO(text.getvalue(), newline="")))
    reader, got = DelimitedRows(pieces(data, size), "a.csv"), []
    lines = csv.reader(map(bytes.decode, data.splitlines(keepends=True)))
    for row in reader:
        got.append(row)
        next(lines)
        assert reader.line == lines.line_num
        assert data[: reader.position].splitlines() == data.splitlines()[: reader.line]
    assert got == expected


@pytest.mark.parametrize(
    "data",
    [
        b"a,b\n\nc\n",
        b"\na\n",
        b"a\r\n\r\nb\r\n",
        b"a\nb\rc\n",
        b"a\r\nb\nc\r\n",
        b"a\n\xff",
        b"\xff\na\n",
        b"\xff",
        b"a,\n,\n",
        b"a b  c\n d\n",
        b"a\x00b,\x85\x0b\x1c\n\xe2\x80\xa8,b\n",
        b"a\\,b\nc",
        b"'a,\n',b\n",
    ],
)
@pytest.mark.parametrize("dialect", [{}, {"delimiter": " "}, {"escapechar": "\\"}, {"quotechar": "'"}, {"quoting": 2}])
def test_texts_without_quotes_equal_the_csv_module(data: bytes, dialect: dict[str, Any]) -> None:
    lines = [line.decode(errors="ignore") for line in data.splitlines(keepends=True)]
    try:
        expected = list(csv.reader(lines, **dialect))
    except ValueError:  # QUOTE_NONNUMERIC
        with pytest.raises(ValueError, match="could not convert"):
            list(DelimitedRows([data], "a.csv", errors="ignore", **dialect))
        return
    reader = DelimitedRows([data], "a.csv", errors="ignore", **dialect)
    assert list(reader) == expected
    assert reader.position == len(data)
    assert reader.line == len(lines)


def test_rows_before_an_error_stand_before_it() -> None:
    good = b'"a\nb",c\n' * 300
    rows = DelimitedRows([good + b'"a"b\n'], "a.csv", strict=True)
    given = [rows.position for _, _ in zip(range(300), rows, strict=False)]
    assert given == list(range(8, 2401, 8))
    with pytest.raises(DataError, match=r"line 601 \(around byte 2405\)"):
        next(iter(rows))


def test_nothing_comes_after_close() -> None:
    for data in (b"a\nb\nc\n", b'"a"\nb\nc\n'):
        rows = DelimitedRows([data] * 3, "a.csv")
        iterator = iter(rows)
        next(iterator)
        rows.close()
        assert list(iterator) == []


def test_empty_texts_and_empty_lines() -> None:
    assert list(DelimitedRows([], "a.csv")) == []
    assert list(DelimitedRows([b"\xef\xbb\xbf"], "a.csv")) == []
    assert list(DelimitedRows([b"a\n\nb"], "a.csv")) == [["a"], [], ["b"]]


def test_a_bad_byte_is_an_error_after_the_rows_before_it() -> None:
    rows = DelimitedRows([b"a,b\nc,d\n\xff,e\nf,g\n"], "a.csv")
    got = []
    with pytest.raises(DataError, match=r"a\.csv: line 2 .*codec can't decode byte 0xff"):
        drain(rows, got)
    assert got == [["a", "b"], ["c", "d"]]
    assert list(DelimitedRows([b"\xff,e\n"], "a.csv", errors="ignore")) == [["", "e"]]


def test_positions_with_bytes_that_are_ignored() -> None:
    data = b"\xffa\n\xe2b\nc\n"
    rows = DelimitedRows([data], "a.csv", errors="ignore")
    assert [(row, rows.position) for row in rows] == [(["a"], 3), (["b"], 6), (["c"], 8)]


def test_dialect_errors_name_the_line() -> None:
    with pytest.raises(DataError, match=r"a\.csv: line 2 "):
        list(DelimitedRows([b'a\n"b"c\n'], "a.csv", strict=True))
    with pytest.raises(DataError, match=r"csv\.field_size_limit"):
        list(DelimitedRows([b"a" * 200_000], "a.csv"))


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_line_of_ignored_bytes_alone_is_an_empty_row_in_chunks_of_any_size(size: int) -> None:
    rows = DelimitedRows(pieces(b"a,b\r\xff\nc,d\r\n", size), "a.csv", errors="ignore")
    assert list(rows) == [["a", "b"], [], ["c", "d"]]


def test_numbers_that_are_none_are_errors_of_their_row() -> None:
    data = b'1,2\n"a",3\n4,five\n6,7\n'
    rows = DelimitedRows([data], "a.csv", quoting=csv.QUOTE_NONNUMERIC)
    got: list[Any] = []
    with pytest.raises(DataError, match=r"a\.csv: line 3 \(around byte \d+\) is not valid: could not convert"):
        got.extend(iter(rows))
    assert got == [[1.0, 2.0], ["a", 3.0]]
    told: list[Exception] = []
    rows = DelimitedRows([data], "a.csv", quoting=csv.QUOTE_NONNUMERIC, on_bad=told.append)
    assert list(rows) == [[1.0, 2.0], ["a", 3.0], [6.0, 7.0]]
    assert len(told) == 1


def test_rows_before_the_stream_breaks_stand_before_its_error() -> None:
    def broken() -> Iterator[bytes]:
        yield b'a\n"b\nc\nd\n'
        raise TruncatedError("a.csv.gz: cut at byte 9")

    got: list[list[str]] = []
    rows = DelimitedRows(broken(), "a.csv.gz")
    with pytest.raises(TruncatedError, match=r"^a\.csv\.gz: cut at byte 9$"):
        got.extend(iter(rows))
    assert got == [["a"]]
    assert rows.position == 2


def test_encodings() -> None:
    assert list(DelimitedRows(["ü,é\r\n".encode("latin-1")], "a.csv", encoding="latin-1")) == [["ü", "é"]]
    assert list(DelimitedRows(pieces(HARD, 3), "a.csv", encoding="utf-8-sig")) == ROWS
    assert list(DelimitedRows([b"\xef\xbb\xbfa\n"], "a.csv", encoding="latin-1")) == [["ï»¿a"]]
    with pytest.raises(ValueError, match="convert the text to UTF-8"):
        DelimitedRows([], "a.csv", encoding="utf-16")
