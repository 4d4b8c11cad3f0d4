"""Files by iopath: against the real package where it is installed, and against what has its methods."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from path_manager import FolderManager
from stage_contract import saved, start

from pipes.errors import ChangedDataError
from pipes.iter import IoPathFileLister, IoPathFileOpener, IoPathSaver, IterableWrapper


@pytest.fixture(params=["iopath", "our own"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "our own":
        return FolderManager(str(tmp_path))
    file_io = pytest.importorskip("iopath.common.file_io")

    class Handler(file_io.NativePathHandler):  # type: ignore[misc, name-defined]
        def _get_supported_prefixes(self) -> list[str]:
            return ["here://"]

        def _get_path_with_cwd(self, path: str) -> str:
            return str(tmp_path / path.removeprefix("here://"))

        def _mkdirs(self, path: str, **_: Any) -> None:
            os.makedirs(self._get_path_with_cwd(path), exist_ok=True)

        def _rm(self, path: str, **_: Any) -> None:
            os.remove(self._get_path_with_cwd(path))

    manager = file_io.PathManager()
    manager.register_handler(Handler())
    return manager


def test_save_list_and_open(manager: Any, tmp_path: Path) -> None:
    saver = IterableWrapper([("b.txt", "b\n"), ("a.txt", "ä"), ("c.csv", "1")]).save_by_iopath(
        filepath_fn=lambda name: f"here://x/{name}", pathmgr=manager
    )
    assert list(saver) == ["here://x/b.txt", "here://x/a.txt", "here://x/c.csv"]
    assert (tmp_path / "x/a.txt").read_bytes() == "ä".encode()
    (tmp_path / "x/folder.txt").mkdir()
    lister = IoPathFileLister("here://x", "*.txt", pathmgr=manager)
    assert list(lister) == ["here://x/a.txt", "here://x/b.txt"]
    assert list(IterableWrapper(["here://x", "here://x/c.csv"]).list_files_by_iopath(pathmgr=manager)) == [
        "here://x/a.txt", "here://x/b.txt", "here://x/c.csv", "here://x/c.csv",
    ]  # fmt: skip
    streams = lister.open_files_by_iopath("rb", manager)
    assert [(path, stream.read()) for path, stream in streams] == [
        ("here://x/a.txt", "ä".encode()), ("here://x/b.txt", b"b\n"),
    ]  # fmt: skip


def test_what_is_there_is_overwritten_and_what_fails_leaves_nothing(manager: Any, tmp_path: Path) -> None:
    class Failing(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            raise ConnectionError("lost")

    for data in (b"half", b"whole"):
        list(IterableWrapper([("here://a", data)]).save_by_iopath("wb", pathmgr=manager))
    assert (tmp_path / "a").read_bytes() == b"whole"
    with pytest.raises(ConnectionError, match="lost"):
        list(IterableWrapper([("here://b", Failing())], deepcopy=False).save_by_iopath("wb", pathmgr=manager))
    with pytest.raises(TypeError, match="data to save must be bytes"):
        list(IterableWrapper([("here://c", "text")]).save_by_iopath("wb", pathmgr=manager))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(ValueError, match="leads out of its folder"):
        list(IterableWrapper([("here://../c", b"")]).save_by_iopath("wb", pathmgr=manager))


def test_another_listing_is_refused(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    make = lambda: IoPathFileLister("here://.", pathmgr=FolderManager(str(tmp_path)))  # noqa: E731
    run = start(make())
    next(iter(run))
    state = saved(run)
    assert list(start(make(), state)) == ["here://./b", "here://./c"]
    (tmp_path / "d").write_text("d")
    with pytest.raises(ChangedDataError):
        list(start(make(), state))


def test_without_iopath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "iopath.common.file_io", None)
    for make in (lambda: IoPathFileLister("."), lambda: IoPathFileOpener([]), lambda: IoPathSaver([])):
        with pytest.raises(ModuleNotFoundError, match=r"pipes\[iopath\]"):
            make()


def test_the_default_manager_and_a_handler(tmp_path: Path) -> None:
    file_io = pytest.importorskip("iopath.common.file_io")
    (tmp_path / "a").write_text("a")
    lister = IoPathFileLister(str(tmp_path), handler=file_io.OneDrivePathHandler())
    assert list(pickle.loads(pickle.dumps(lister))) == [os.path.join(tmp_path, "a")]
    assert [stream.read() for _, stream in lister.open_files_by_iopath()] == ["a"]
