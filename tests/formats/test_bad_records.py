"""`on_error` where data are parsed: what one bad row, line, member or sample leaves out, and a function's stand-in."""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from stage_contract import check_everywhere, check_stage, saved, start
from tars import make_tar

from pipes import IterDataPipe
from pipes.error_policy import StageCounts
from pipes.errors import DataError
from pipes.iter import IterableWrapper

CSV = b'id,text\n1,"two\nlines"\n2,"bad \xff\nquoted"\n3,fine\n4,\xff\n5,end\n'
LINES = b'{"a": 1}\n{"a":\n\n[2]\nno\n3\n'


def counts_of(run: Any) -> StageCounts:
    counts: StageCounts = run.context.tallies.counts()[run.stage]
    return counts


def make(count: int) -> bytes:
    return make_tar((f"{number:04}.txt", b"content") for number in range(count))


def opened(element: tuple[str, bytes]) -> tuple[str, Any]:
    return element[0], io.BytesIO(element[1])


def row_instead(error: Exception, path: str) -> list[str]:
    assert isinstance(error, DataError)
    assert path.startswith(("a.", "b."))
    return ["0", "?"]


def member_instead(error: Exception, path: str) -> tuple[str, Any]:
    return "instead", io.BytesIO(path.encode())


def sample_instead(error: Exception, key: str) -> dict[str, Any]:
    return {"__key__": "instead", "a": int(key)}


def content(element: tuple[str, Any]) -> tuple[str, bytes]:
    return element[0], element[1].read()


def archive_of(number: int) -> tuple[str, Any]:
    data = make(number % 4)
    return f"{number}.tar", io.BytesIO(data[:700] if number % 3 == 2 else data)


class _Tagged(io.BytesIO):
    etag = ""


def tagged(size: int) -> tuple[str, Any]:
    stream = _Tagged(make(size))
    stream.etag = f"e{size}"
    return "a.tar", stream


class TestFormats:
    def test_csv_leaves_out_whole_rows(self) -> None:
        def graph(**more: Any) -> IterDataPipe[Any]:
            source = IterableWrapper([("a.csv", CSV), ("b.csv", b"id,text\n6,six\n")]).map(opened)
            return source.parse_csv(errors="strict", on_error="skip", max_errors=9, **more)

        expected = [["id", "text"], ["1", "two\nlines"], ["3", "fine"], ["5", "end"], ["id", "text"], ["6", "six"]]
        check_stage(lambda: graph(), expected)
        check_stage(lambda: graph(return_path=True, as_tuple=True))
        run = start(graph())
        list(run)
        counts = counts_of(run)
        assert (counts.taken, counts.skipped) == (8, 2)
        assert "a.csv: line 5" in counts.first

    def test_csv_rows_may_be_replaced(self) -> None:
        def graph() -> IterDataPipe[Any]:
            source = IterableWrapper([("a.csv", CSV)]).map(opened)
            return source.parse_csv_as_dict(errors="strict", on_error=row_instead, max_errors=9)

        rows = [("1", "two\nlines"), ("0", "?"), ("3", "fine"), ("0", "?"), ("5", "end")]
        check_stage(graph, [{"id": number, "text": text} for number, text in rows])
        run = start(graph())
        list(run)
        assert counts_of(run)[:3] == (5, 0, 2)

    def test_a_bad_header_takes_the_text_with_it(self) -> None:
        texts = [("a.csv", b"i\xff,text\n1,one\n"), ("b.csv", b"id\n2\n")]
        pipe = IterableWrapper(texts).map(opened).parse_csv_as_dict(errors="strict", on_error="skip")
        assert list(pipe) == [{"id": "2"}]

    def test_rows_that_the_dialect_refuses(self) -> None:
        pipe = IterableWrapper([("a.csv", b'a\n"b"c\nd\n')]).map(opened).parse_csv(strict=True, on_error="skip")
        assert list(pipe) == [["a"], ["d"]]

    def test_jsonl(self) -> None:
        def graph(on_error: Any = "skip") -> IterDataPipe[Any]:
            source = IterableWrapper([("a.jsonl", LINES), ("b.jsonl", b"4\n")]).map(opened)
            return source.parse_jsonl(on_error=on_error, max_errors=9)

        check_stage(graph, [{"a": 1}, [2], 3, 4])
        check_stage(lambda: graph(row_instead), [{"a": 1}, ["0", "?"], [2], ["0", "?"], 3, 4])
        run = start(graph())
        list(run)
        assert counts_of(run)[:3] == (6, 2, 0)
        assert "a.jsonl: line 2, which begins at byte 9" in counts_of(run).first

    def test_a_text_stream_in_another_encoding_is_named(self) -> None:
        def texts() -> IterDataPipe[Any]:
            return IterableWrapper([b"1\n\xff\n"]).map(
                lambda data: ("a.txt", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
            )

        for pipe in (texts().parse_jsonl(), texts().parse_csv(), texts().readlines(), texts().read_from_stream()):
            with pytest.raises(DataError, match=r"a\.txt: bytes that are not in the encoding: 'utf-8' codec"):
                list(pipe)

    def test_a_cut_text_counts_once_and_the_next_goes_on(self) -> None:
        import gzip

        whole = gzip.compress(b"1\n2\n" * 2000)
        source = [("a.gz", whole[:-20]), ("b.gz", gzip.compress(b"5\n"))]
        pipe = IterableWrapper(source).map(opened).parse_jsonl(on_error="skip")
        run = start(pipe)
        got = list(run)
        assert got[-1] == 5
        assert counts_of(run).skipped == 1
        assert "a.gz: cut at byte" in counts_of(run).first

    def test_json_files_and_lines(self) -> None:
        texts = [("a", b"[1]"), ("b", b"["), ("c", b""), ("d", b"2")]
        check_stage(
            lambda: IterableWrapper(texts).map(opened).parse_json_files(on_error="skip", max_errors=2),
            [("a", [1]), ("d", 2)],
        )
        check_stage(
            lambda: (
                IterableWrapper([("a", b"one\n\xff\ntwo\n")])
                .map(opened)
                .readlines(decode=True, errors="strict", on_error="skip", return_path=False)
            ),
            ["one", "two"],
        )

    def test_files_that_are_missing(self, tmp_path: Path) -> None:
        names = []
        for number in range(6):
            names.append(str(tmp_path / f"{number}.json"))
            if number not in (1, 4):
                Path(names[-1]).write_text(str(number))

        def graph(on_error: Any = "skip") -> IterDataPipe[Any]:
            return IterableWrapper(names).open_files("rb", on_error=on_error, max_errors=2).parse_json_files()

        check_stage(lambda: graph(), [(names[x], x) for x in (0, 2, 3, 5)])
        run = start(graph())
        list(run)
        counts = run.context.tallies.counts()["1:FileOpener"]
        assert counts[:3] == (6, 2, 0)
        assert counts.first.startswith("FileNotFoundError: ")
        assert "1.json" in counts.first

    @pytest.mark.parametrize("on_error", ["skip", "stand in"])
    def test_archives_and_what_they_leave_out(self, on_error: str) -> None:
        def graph() -> IterDataPipe[Any]:
            archives = [("a.tar", make(5)), ("b.tar", make(5)[:1900]), ("c.tar", b""), ("d.tar", make(2))]
            policy: Any = "skip" if on_error == "skip" else member_instead
            return IterableWrapper(archives).map(opened).load_from_tar(on_error=policy, max_errors=2).map(content)

        check_stage(graph)
        check_everywhere(lambda dp: dp.map(archive_of).load_from_tar(on_error="skip", max_errors=99).map(content), 8)
        run = start(graph())
        names = [name for name, _ in run]
        assert names.count("a.tar/0000.txt") == names.count("d.tar/0001.txt") == 1
        assert "b.tar/0001.txt" not in names or "b.tar/0002.txt" not in names
        counts = run.context.tallies.counts()["2:TarArchiveLoader"]
        assert (counts.taken, counts.errors) == (4, 2)
        assert names.count("instead") == (0 if on_error == "skip" else 2)
        assert "b.tar" in counts.first

    def test_a_resume_over_changed_data_is_refused_all_the_same(self) -> None:
        def graph(size: int) -> IterDataPipe[Any]:
            return IterableWrapper([size, size]).map(tagged).load_from_tar(on_error="skip").map(content)

        run = start(graph(5))
        list(islice(iter(run), 2))
        with pytest.raises(DataError, match="another version"):
            list(start(graph(6), saved(run)))

    def test_samples(self) -> None:
        def graph(on_error: Any = "skip") -> IterDataPipe[Any]:
            members = [(f"{n}.{field}", n) for n in range(40) for field in ("a", "b", "a" if n % 5 == 2 else "c")]
            members.insert(5, ("README", 0))
            return IterableWrapper(members).webdataset(on_error=on_error, max_errors=9)

        good = [{"__key__": str(n), "a": n, "b": n, "c": n} for n in range(40) if n % 5 != 2]
        check_stage(graph, good)
        check_stage(lambda: graph(sample_instead))
        run = start(graph(sample_instead))
        assert [sample["__key__"] for sample in run] == [str(n) if n % 5 != 2 else "instead" for n in range(40)]
        counts = counts_of(run)
        assert (counts.taken, counts.skipped, counts.replaced) == (40, 0, 8)
        assert counts.left_out == (("no extension", 1),)
