"""Rows and values out of streams, with exact resume."""

from __future__ import annotations

import csv
import gzip
import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from one_way import OneWay
from stage_contract import check_stage, saved, start

from pipes.errors import DataError, StaleIteratorError, StateError
from pipes.formats.tables import CSVDictParser, CSVParser, JsonLinesParser, JsonParser
from pipes.iter import FileOpener, IterableWrapper

HARD = b"\xef\xbb\xbf" + b'id,text\r\n1,"line one\r\nline ""two"""\r\n2,"a,b"\r\n3,\r\n'
ROWS = [["id", "text"], ["1", 'line one\r\nline "two"'], ["2", "a,b"], ["3", ""]]
DICTS = [dict(zip(ROWS[0], row, strict=True)) for row in ROWS[1:]]
LINES = '{"a":"\u2028x"}\n\n{"a":"é€😀"}\r\n{"b": [1]}\n{"last":1}'.encode()
VALUES: list[Any] = [{"a": "\u2028x"}, {"a": "é€😀"}, {"b": [1]}, {"last": 1}]


def over(*texts: bytes | str) -> IterableWrapper[Any]:
    streams = [io.BytesIO(text) if isinstance(text, bytes) else io.StringIO(text, newline="") for text in texts]
    return IterableWrapper([(f"{number}.txt", stream) for number, stream in enumerate(streams)])


KINDS = ["bytes", "text", "two gzip members"]


@pytest.mark.parametrize(
    "text", [HARD, HARD.decode("utf-8-sig"), gzip.compress(HARD[:20]) + gzip.compress(HARD[20:])], ids=KINDS
)
def test_csv_keeps_every_promise_of_a_stage(text: bytes | str) -> None:
    check_stage(lambda: over(text, b"", text).then(CSVParser), ROWS + ROWS)
    check_stage(lambda: over(text, b"", text).then(CSVDictParser), DICTS + DICTS)


def test_csv_from_files_of_any_kind(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.csv").write_bytes(HARD)
    names = [str(tmp_path / f"{number}.csv") for number in range(3)]
    check_stage(lambda: FileOpener(names, "rb").then(CSVParser), ROWS * 3)
    check_stage(lambda: over(HARD, HARD).then(CSVDictParser).shuffle(buffer_size=3).batch(2))
    assert list(IterableWrapper([("a", OneWay(HARD, 1))]).then(CSVParser)) == ROWS


def test_large_csv_is_resumed_by_the_byte() -> None:
    text = io.StringIO(newline="")
    rows = [[str(number), "x" * (number % 50), 'q"\n' * (number % 3)] for number in range(20_000)]
    csv.writer(text).writerows(rows)
    data = text.getvalue().encode()
    run = start(over(data).then(CSVParser))
    iterator = iter(run)
    for stop in (1, 7, 9_000, 5_000, 5_991):
        list(islice(iterator, stop))
        state = saved(run)
        given = rows.index(next(iter(start(over(data).then(CSVParser), state)), rows[-1]))
        assert rows[given:] == [*start(over(data).then(CSVParser), state)] or given == len(rows) - 1


def test_csv_options() -> None:
    text = b"note\n\nid;n\n1;2\n"
    assert list(over(text).then(CSVParser, skip_lines=2, delimiter=";")) == [["id", "n"], ["1", "2"]]
    assert list(over(text).then(CSVDictParser, skip_lines=2, delimiter=";", return_path=True)) == [
        ("0.txt", {"id": "1", "n": "2"})
    ]
    assert list(over(text).then(CSVParser, as_tuple=True, return_path=True))[:2] == [
        ("0.txt", ("note",)),
        ("0.txt", ()),
    ]
    assert list(over(b"a\n").then(CSVParser, skip_lines=5)) == []
    check_stage(lambda: over(text, text).then(CSVParser, skip_lines=2, delimiter=";", return_path=True))
    with pytest.raises(ValueError, match="skip_lines=-1"):
        CSVParser(over(text), skip_lines=-1)
    with pytest.raises(ValueError, match="skip_lines=-1"):
        CSVDictParser(over(text), skip_lines=-1)


def test_csv_bytes_that_do_not_decode() -> None:
    assert list(over(b"\xffa\n").then(CSVParser)) == [["a"]]
    assert list(over("ü\n".encode("latin-1")).then(CSVParser, encoding="latin-1")) == [["ü"]]
    with pytest.raises(DataError, match=r"0\.txt: line 0 .*0xff") as caught:
        list(over(b"\xffa\n").then(CSVParser, errors="strict"))
    assert "1:CSVParser" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="decode=False reads text"):
        list(over(b"a\n").then(CSVParser, decode=False))
    assert list(over("a\n").then(CSVParser, decode=False)) == [["a"]]


def test_dicts_of_short_long_and_empty_rows() -> None:
    text = "a,b\n1\n\n1,2,3\n1,2\n"
    assert list(over(text).then(CSVDictParser)) == list(csv.DictReader(io.StringIO(text)))
    check_stage(lambda: over(text.encode()).then(CSVDictParser), list(csv.DictReader(io.StringIO(text))))
    check_stage(lambda: over("\n1\n").then(CSVDictParser), list(csv.DictReader(io.StringIO("\n1\n"))))
    assert list(over("\n\n1\n").then(CSVDictParser)) == list(csv.DictReader(io.StringIO("\n\n1\n")))


def test_damaged_states_are_refused() -> None:
    run = start(over(HARD).then(CSVDictParser))
    list(islice(iter(run), 2))
    for field, value in (("header", "id"), ("header", [1]), ("offset", -1), ("line", "x")):
        state = saved(run)
        state["1:CSVDictParser"]["inside"][field] = value
        with pytest.raises(StateError, match="damaged"):
            list(start(over(HARD).then(CSVDictParser), state))


@pytest.mark.parametrize(
    "text", [LINES, LINES.decode(), gzip.compress(LINES[:40]) + gzip.compress(LINES[40:])], ids=KINDS
)
def test_json_lines_keep_every_promise_of_a_stage(text: bytes | str) -> None:
    check_stage(lambda: over(text, b"", text).then(JsonLinesParser), VALUES + VALUES)


def test_json_lines_options_and_errors() -> None:
    assert next(iter(over(LINES).then(JsonLinesParser, return_path=True))) == ("0.txt", VALUES[0])
    assert list(IterableWrapper([("a", OneWay(LINES, 1))]).then(JsonLinesParser)) == VALUES
    with pytest.raises(DataError, match=r"0\.txt: line 3, which begins at byte 13, is not JSON") as caught:
        list(over(b'{"a": 1}\n[2]\n{"a":\n').then(JsonLinesParser))
    assert "1:JsonLinesParser" in caught.value.__notes__[0]


def test_json_files_keep_every_promise_of_a_stage() -> None:
    texts = [json.dumps({"n": number}).encode() for number in range(5)]
    check_stage(lambda: over(*texts).then(JsonParser), [[f"{number}.txt", {"n": number}] for number in range(5)])
    assert len(over(*texts).then(JsonParser)) == 5


def test_json_files_options_and_errors(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1.5]")
    assert list(FileOpener([str(tmp_path / "a.json")]).then(JsonParser, parse_float=str)) == [
        (str(tmp_path / "a.json"), ["1.5"])
    ]
    with pytest.raises(json.JSONDecodeError) as caught:
        list(over(b"").then(JsonParser))
    assert "1:JsonParser" in caught.value.__notes__[0]


def test_streams_are_closed_after_their_records(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"[1]\n")
    for stage in (CSVParser, CSVDictParser, JsonLinesParser, JsonParser):
        opened = list(FileOpener([str(tmp_path / "a")], "rb"))
        assert list(IterableWrapper(opened, deepcopy=False).then(stage)) or stage is CSVDictParser
        assert opened[0][1].closed


@pytest.mark.parametrize("text", [b"a\nb\nc\n", b'"a"\n"b"\n"c"\n'])
def test_an_iterator_that_was_replaced_gives_no_row_that_was_parsed_before(text: bytes) -> None:
    pipe = IterableWrapper([("a.csv", io.BytesIO(text))]).parse_csv()
    older = iter(pipe)
    assert next(older) == ["a"]
    assert list(pipe) == [["a"], ["b"], ["c"]]
    with pytest.raises(StaleIteratorError):
        next(older)
    closed = iter(pipe)
    next(closed)
    closed.close()
    assert list(closed) == []
