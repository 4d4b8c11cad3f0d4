"""Listing, opening and saving through fsspec, on its memory and local file systems."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
from stage_contract import saved, start

from pipes.config import dump_graph
from pipes.errors import ChangedDataError, ConfigError, TruncatedError
from pipes.iter import FSSpecFileLister, FSSpecFileOpener, FSSpecSaver, IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService


@pytest.fixture
def memory() -> Any:
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pipe({f"/in/{name}": name.encode() for name in ("b.txt", "a.txt", "z/c.txt")})
    system.pipe("/in/empty.bin", b"")
    yield system
    system.store.clear()


def read(element: tuple[str, Any]) -> tuple[str, str]:
    return element[0], element[1].read()


def test_names_are_sorted_files_with_their_protocol(memory: Any, tmp_path: Path) -> None:
    flat = ["memory:///in/a.txt", "memory:///in/b.txt", "memory:///in/empty.bin"]
    assert list(FSSpecFileLister("memory://in")) == flat
    assert list(FSSpecFileLister("memory://in", recursive=True)) == [*flat, "memory:///in/z/c.txt"]
    assert list(FSSpecFileLister("memory://in", masks=["*.bin", "*/a*"])) == [flat[0], flat[2]]
    assert list(FSSpecFileLister("memory://in/a.txt")) == ["memory://in/a.txt"]
    (tmp_path / "x").write_text("x")
    (tmp_path / "folder").mkdir()
    path = str(tmp_path / "x")
    assert list(FSSpecFileLister([f"file://{tmp_path}", str(tmp_path), "memory://in/z"])) == [
        f"file://{path}", path, "memory:///in/z/c.txt"
    ]  # fmt: skip
    assert list(IterableWrapper([f"file://{tmp_path}", "memory://in/z"]).list_files_by_fsspec()) == [
        f"file://{path}", "memory:///in/z/c.txt"
    ]  # fmt: skip


@pytest.mark.parametrize("recursive", [False, True])
def test_links_of_local_folders_are_listed_as_what_they_lead_to(tmp_path: Path, recursive: bool) -> None:
    store = tmp_path / "blobs"
    (store / "folder").mkdir(parents=True)
    (store / "b1").write_text("hello")
    os.mkfifo(store / "pipe")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "a.txt").symlink_to(store / "b1")
    (folder / "folder").symlink_to(store / "folder")
    (folder / "loop").symlink_to(folder)
    (folder / "lost.txt").symlink_to("nowhere")
    (folder / "self.txt").symlink_to("self.txt")
    (folder / "pipe").symlink_to(store / "pipe")
    with pytest.warns(UserWarning, match="pipe' is left out"):
        names = list(FSSpecFileLister(str(folder), recursive=recursive))
    assert names == [str(folder / name) for name in ("a.txt", "lost.txt", "self.txt")]
    assert names[0].size == 5
    assert [text for _, text in FSSpecFileOpener(names[:1]).map(read)] == ["hello"]
    for name in names[1:]:
        with pytest.raises(OSError, match=os.path.basename(name)):
            list(FSSpecFileOpener([name]))
    listed = FSSpecFileLister(str(folder), "*.txt")
    run = start(listed)
    with pytest.warns(UserWarning, match="left out"):
        next(iter(run))
    state = saved(run)
    os.utime(store / "b1", (1, 1))
    with pytest.warns(UserWarning, match="left out"), pytest.raises(ChangedDataError, match="at other times"):
        list(start(listed, state))


def test_chained_names_open(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in/a.txt", "hello")
    names = list(FSSpecFileLister(f"zip://in::file://{tmp_path}/a.zip"))
    assert names == [f"zip://in/a.txt::file://{tmp_path}/a.zip"]
    assert [text for _, text in FSSpecFileOpener(names).map(read)] == ["hello"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_text("cached")
    names = list(FSSpecFileLister(f"simplecache::file://{tmp_path}/b", simplecache={"cache_storage": str(tmp_path)}))
    assert names == [f"simplecache::file://{tmp_path}/b/c"]


def test_nothing_listed_and_nothing_there(memory: Any) -> None:
    assert list(FSSpecFileLister("memory://in", masks="*.no")) == []
    with pytest.raises(FileNotFoundError, match=r"memory://in: no file is listed here that fits .*strict=True"):
        list(FSSpecFileLister("memory://in", masks="*.no", strict=True))
    with pytest.raises(FileNotFoundError, match="none"):
        list(FSSpecFileLister("memory://none"))
    with pytest.raises(FileNotFoundError, match="none"):
        list(FSSpecFileOpener(["memory://none"]))
    assert list(FSSpecFileOpener(["memory://none", "memory://in/a.txt"], on_error="skip", max_errors=1).map(read)) == [
        ("memory://in/a.txt", "a.txt")
    ]


def test_modes_and_settings_for_open(memory: Any) -> None:
    memory.pipe("/in/latin", "é".encode("latin-1"))
    opener = FSSpecFileOpener(["memory://in/latin"], kwargs_for_open={"encoding": "latin-1"})
    assert [text for _, text in opener.map(read)] == ["é"]
    assert [data for _, data in FSSpecFileOpener(["memory://in/empty.bin"], "rb").map(read)] == [b""]
    with pytest.raises(ValueError, match="Invalid mode"):
        FSSpecFileOpener([], "w")
    with pytest.raises(ValueError, match="Invalid mode"):
        FSSpecSaver([], "r")
    with pytest.raises(TypeError, match="must be str"):
        list(FSSpecFileOpener([3]))
    assert len(FSSpecFileOpener(["a", "b"])) == len(FSSpecSaver([1, 2])) == 2
    with pytest.raises(TypeError, match="FSSpecFileLister"):
        len(FSSpecFileLister("memory://in"))


def test_a_resume_over_other_files_is_refused(memory: Any) -> None:
    run = start(FSSpecFileLister("memory://in"))
    next(iter(run))
    state = saved(run)
    assert next(iter(start(FSSpecFileLister("memory://in"), state))) == "memory:///in/b.txt"
    memory.pipe("/in/b.txt", b"longer than before")
    with pytest.raises(ChangedDataError, match="lists 3 names"):
        list(start(FSSpecFileLister("memory://in"), state))


def test_a_file_replaced_since_it_was_listed_is_refused(memory: Any) -> None:
    names = pickle.loads(pickle.dumps(list(FSSpecFileLister("memory://in"))))
    memory.pipe("/in/a.txt", b"longer than before")
    with pytest.raises(ChangedDataError, match="listed with 5 bytes and has 18 now"):
        list(FSSpecFileOpener(names))


def test_a_store_that_gives_less_than_it_said_is_an_error(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(io.BytesIO):
        size = 1000

    monkeypatch.setattr(type(memory), "_open", lambda *args, **named: Cut(b"x" * 400))
    for step in (-1, 100):
        [(_, stream)] = FSSpecFileOpener(["memory://in/a.txt"], "rb")
        with pytest.raises(TruncatedError, match="gave 400 of 1000 bytes"):
            b"".join(iter(lambda stream=stream, step=step: stream.read(step), b""))  # type: ignore[misc]


def test_saving(memory: Any, tmp_path: Path) -> None:
    pairs = [("memory://out/a.txt", "é"), (f"file://{tmp_path}/x/b.txt", "b"), (str(tmp_path / "y" / "c.txt"), "c")]
    assert list(FSSpecSaver(pairs)) == [name for name, _ in pairs]
    assert memory.cat("/out/a.txt") == "é".encode()
    assert [(tmp_path / name).read_text() for name in ("x/b.txt", "y/c.txt")] == ["b", "c"]
    assert list(FSSpecSaver([("n", io.BytesIO(b"abc"))], "wb", lambda name: f"memory://out/{name}")) == [
        "memory://out/n"
    ]
    assert memory.cat("/out/n") == b"abc"
    with pytest.raises(ValueError, match="leads out"):
        list(FSSpecSaver([("memory://out/../b", "x")]))


def test_what_fails_while_it_is_saved_does_not_appear(memory: Any) -> None:
    class Failing:
        count = 0

        def read(self, size: int) -> bytes:
            self.count += 1
            if self.count == 2:
                raise ConnectionError("cut")
            return b"new"

    memory.pipe("/out/old", b"old")
    for name in ("old", "none"):
        with pytest.raises(ConnectionError):
            list(FSSpecSaver([(f"memory://out/{name}", Failing())], "wb"))
    assert memory.cat("/out/old") == b"old"
    assert not memory.exists("/out/none")


def test_secrets_stay_out_of_yaml_and_print() -> None:
    pipe = FSSpecFileOpener(["s3://b/k"], secret="hush-hush", token="hush-hush")
    assert "hush-hush" not in repr(pipe)
    with pytest.raises(ConfigError, match="credential"):
        dump_graph(FSSpecFileLister("s3://b/k", secret="hush-hush"))


@pytest.mark.usefixtures("no_residue")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_list_open_and_save(tmp_path: Path, method: str) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(str(number))
    target = f"file://{tmp_path}/out"
    graph = (
        FSSpecFileLister(f"file://{tmp_path}")
        .sharding_filter()
        .open_files_by_fsspec()
        .map(lambda pair: (f"{target}/{pair[0][-5:]}", pair[1].read()))
        .save_by_fsspec()
    )
    with DataLoader2(graph, reading_service=MultiProcessingReadingService(2, multiprocessing_context=method)) as loader:
        assert list(loader) == [f"{target}/{number}.txt" for number in range(4)]
    assert sorted(path.read_text() for path in (tmp_path / "out").iterdir()) == list("0123")
