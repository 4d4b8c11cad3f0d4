"""`.load_from_tar`: members as streams, exact resume at every member."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from one_way import OneWay
from stage_contract import check_stage, saved, start
from tars import HARD_STEM, hard_archive, make_tar

from pipes.datapipe import IterDataPipe
from pipes.errors import ChangedDataError, DataError, StateError, TruncatedError
from pipes.formats.archives import TarArchiveLoader, member_path
from pipes.formats.decode import decode
from pipes.formats.webdataset import WebDataset
from pipes.iter import FileLister, FileOpener, IterableWrapper
from pipes.utils import StreamWrapper


def make(count: int, first: int = 0) -> bytes:
    members = []
    for number in range(first, first + count):
        stem = f"d/{'long' * (number % 2 * 30)}{number:03d}"
        members += [(f"{stem}.txt", f"text {number}".encode()), (f"{stem}.cls", str(number).encode())]
    return make_tar(members, tarfile.PAX_FORMAT)


def contents(element: tuple[str, Any]) -> tuple[str, bytes]:
    path, stream = element
    return path, stream.read()


def in_memory(path: str) -> tuple[str, Any]:
    # Where a run may be dropped with an archive open, a file would be collected with a ResourceWarning.
    return path, io.BytesIO(Path(path).read_bytes())


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for number, count in enumerate((3, 0, 1, 4)):
        packed = make(count, 10 * number)
        (tmp_path / f"{number}.tar{'.gz' if number == 3 else ''}").write_bytes(
            gzip.compress(packed) if number == 3 else packed
        )
    return tmp_path


def members_of(folder: Path) -> list[tuple[str, bytes]]:
    found = []
    for path in sorted(folder.iterdir()):
        with tarfile.open(path) as archive:
            for member in archive:
                stream = archive.extractfile(member)
                assert stream is not None
                found.append((f"{path}/{member.name}", stream.read()))
    return found


@pytest.mark.parametrize("mode", ["r:*", "r|*"])
def test_it_keeps_every_promise_of_a_stage(shards: Path, mode: str) -> None:
    folder = str(shards)
    check_stage(
        lambda: FileLister(folder).open_files("rb").load_from_tar(mode).map(contents),
        [[path, data] for path, data in members_of(shards)],
    )


def test_samples_keep_every_promise_of_a_stage(shards: Path) -> None:
    folder = str(shards)
    check_stage(lambda: FileLister(folder).open_files("rb").load_from_tar().webdataset().map(decode).batch(2))


def test_many_archives_behind_shuffle_and_shards(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02d}.tar").write_bytes(make(2, 10 * number))
    folder = str(tmp_path)

    def graph() -> IterDataPipe[Any]:
        names = FileLister(folder, "*.tar").shuffle(buffer_size=7).sharding_filter()
        return names.map(in_memory).load_from_tar().webdataset().map(decode).shuffle(buffer_size=10).batch(3)

    check_stage(graph, epochs=1, streams=(2,))
    keys = sorted(sample["cls"] for batch in graph() for sample in batch)
    assert keys == sorted(10 * number + item for number in range(40) for item in range(2))


def test_members_stay_readable_in_a_shuffle_buffer(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(make(20))
    kept = list(FileOpener([str(tmp_path / "a.tar")], "rb").load_from_tar().shuffle(buffer_size=10))
    assert sorted(stream.read() for path, stream in kept if path.endswith(".cls")) == sorted(
        str(number).encode() for number in range(20)
    )


@pytest.mark.parametrize("step", [1, 511, 513, 1 << 20])
def test_hard_names_as_webdataset_from_a_stream_that_cannot_seek(step: int) -> None:
    pipe = IterableWrapper([("a.tar", OneWay(hard_archive(), step))], deepcopy=False).load_from_tar().then(WebDataset)
    samples = [{k: v if k == "__key__" else v.read() for k, v in sample.items()} for sample in pipe]
    assert samples == [
        {"__key__": f"a.tar/{HARD_STEM}", "bin": b"", "seg.json": b'{"k":1}'},
        {"__key__": "a.tar/v1.2/s0002", "bin": b"\0\1", "seg.json": b"[]"},
    ]


def test_what_is_skipped_is_counted() -> None:
    run = start(IterableWrapper([("a.tar", io.BytesIO(hard_archive()))]).load_from_tar())
    assert len(list(run)) == 4
    left_out = run.context.tallies.counts()["1:TarArchiveLoader"].left_out
    assert dict(left_out) == {"directory": 1, "symbolic link": 1}


def test_the_archive_is_closed_after_its_members_and_when_iteration_ends_early(tmp_path: Path) -> None:
    streams = [StreamWrapper(io.BytesIO(make(2))) for _ in range(2)]
    pipe = IterableWrapper([("a.tar", stream) for stream in streams], deepcopy=False).load_from_tar()
    iterator = iter(pipe)
    list(islice(iterator, 5))
    assert [stream.closed for stream in streams] == [True, False]
    iterator.close()  # type: ignore[attr-defined]
    assert streams[1].closed


@pytest.mark.parametrize("cut", [0, 1, 700, 2000, 2048])
def test_a_cut_archive_is_an_error_after_the_members_that_names_it(tmp_path: Path, cut: int) -> None:
    (tmp_path / "good.tar").write_bytes(make(1))
    (tmp_path / "z.tar").write_bytes(make(1)[:cut])
    iterator = iter(FileLister(str(tmp_path)).open_files("rb").load_from_tar())
    names = [next(iterator)[0] for _ in range(2 + (cut >= 518) + (cut >= 1537))]
    assert len(names) == len(set(names))
    with pytest.raises(TruncatedError, match=r"z\.tar: ") as caught:
        next(iterator)
    assert ("empty archive" in str(caught.value)) is (cut == 0)
    assert "TarArchiveLoader" in caught.value.__notes__[0]


def test_wrong_elements_and_settings(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no archive" * 200)
    with pytest.raises(DataError, match="not a tar archive"):
        list(FileOpener([str(tmp_path / "a.tar")], "rb").load_from_tar())
    with pytest.raises(TypeError, match="binary mode"):
        list(FileOpener([str(tmp_path / "a.tar")]).load_from_tar())
    with pytest.raises(TypeError, match="should be tuple"):
        list(IterableWrapper(["a.tar"]).load_from_tar())
    with pytest.raises(ValueError, match="mode 'w'"):
        TarArchiveLoader([], mode="w")
    assert len(TarArchiveLoader([], length=7)) == 7
    with pytest.raises(TypeError, match=r"TarArchiveLoader.*length="):
        len(TarArchiveLoader([]))


def test_members_can_be_selected_and_archives_concatenated(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(make(1) + make(1, 1))
    pipe = FileOpener([str(tmp_path / "a.tar")], "rb")
    chosen = pipe.load_from_tar(select=lambda name: name.endswith(".cls"), concatenated=True).map(contents)
    assert [data for _, data in chosen] == [b"0", b"1"]


def test_a_resume_opens_only_the_archive_it_stands_in_and_seeks(tmp_path: Path) -> None:
    opened: list[str] = []
    given = 0

    class Counting(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal given
            data = super().read(size)
            given += len(data)
            return data

    large = make_tar((f"{number}.bin", bytes(1 << 20)) for number in range(4))

    def fetch(name: str) -> tuple[str, Any]:
        opened.append(name)
        return name, Counting(large)

    def graph() -> IterDataPipe[Any]:
        return IterableWrapper([f"{number}.tar" for number in range(10)]).map(fetch).load_from_tar()

    run = start(graph())
    list(islice(iter(run), 4 * 8 + 3))
    state = saved(run)
    assert state["2:TarArchiveLoader"]["inside"] == {"object": "", "offset": 3 * ((1 << 20) + 512)}
    opened.clear()
    given = 0
    assert next(iter(start(graph(), state)))[0] == "8.tar/3.bin"
    assert opened == ["8.tar"]
    assert given < 2 << 20


def test_a_resume_is_refused_when_the_archive_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(make(8))

    def graph() -> IterDataPipe[Any]:
        return FileOpener([str(path)], "rb").load_from_tar()

    run = start(graph())
    list(islice(iter(run), 3))
    state = saved(run)
    run.context.close()
    path.write_bytes(make(80))
    with pytest.raises(ChangedDataError, match=r"a\.tar: the state was saved while reading another version"):
        list(start(graph(), state))


@pytest.mark.parametrize(
    ("field", "value"), [("inside", 3), ("inside", {"offset": -1}), ("inside", {"offset": 0, "records": {"path": 1}})]
)
def test_damaged_states_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    graph: Callable[[], IterDataPipe[Any]] = lambda: IterableWrapper([("a.tar", io.BytesIO(make(3)))]).load_from_tar()  # noqa: E731
    run = start(graph())
    list(islice(iter(run), 3))
    state = saved(run)
    state["1:TarArchiveLoader"][field] = value
    with pytest.raises(StateError, match="damaged"):
        list(start(graph(), json.loads(json.dumps(state))))


@pytest.mark.parametrize(
    ("archive", "member", "path"),
    [
        ("d//a.tar", "m.txt", "d/a.tar/m.txt"),
        ("./a.tar", "./m.txt", "a.tar/m.txt"),
        ("a.tar", "../../m.txt", "a.tar/m.txt"),
        ("a.tar", "/abs/m.txt", "a.tar/abs/m.txt"),
        ("a.tar", "x/..", "a.tar/"),
        ("a.tar", "v1./m.", "a.tar/v1./m."),
        ("s3://b//k/../a.tar", "x//m", "s3://b//k/../a.tar/x/m"),
    ],
)
def test_paths_are_normal_and_below_their_archive(archive: str, member: str, path: str) -> None:
    assert member_path(archive, member) == path
