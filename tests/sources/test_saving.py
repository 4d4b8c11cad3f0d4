"""Saving to local files: whole or not at all, and exact under resume."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from stage_contract import check_stage, saved, start

from pipes.iter import IterableWrapper, Saver
from pipes.loader2 import DataLoader2, MultiProcessingReadingService


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def pairs(folder: Path, count: int = 6) -> list[tuple[str, str]]:
    return [(f"{folder}/x/{number}.txt", f"text {number}") for number in range(count)]


def test_saver_keeps_every_promise_of_a_stage(tmp_path: Path) -> None:
    check_stage(lambda: Saver(pairs(tmp_path)), [path for path, _ in pairs(tmp_path)])
    assert files(tmp_path) == {f"x/{n}.txt": f"text {n}".encode() for n in range(6)}


@pytest.mark.parametrize(
    ("mode", "data"),
    [("w", "é"), ("t", "é"), ("wt", io.StringIO("é")), ("wb", "é".encode()), ("b", bytearray("é".encode())),
     ("wb", memoryview("é".encode())), ("wb", io.BytesIO("é".encode()))],
)  # fmt: skip
def test_text_bytes_and_streams(tmp_path: Path, mode: str, data: Any) -> None:
    pipe = Saver([("é.txt", data)], mode, lambda name: tmp_path / name)
    assert list(pipe) == [str(tmp_path / "é.txt")]
    assert files(tmp_path) == {"é.txt": "é".encode()}
    assert len(pipe) == 1


def test_a_bare_name_is_saved_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("old, and longer")
    assert list(IterableWrapper([("a.txt", "new")]).save_to_disk()) == ["a.txt"]
    assert files(tmp_path) == {"a.txt": b"new"}
    old = os.umask(0o027)
    try:
        list(Saver([("b.txt", "x")]))
    finally:
        os.umask(old)
    assert (tmp_path / "b.txt").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("element", "mode", "error", "match"),
    [
        (("a", b"x"), "w", TypeError, "must be text"),
        (("a", "x"), "wb", TypeError, "must be bytes"),
        (("a", None), "wb", TypeError, "not NoneType"),
        ((3, "x"), "w", TypeError, "path must be str, not int"),
        ("ab", "w", TypeError, "takes pairs"),
        (("", "x"), "w", ValueError, "names no file"),
        (("a/", "x"), "w", ValueError, "names no file"),
        (("../a", "x"), "w", ValueError, r"leads out .* filepath_fn="),
        (("a/../../b", "x"), "w", ValueError, "leads out"),
    ],
)
def test_what_cannot_be_saved_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, element: Any, mode: str, error: type[Exception], match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=match):
        list(Saver([element], mode))
    good = ("good", "x" if mode == "w" else b"x")
    assert list(Saver([element, good], mode, on_error="skip", max_errors=1)) == ["good"]
    assert files(tmp_path) == {"good": b"x"}


def test_modes() -> None:
    for mode in ("r", "a", "x", "w+", ""):
        with pytest.raises(ValueError, match="Invalid mode"):
            Saver([], mode)


def test_a_stream_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    class Failing(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            if self.tell_count:
                raise ConnectionError("cut")
            self.tell_count = 1
            return b"new"

        tell_count = 0

    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(ConnectionError):
        list(Saver([(str(path), Failing())], "wb"))
    assert files(tmp_path) == {"a": b"old"}
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder") as caught:
        list(Saver([(str(tmp_path / "folder"), b"x")], "wb"))
    assert any("while saving" in note for note in caught.value.__notes__)
    assert files(tmp_path) == {"a": b"old"}


def test_a_killed_process_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pipes.iter import Saver\n"
        "class Deadly:\n"
        "    n = 0\n"
        "    def read(self, size):\n"
        "        self.n += 1\n"
        "        if self.n == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return b'x' * size\n"
        "list(Saver([(sys.argv[1] + '/whole', b'x'), (sys.argv[1] + '/half', Deadly())], 'wb'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    left = set(files(tmp_path))
    assert {name for name in left if not name.startswith(".pipes-")} == {"whole"}


def test_a_resume_writes_again_only_what_is_wanted(tmp_path: Path) -> None:
    def graph() -> Any:
        return Saver(pairs(tmp_path, 30)).shuffle(buffer_size=3)

    run = start(graph())
    given = list(islice(iter(run), 20))
    state = saved(run)
    for name in files(tmp_path):
        (tmp_path / name).unlink()
    rest = list(start(graph(), state))
    assert sorted(given + rest) == sorted(path for path, _ in pairs(tmp_path, 30))
    assert sorted(str(tmp_path / name) for name in files(tmp_path)) == sorted(rest)


@pytest.mark.usefixtures("no_residue")
def test_workers_save(tmp_path: Path) -> None:
    graph = IterableWrapper(pairs(tmp_path, 8)).sharding_filter().save_to_disk()
    with DataLoader2(graph, reading_service=MultiProcessingReadingService(2)) as loader:
        assert sorted(loader) == [path for path, _ in pairs(tmp_path, 8)]
    assert len(files(tmp_path)) == 8
