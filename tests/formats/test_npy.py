"""Numpy files as a stage: shapes, dtypes and orders, rows, resume by offset, mapping, damage."""

from __future__ import annotations

import io
import pickle
import tracemalloc
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_server import FaultServer
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from stage_contract import check_stage, saved, start

from pipes.errors import DataError, StateError, TruncatedError
from pipes.formats.npy import NpyReader, read_npy
from pipes.iter import FileLister, IterableWrapper
from pipes.sources.s3_options import S3Options

STRUCTURE = np.dtype([("id", ">i4"), ("place", "<f8", (2,)), ("näme", "U3")])


def saved_array(array: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Stored array in format 3.0", UserWarning)
        np.save(file, array)
    return file.getvalue()


def zipped(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


class Forward(io.RawIOBase):
    """A stream that cannot seek and gives at most `most` bytes a read."""

    def __init__(self, data: bytes, most: int) -> None:
        self.inner, self.most = io.BytesIO(data), most

    def read(self, size: int = -1, /) -> bytes:
        return self.inner.read(min(size, self.most) if size >= 0 else self.most)


def same(left: Any, right: Any) -> bool:
    return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())


DTYPES = arrays_of.array_dtypes() | arrays_of.scalar_dtypes()


@settings(max_examples=50, deadline=None)
@given(
    array=arrays_of.arrays(DTYPES, arrays_of.array_shapes(min_dims=0, min_side=0), fill=st.nothing()),
    most=st.integers(1, 40),
    fortran=st.booleans(),
)
def test_every_array_comes_back(array: Any, most: int, fortran: bool) -> None:
    array = np.asarray(array, order="F" if fortran else "C")
    data = saved_array(array)
    found = read_npy(Forward(data, most), "a")
    assert same(found, array)
    assert found.flags.f_contiguous == array.flags.f_contiguous
    assert same(found, np.load(io.BytesIO(data), allow_pickle=False))
    if array.ndim:
        rows = list(NpyReader(Forward(data, most), "a", rows=True))
        assert len(rows) == len(array)
        assert all(same(row, whole) for row, whole in zip(rows, array, strict=True))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version(version: tuple[int, int]) -> None:
    file = io.BytesIO()
    array = np.zeros(2, [("a", "<i2")])
    np.lib.format.write_array(file, array, version)
    assert same(read_npy(io.BytesIO(file.getvalue()), "a"), array)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "0.npy").write_bytes(saved_array(np.arange(10, dtype=">i4").reshape(5, 2)))
    (tmp_path / "1.npy").write_bytes(saved_array(np.arange(3.0)) + saved_array(np.arange(6).reshape(3, 2, order="F")))
    (tmp_path / "2.npy").write_bytes(saved_array(np.array([(1, (2, 3), "äb")], STRUCTURE)))
    return tmp_path


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_it_keeps_every_promise_of_a_stage(folder: Path, rows: bool, mmap: bool) -> None:
    def make() -> Any:
        pipe = FileLister(str(folder), "*.npy").open_files("rb").load_npy(rows=rows, mmap=mmap)
        return pipe.map(lambda array: [str(array.dtype), repr(array)])

    check_stage(make)
    assert len(list(make())) == (12 if rows else 4)


def test_an_archive_is_one_dict(tmp_path: Path) -> None:
    arrays = {"x": np.arange(6.0).reshape(2, 3), "deep/y": np.zeros((0, 2), ">u2")}
    for number in range(2):
        (tmp_path / f"{number}.npz").write_bytes(zipped(**arrays))
    found = list(FileLister(str(tmp_path), "*.npz").open_files("rb").load_npy(return_path=True))
    assert [path for path, _ in found] == [str(tmp_path / "0.npz"), str(tmp_path / "1.npz")]
    assert all(same(sample[name], array) for _, sample in found for name, array in arrays.items())
    stream = Forward((tmp_path / "0.npz").read_bytes(), 7)
    (copied,) = IterableWrapper([("a.npz", stream)], deepcopy=False).load_npy()
    assert list(copied) == ["x", "deep/y"]

    def make() -> Any:
        pipe = FileLister(str(tmp_path), "*.npz").open_files("rb").load_npy()
        return pipe.map(lambda sample: {name: array.tolist() for name, array in sample.items()})

    check_stage(make)


def test_arrays_may_be_written_unless_they_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(saved_array(np.zeros(3)))
    for mmap in (False, True):
        (array,) = FileLister(str(tmp_path)).open_files("rb").load_npy(mmap=mmap)
        assert array.flags.writeable is not mmap
        assert isinstance(array, np.memmap) is mmap
    with pytest.raises(TypeError, match=r"b.npy: only a local file can be mapped"):
        list(IterableWrapper([("b.npy", io.BytesIO(saved_array(1)))]).load_npy(mmap=True))


def test_a_resume_goes_to_its_row_by_the_offset() -> None:
    with FaultServer({"a.npy": saved_array(np.arange(400_000).reshape(-1, 4))}) as server:
        options = S3Options(endpoint_url=server.url, unsigned=True, client="boto3")
        pipe = IterableWrapper(["s3://bkt/a.npy"]).load_files_by_s3(options=options, read_ahead=0).load_npy(rows=True)
        run = start(pipe)
        elements = iter(run)
        for _ in range(90_000):
            next(elements)
        state = saved(run)
        run.close()
        assert state[run.stage]["inside"]["row"] == 90_000
        server.requests.clear()
        rest = list(start(pipe, state))
        assert len(rest) == 10_000
        assert rest[0].tolist() == [360_000, 360_001, 360_002, 360_003]
        ranges = [request.headers.get("Range") for request in server.requests]
        assert ranges[-1] == f"bytes={128 + 90_000 * 32}-"


def test_a_state_beyond_the_rows_is_refused() -> None:
    with pytest.raises(StateError, match=r"a: the state stands at row 4, and there are 3"):
        list(NpyReader(io.BytesIO(saved_array(np.arange(3))), "a", rows=True, row=4))


def test_memory_of_rows_is_bounded() -> None:
    data = saved_array(np.zeros((4000, 4096), np.uint8))
    tracemalloc.start()
    count = sum(1 for _ in NpyReader(io.BytesIO(data), "a", rows=True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000
    assert peak < 5 << 20


class Trap:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was run",))


def header(text: str, version: int = 1) -> bytes:
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text.encode()


BAD = {
    "empty": (b"", TruncatedError, "z.npy: empty file"),
    "text": (b"1,2,3,4,5", DataError, "z.npy: no .npy file"),
    "objects": (header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}") + pickle.dumps(Trap()), DataError,
                "z.npy: an array of objects is a pickle"),
    "hidden objects": (header("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': ()}"), DataError, "a pickle"),
    "version": (header("", 4), DataError, "z.npy: .npy version 4.0 is unknown"),
    "call": (header("__import__('os').abort()"), DataError, "z.npy: bad .npy header"),
    "deep": (header("(" * 9000), DataError, "z.npy: bad .npy header"),
    "long": (header(" " * 10_001), DataError, "a header of 10001 bytes"),
    "negative": (header("{'descr': '<i4', 'fortran_order': False, 'shape': (-1,)}"), DataError, "bad .npy header"),
    "huge": (header("{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000,)}") + b"abc", TruncatedError,
             "the array has 4000000000000 bytes, and only 3 are there"),
    "axes": (header(f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({'1, ' * 70})}}") + bytes(4), DataError,
             "z.npy: bad .npy header: ValueError"),
    "beyond a word": (header("{'descr': '<i4', 'fortran_order': False, 'shape': (0, 99999999999999999999)}"), DataError,
                      "z.npy: bad .npy header"),
    "keys": (header("{'descr': '<i4'}"), DataError, "bad .npy header: KeyError"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(case: str) -> None:
    data, error, message = BAD[case]
    with pytest.raises(error, match=message):
        list(IterableWrapper([("z.npy", io.BytesIO(data))]).load_npy())
    good = ("good.npy", io.BytesIO(saved_array(7)))
    pipe = IterableWrapper([("z.npy", io.BytesIO(data)), good]).load_npy(on_error="skip", max_errors=1)
    assert [array.tolist() for array in pipe] == [7]


@pytest.mark.parametrize("rows", [False, True])
def test_every_cut_is_an_error(rows: bool, tmp_path: Path) -> None:
    data = saved_array(np.arange(6).reshape(3, 2))
    for size in range(len(data)):
        with pytest.raises(TruncatedError, match=r"z.npy: "):
            list(NpyReader(Forward(data[:size], 64), "z.npy", rows=rows))
    path = tmp_path / "z.npy"
    path.write_bytes(data[:-1])
    with pytest.raises(TruncatedError, match=r"z.npy: the array has 48 bytes, and only 47"):
        list(FileLister(str(tmp_path)).open_files("rb").load_npy(mmap=True, rows=rows))


def bad_archives() -> Iterator[tuple[bytes, str]]:
    good = zipped(x=np.arange(1000))
    yield good[:-30], "z.npz: damaged .npz archive"
    yield b"", "z.npz: damaged .npz archive"
    yield good[:60] + bytes([good[60] ^ 255]) + good[61:], "z.npz"
    for name, body, message in (
        ("x.npy", b"text", "z.npz/x: "),
        ("x.npy", saved_array(1) + b"!", "z.npz/x: there are"),
    ):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, body)
        yield file.getvalue(), message
    directory = good.index(b"PK\1\2")
    yield good[: directory + 8] + b"\1" + good[directory + 9 :], "z.npz: damaged .npz archive: .* encrypted"
    yield good[: directory + 45] + b"\x7f" + good[directory + 46 :], "z.npz: damaged .npz archive"
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as archive:
            archive.writestr("x.npy", saved_array(np.arange(1000)))
        yield file.getvalue()[:60] + bytes(40) + file.getvalue()[100:], "z.npz"
    file = io.BytesIO()
    np.savez(file, x=np.array([Trap()], object), allow_pickle=True)
    yield file.getvalue(), "z.npz/x: an array of objects"


def test_bad_archives_are_named() -> None:
    for data, message in bad_archives():
        with pytest.raises(DataError, match=message):
            list(IterableWrapper([("z.npz", io.BytesIO(data))]).load_npy())
    for setting in ("rows", "mmap"):
        with pytest.raises(DataError, match=r"z.npz: an .npz archive is one element"):
            list(IterableWrapper([("z.npz", io.BytesIO(zipped(x=1)))]).load_npy(**{setting: True}))
    with pytest.raises(DataError, match=r"a.npy: the array has no axes"):
        list(IterableWrapper([("a.npy", io.BytesIO(saved_array(1)))]).load_npy(rows=True))
