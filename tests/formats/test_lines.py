"""Lines and whole contents of streams, with exact resume."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from stage_contract import check_stage, saved, start

from pipes.errors import DataError
from pipes.formats.lines import LineReader, StreamReader
from pipes.iter import FileOpener, IterableWrapper

TEXT = b"one\r\n\ntwo \xc3\xbc\n\xe2\x80\xa8three"


def over(*texts: bytes | str) -> IterableWrapper[Any]:
    streams = [io.BytesIO(text) if isinstance(text, bytes) else io.StringIO(text, newline="") for text in texts]
    return IterableWrapper([(f"{number}.txt", stream) for number, stream in enumerate(streams)])


def test_lines_keep_every_promise_of_a_stage() -> None:
    lines = [b"one", b"", "two ü".encode(), "\u2028three".encode()]
    check_stage(lambda: over(TEXT, b"", TEXT).then(LineReader), [[f"{n}.txt", line] for n in (0, 2) for line in lines])
    text = [line.decode() for line in lines]
    check_stage(lambda: over(TEXT).then(LineReader, decode=True, return_path=False), text)
    check_stage(lambda: over(TEXT.decode(), "").then(LineReader, return_path=False), text)
    check_stage(lambda: over(TEXT, TEXT.decode()).then(LineReader, skip_lines=3).batch(2))


def test_line_options() -> None:
    kept = [b"one\r\n", b"\n", "two ü\n".encode(), "\u2028three".encode()]
    assert list(over(TEXT).then(LineReader, strip_newline=False, return_path=False)) == kept
    assert list(over(TEXT).then(LineReader, skip_lines=3, return_path=False)) == [kept[3]]
    assert list(over(TEXT).then(LineReader, skip_lines=9)) == []
    assert list(over(TEXT.decode()).then(LineReader, skip_lines=2, strip_newline=False, return_path=False)) == [
        line.decode() for line in kept[2:]
    ]
    assert list(over(b"\xffa").then(LineReader, decode=True, return_path=False)) == ["a"]
    assert list(over(b"\xffa").then(LineReader, decode=True, encoding="latin-1", return_path=False)) == ["ÿa"]
    with pytest.raises(DataError, match=r"the line that ends at byte 2 is not valid: 'utf-8'") as caught:
        list(over(b"\xffa").then(LineReader, decode=True, errors="strict"))
    assert "1:LineReader" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="skip_lines=-1"):
        LineReader(over(), skip_lines=-1)


@pytest.mark.parametrize("mode", ["r", "rb"])
def test_lines_of_files(tmp_path: Path, mode: str) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT * 1000)
    names = [str(tmp_path / "a.txt")] * 2
    run = start(FileOpener(names, mode).then(LineReader, return_path=False))
    iterator = iter(run)
    whole = list(start(FileOpener(names, mode).then(LineReader, return_path=False)))
    for number in range(6000):
        assert next(iterator) == whole[number]
    assert list(start(FileOpener(names, mode).then(LineReader, return_path=False), saved(run))) == whole[6000:]
    run.context.close()


@pytest.mark.parametrize("text", [b"abcdefg", "abcdëfg"])
@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
def test_contents_keep_every_promise_of_a_stage(text: Any, chunk: int | None) -> None:
    size = chunk or 100
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    check_stage(
        lambda: over(text, text[:0], text).then(StreamReader, chunk),
        [[f"{number}.txt", piece] for number in (0, 2) for piece in pieces],
    )


def test_content_options_and_closing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1_000_000))
    opened = list(FileOpener([str(tmp_path / "a")], "rb"))
    assert list(IterableWrapper(opened, deepcopy=False).then(StreamReader)) == [(str(tmp_path / "a"), bytes(1_000_000))]
    assert opened[0][1].closed
    with pytest.raises(ValueError, match="chunk=0"):
        StreamReader(over(), 0)
