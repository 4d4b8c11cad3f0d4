"""Local names and files that are not as they should be: an error that names them, never a hang or short data."""

from __future__ import annotations

import gc
import gzip
import os
import subprocess
import sys
import warnings
import zipfile
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stage_contract import saved, start
from tars import make_tar

from pipes.config import dump_graph, load_graph
from pipes.errors import ChangedDataError, DataError
from pipes.iter import FileLister, FileOpener, IterableWrapper


def opened(path: Path, mode: str = "rb") -> Any:
    return next(iter(FileOpener([str(path)], mode)))[1]


def test_an_empty_folder_gives_nothing_or_an_error(tmp_path: Path) -> None:
    assert list(FileLister(tmp_path)) == []
    with pytest.raises(FileNotFoundError, match=r"holds no file\. Check .* drop strict=True"):
        list(FileLister(tmp_path, strict=True))
    (tmp_path / "a.txt").touch()
    assert len(list(FileLister(tmp_path, strict=True))) == 1
    for root in (str(tmp_path), IterableWrapper([str(tmp_path)])):
        with pytest.raises(FileNotFoundError, match=r"no file that fits '\*\.tar'"):
            list(FileLister(root, "*.tar", strict=True))


def test_a_missing_folder_says_what_to_do(tmp_path: Path) -> None:
    said = "cannot list .*none'.*; check its name and permissions"
    with pytest.warns(UserWarning, match=said), pytest.raises(FileNotFoundError, match="none"):
        list(FileLister(tmp_path / "none"))


@pytest.mark.timeout(20)
def test_fifos_and_devices_are_left_out_of_lists_and_refused_by_openers(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "a.txt").touch()
    with pytest.warns(UserWarning, match="left out") as told:
        assert list(FileLister(tmp_path)) == [str(tmp_path / "a.txt")]
    reasons = [str(warning.message).rpartition(": ")[2] for warning in told]
    assert reasons == ["it is a FIFO, no file", "it is a device, no file"]
    assert list(FileLister(tmp_path, "*.txt")) == [str(tmp_path / "a.txt")]
    for name, kind in (("pipe", "a FIFO"), ("zero", "a device")):
        with pytest.raises(OSError, match=f"{name}.* is {kind}, no file"):
            opened(tmp_path / name)


def test_links_that_lead_nowhere_or_to_themselves_are_listed_once_and_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    assert [Path(name).name for name in FileLister(tmp_path, recursive=True)] == ["a", "b", "lost"]
    for name in ("a", "lost"):
        with pytest.raises(OSError, match=rf"{name}'"):
            opened(tmp_path / name)


@pytest.mark.parametrize("mode", ["rb", "r"])
@pytest.mark.parametrize("change", ["cut", "continued", "rewritten"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, change: str, mode: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 1_000_000)
    os.utime(path, ns=(10**18, 10**18))
    for step in (-1, 200_000):
        stream = opened(path, mode)
        assert len(stream.read(10)) == 10
        if change == "cut":
            os.truncate(path, 500_000)
        elif change == "continued":
            with path.open("ab") as file:
                file.write(b"y")
        else:
            with path.open("r+b") as file:
                file.write(b"z" * 1_000_000)
        with pytest.raises(ChangedDataError, match=r"a\.txt' changed while it was read"):
            deque(iter(partial(stream.read, step), stream.read(0)), maxlen=0)
        stream.close()
        path.write_bytes(b"x" * 1_000_000)
        os.utime(path, ns=(10**18, 10**18))


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 1_000_000)
    stream = opened(path)
    stream.read(1)
    (tmp_path / "b.txt").write_bytes(b"y")
    os.replace(tmp_path / "b.txt", path)
    assert stream.read() == b"x" * 999_999
    stream.close()


def test_streams_seek_and_read_as_those_of_open(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("één\nzwei\n")
    (tmp_path / "empty").touch()
    assert opened(tmp_path / "empty").read() == b""
    assert opened(tmp_path / "empty", "r").readlines() == []
    stream = opened(path, "r")
    assert (stream.mode, stream.file_obj.name) == ("r", str(path))
    assert list(stream) == ["één\n", "zwei\n"]
    stream = opened(path)
    assert stream.seek(-5, 2), stream.read() == b"zwei\n"
    assert (stream.seek(0), stream.readline(), stream.tell()) == (0, "één\n".encode(), 6)


def names(opened: Any) -> list[str]:
    found = []
    for name, stream in opened:
        stream.close()
        found.append(name)
    return found


def test_names_that_are_not_utf_8_survive_state_yaml_and_print(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(str(tmp_path)) + b"/\xff")
    try:
        os.mkdir(folder)
    except OSError:
        pytest.skip("the file system refuses such names")
    for name in (b"/\xfe.txt", b"/a.txt"):
        Path(os.fsdecode(os.fsencode(folder) + name)).write_text("x")

    def graph() -> Any:
        return FileLister(folder).open_files()

    run = start(graph())
    next(iter(run))[1].close()
    [(name, stream)] = start(graph(), saved(run))
    with stream:
        assert (os.fsencode(name)[-6:], stream.read()) == (b"/\xfe.txt", "x")
    repr(graph()).encode()
    assert names(load_graph(dump_graph(graph()))) == names(graph())
    with pytest.raises(FileNotFoundError) as caught:
        opened(Path(folder, "none"))
    str(caught.value).encode()


def test_names_that_are_too_long_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"too long: '.*x{255}"):
        opened(tmp_path / ("x" * 300))


def test_a_folder_where_a_file_is_expected(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        opened(tmp_path)


def test_permission_denied_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    path.chmod(0)
    code = (
        "import os, sys, warnings\n"
        "from pipes.iter import FileLister, FileOpener\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "warnings.simplefilter('ignore')\n"
        "for pipe in (FileOpener([sys.argv[1] + '/a.txt']), FileLister(sys.argv[1])):\n"
        "    try: list(pipe)\n"
        "    except PermissionError as error: print(error)\n"
    )
    tmp_path.chmod(0)
    try:
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    finally:
        tmp_path.chmod(0o700)
    first, second = done.stdout.splitlines()
    assert str(path) in first
    assert str(tmp_path) in second


@pytest.mark.parametrize("mode", ["r", "rb"])
def test_streams_in_cycles_close_without_a_warning(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(20):
            cycle: list[Any] = [opened(path, mode)]
            cycle.append(cycle)
            del cycle
        gc.collect()
    assert [str(each.message) for each in told] == []
    assert str(path) not in [file.path for file in psutil.Process().open_files()]


def _write_formats(folder: Path) -> None:
    numbers = np.random.default_rng(0).random(100_000)
    (folder / "a.tar").write_bytes(make_tar([(f"{n}.bin", numbers[n : n + 100].tobytes()) for n in range(1000)]))
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        for n in range(1000):
            archive.writestr(f"{n}.bin", numbers[n : n + 100].tobytes())
    (folder / "a.csv").write_text("".join(f"{n},{number}\n" for n, number in enumerate(numbers)))
    (folder / "a.jsonl").write_text("".join(f'{{"{n}": {number}}}\n' for n, number in enumerate(numbers)))
    (folder / "a.txt.gz").write_bytes(gzip.compress(numbers.tobytes()))
    np.save(folder / "a.npy", numbers)
    pq.write_table(pa.table({"a": numbers}), folder / "a.parquet", row_group_size=10_000)


READERS: dict[str, Callable[[str], Any]] = {
    "a.tar": lambda name: FileOpener([name], "rb").load_from_tar(),
    "a.zip": lambda name: FileOpener([name], "rb").load_from_zip(),
    "a.csv": lambda name: FileOpener([name], "rb").parse_csv(),
    "a.jsonl": lambda name: FileOpener([name], "rb").parse_jsonl(),
    "a.txt.gz": lambda name: FileOpener([name], "rb").decompress().read_from_stream(1000),
    "a.npy": lambda name: FileOpener([name], "rb").load_npy(rows=True),
    "a.parquet": lambda name: IterableWrapper([name]).load_parquet("batches"),
}


def test_no_format_ends_well_over_a_file_that_changes(tmp_path: Path) -> None:
    _write_formats(tmp_path)
    for name, reader in READERS.items():
        path = tmp_path / name
        whole = path.read_bytes()
        for change in ("cut", "continued", "zeros"):
            path.write_bytes(whole)
            os.utime(path, (1, 1))
            records = iter(reader(str(path)))
            next(records)
            if change == "cut":
                os.truncate(path, len(whole) // 2)
            else:
                with path.open("ab" if change == "continued" else "r+b") as file:
                    file.write(bytes(1) if change == "continued" else whole[: len(whole) // 2] + bytes(len(whole) // 2))
            with pytest.raises(DataError, match=name):
                deque(records, maxlen=0)
