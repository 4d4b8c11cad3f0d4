"""Extracting: equal to what was packed, and nothing outside the folder whatever the archive says."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tars import END, header, make_tar

from pipes.errors import DataError, TruncatedError
from pipes.formats.extracting import extract_archive

MEMBERS = [("a.txt", b"1"), ("d/b.txt", b"2" * 5000), ("d/e/c.bin", b"")]


def make_zip(members: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def extract(data: bytes, folder: Path, **options: Any) -> list[str]:
    return list(extract_archive("a.tar", folder, stream=io.BytesIO(data), **options))


make_archive = pytest.mark.parametrize("make", [make_tar, make_zip])


@pytest.mark.parametrize("make", [make_tar, make_zip, lambda members: gzip.compress(make_tar(members))])
def test_what_was_packed_comes_out(tmp_path: Path, make: Callable[..., bytes]) -> None:
    (tmp_path / "a.archive").write_bytes(make(MEMBERS))
    folder = tmp_path / "new" / "out"
    paths = list(extract_archive(tmp_path / "a.archive", folder))
    assert paths == [str(folder / name) for name, _ in MEMBERS]
    assert below(folder) == dict(MEMBERS)
    assert list(extract_archive(str(tmp_path / "a.archive"), folder, select=lambda name: name == "a.txt")) == paths[:1]
    assert below(folder) == dict(MEMBERS)


@make_archive
@pytest.mark.parametrize("name", ["../out.txt", "/etc/out.txt", "d/../../out.txt", "d/..", ".", "./"])
def test_names_that_lead_out_are_refused(tmp_path: Path, make: Callable[..., bytes], name: str) -> None:
    if name == "./" and make is make_zip:
        return  # a folder
    folder = tmp_path / "in"
    with pytest.raises(DataError, match=r"a\.tar: .* is refused: it is no path below the folder"):
        extract(make([("good.txt", b"1"), (name, b"2"), ("late.txt", b"3")]), folder)
    assert below(tmp_path) == {"in/good.txt": b"1"}


@given(st.lists(st.tuples(st.text(alphabet="a./\\", min_size=1, max_size=12), st.binary(max_size=9)), max_size=4))
def test_nothing_is_ever_written_outside(members: list[tuple[str, bytes]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "x", "in")
        try:
            paths = extract(make_tar(members), folder)
        except (DataError, OSError):  # a file where another member needs a folder
            paths = []
        assert set(below(Path(top))) == {f"x/in/{name}" for name in below(folder)}
        assert all(Path(path).resolve().is_relative_to(folder.resolve()) for path in paths)


@pytest.mark.parametrize(
    ("kind", "what"), [(b"1", "hard link"), (b"2", "symbolic link"), (b"3", "character device"), (b"6", "fifo")]
)
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes, what: str) -> None:
    data = header(b"a", b"0", b"1") + header(b"b", kind) + header(b"b/c", b"0", b"2") + END
    with pytest.raises(DataError, match=f"a {what} at byte 1024 is refused"):
        extract(data, tmp_path)
    assert below(tmp_path) == {"a": b"1"}


def test_links_of_a_zip_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo("l")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc")
    with pytest.raises(DataError, match="a symbolic link at byte 0 is refused"):
        extract(buffer.getvalue(), tmp_path)


@make_archive
def test_links_that_stand_in_the_folder_are_not_followed(tmp_path: Path, make: Callable[..., bytes]) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "in"
    outside.mkdir()
    folder.mkdir()
    (outside / "kept.txt").write_text("kept")
    (folder / "d").symlink_to(outside)
    (folder / "kept.txt").symlink_to(outside / "kept.txt")
    with pytest.raises(DataError, match="'d' on the way is a link or no folder"):
        extract(make([("d/new.txt", b"1")]), folder)
    extract(make([("kept.txt", b"2")]), folder)
    assert below(outside) == {"kept.txt": b"kept"}
    assert not (folder / "kept.txt").is_symlink()
    # The folder that the user names may be a link.
    (tmp_path / "link").symlink_to(outside)
    extract(make([("new.txt", b"3")]), tmp_path / "link")
    assert (outside / "new.txt").read_bytes() == b"3"


@make_archive
def test_a_file_where_a_folder_is_needed(tmp_path: Path, make: Callable[..., bytes]) -> None:
    with pytest.raises(DataError, match="'a' on the way is a link or no folder"):
        extract(make([("a", b"1"), ("a/b", b"2")]), tmp_path)


def test_a_tar_whose_first_member_begins_like_a_zip(tmp_path: Path) -> None:
    assert len(extract(make_tar([("PKG-INFO", b"1")]), tmp_path)) == 1
    assert below(tmp_path) == {"PKG-INFO": b"1"}


@make_archive
def test_limits(tmp_path: Path, make: Callable[..., bytes]) -> None:
    with pytest.raises(DataError, match=r"'d/b\.txt' at byte \d+ has 5000 bytes, more than max_member_bytes=4999"):
        extract(make(MEMBERS), tmp_path / "a", max_member_bytes=4999)
    with pytest.raises(DataError, match=r"'d/b\.txt' exceeds max_bytes=5000"):
        extract(make(MEMBERS), tmp_path / "b", max_bytes=5000)
    assert below(tmp_path) == {"a/a.txt": b"1", "b/a.txt": b"1"}
    assert len(extract(make(MEMBERS), tmp_path / "c", max_bytes=5001, max_member_bytes=5000)) == 3


@make_archive
def test_what_breaks_off_leaves_no_part(tmp_path: Path, make: Callable[..., bytes], monkeypatch: Any) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no space"):
        extract(make(MEMBERS), tmp_path)
    assert below(tmp_path) == {}


def test_a_cut_archive_leaves_the_files_before(tmp_path: Path) -> None:
    with pytest.raises(TruncatedError):
        extract(make_tar(MEMBERS)[:2000], tmp_path)
    assert below(tmp_path) == {"a.txt": b"1"}
    with pytest.raises(TruncatedError, match="empty archive"):
        extract(b"", tmp_path)


def test_a_sparse_member_and_permissions(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("run")
        info.mode = 0o4777
        archive.addfile(info, io.BytesIO())
    extract(buffer.getvalue(), tmp_path)
    assert (tmp_path / "run").stat().st_mode & 0o7111 == 0
