"""`.load_from_zip`: members as streams, exact resume at every member, bad archives by the policy."""

from __future__ import annotations

import io
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from one_way import OneWay
from stage_contract import check_stage, saved, start

from pipes.datapipe import IterDataPipe
from pipes.errors import ChangedDataError, DataError, StateError, TruncatedError
from pipes.formats.archives import ZipArchiveLoader
from pipes.iter import FileLister, FileOpener, IterableWrapper


def make(count: int, first: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("d")
        for number in range(first, first + count):
            archive.writestr(f"d/{number:03d}.txt", f"text {number}" * 50)
            archive.writestr(f"d/{number:03d}.cls", str(number))
    return buffer.getvalue()


def contents(element: tuple[str, Any]) -> tuple[str, bytes]:
    path, stream = element
    return path, stream.read()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for number, count in enumerate((3, 0, 1, 4)):
        (tmp_path / f"{number}.zip").write_bytes(make(count, 10 * number))
    return tmp_path


def members_of(folder: Path) -> list[list[Any]]:
    found: list[list[Any]] = []
    for path in sorted(folder.iterdir()):
        with zipfile.ZipFile(path) as archive:
            found += [[f"{path}/{i.filename}", archive.read(i)] for i in archive.infolist() if not i.is_dir()]
    return found


def test_it_keeps_every_promise_of_a_stage(shards: Path) -> None:
    folder = str(shards)
    check_stage(lambda: FileLister(folder).open_files("rb").load_from_zip().map(contents), members_of(shards))


def test_samples_out_of_streams_that_cannot_seek(shards: Path) -> None:
    folder = str(shards)

    def one_way(path: str) -> tuple[str, Any]:
        return path, OneWay(Path(path).read_bytes(), 100)

    def graph() -> IterDataPipe[Any]:
        return FileLister(folder).map(one_way).load_from_zip().map(contents).webdataset().batch(2)

    check_stage(graph, streams=(1,))
    assert [len(sample) for batch in graph() for sample in batch] == [3] * 8


def test_members_stay_readable_after_their_archive_and_folders_are_counted(shards: Path) -> None:
    pipe = FileLister(str(shards)).open_files("rb").load_from_zip()
    kept = list(pipe)
    assert [list(contents(member)) for member in kept] == members_of(shards)
    run = start(pipe)
    list(run)
    assert run.context.tallies.counts()["2:ZipArchiveLoader"].left_out == (("directory", 4),)


def test_names_stay_below_their_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("../../etc/passwd", "/abs", "a/../b"):
            archive.writestr(name, name)
    paths = [path for path, _ in FileOpener([str(tmp_path / "a.zip")], "rb").load_from_zip()]
    assert paths == [f"{tmp_path}/a.zip/{name}" for name in ("etc/passwd", "abs", "b")]


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_cut_archive_is_an_error_that_names_it_or_is_skipped(tmp_path: Path, cut: int) -> None:
    whole = make(3)
    (tmp_path / "a.zip").write_bytes(whole)
    (tmp_path / "b.zip").write_bytes(whole[:cut])
    (tmp_path / "c.zip").write_bytes(whole)
    opened = FileLister(str(tmp_path)).open_files("rb")
    with pytest.raises(DataError, match=r"b\.zip") as caught:
        list(opened.load_from_zip())
    if cut != 1:
        assert isinstance(caught.value, TruncatedError)
    assert "2:ZipArchiveLoader" in caught.value.__notes__[0]
    run = start(opened.load_from_zip(on_error="skip", max_errors=1))
    assert len(list(run)) == 12
    assert run.context.tallies.counts()["2:ZipArchiveLoader"].skipped == 1


def test_select_and_limits(shards: Path) -> None:
    opened = FileLister(str(shards), "0.zip").open_files("rb")
    chosen = opened.load_from_zip(select=lambda name: name.endswith(".cls"), max_member_bytes=1)
    assert [stream.read() for _, stream in chosen] == [b"0", b"1", b"2"]
    with pytest.raises(DataError, match="more than max_member_bytes=5"):
        list(opened.load_from_zip(max_member_bytes=5))
    with pytest.raises(ValueError, match="max_member_bytes=-1"):
        opened.load_from_zip(max_member_bytes=-1)
    with pytest.raises(TypeError, match="tuple"):
        list(IterableWrapper([1]).then(ZipArchiveLoader))
    assert len(opened.load_from_zip(6)) == 6
    with pytest.raises(TypeError, match="length="):
        len(opened.load_from_zip())


def test_a_resume_goes_to_its_place_and_only_in_the_same_archive(shards: Path) -> None:
    pipe = FileLister(str(shards), "3.zip").open_files("rb").load_from_zip().map(contents)
    run = start(pipe)
    list(islice(run, 3))
    state = saved(run)
    rest = list(run)
    inside = state["2:ZipArchiveLoader"]["inside"]
    assert inside["offset"] > 0
    assert list(start(pipe, state)) == rest
    for field, value in (("offset", -1), ("offset", "x"), ("object", 3)):
        damaged = {**state, "2:ZipArchiveLoader": {**state["2:ZipArchiveLoader"], "inside": {**inside, field: value}}}
        with pytest.raises(StateError, match="damaged"):
            start(pipe, damaged)
    names = IterableWrapper([str(shards / "3.zip")])
    opened = start(names.open_files("rb").load_from_zip())
    list(islice(opened, 3))
    state = saved(opened)
    opened.close()
    (shards / "3.zip").write_bytes(make(5))
    with pytest.raises(ChangedDataError, match="another version"):
        list(start(names.open_files("rb").load_from_zip(), state))
