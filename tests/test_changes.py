"""A resume over changed data is refused, and the error names what changed; or goes on over it, when told so."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from loading import loader_of, take, through_json

from pipes import IterDataPipe
from pipes.errors import ChangedDataError, StateError
from pipes.iter import FileLister, IterableWrapper
from pipes.sources.listing import Listing


def archive(size: int = 3) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = size
            file.addfile(member, io.BytesIO(b"x" * size))
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(6):
        (tmp_path / f"{number}.tar").write_bytes(archive())
    return tmp_path


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one more": (lambda folder: (folder / "9.tar").write_bytes(archive()), r"lists 7 names .*saved with 6 \(digest"),
    "one less": (lambda folder: (folder / "5.tar").unlink(), "lists 5 names .*saved with 6 "),
    "another name": (lambda folder: (folder / "5.tar").rename(folder / "7.tar"), r"lists 6 names \(digest (\w+)\)"),
    "another size": (lambda folder: (folder / "5.tar").write_bytes(archive(6000)), r"lists 6 names \(digest (\w+)\)"),
    "another time": (
        lambda folder: touch(folder / "5.tar"),
        "lists the 6 names that the state was saved with, of the same sizes, but changed at other times",
    ),
}


def names(root: Any) -> IterDataPipe[Any]:
    return FileLister(root).sharding_filter().batch(1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("of_pipe", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_files_that_were_listed(folder: Path, change: str, of_pipe: bool, workers: int) -> None:
    root: Any = IterableWrapper([str(folder)]) if of_pipe else str(folder)
    with loader_of(names(root), workers, 2, snapshot_every=1) as loader:
        whole = list(loader)
        loader.seed(3)
        take(iter(loader), 3)
        state = through_json(loader.state_dict())
    with loader_of(names(root)) as loader:
        loader.load_state_dict(state)
        assert list(loader) == whole[3:]
    do, message = CHANGES[change]
    do(folder)
    with loader_of(names(root), workers) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ChangedDataError, match=message) as caught:
            list(loader)
        assert 'load_state_dict(state, on_changed_data="warn")' in str(caught.value)
    told = f"{message}.*going on over it, so elements may come twice or never"
    with pytest.warns(UserWarning, match=told), loader_of(names(root), workers) as loader:  # noqa: PT031
        loader.load_state_dict(state, on_changed_data="warn")
        rest = list(loader)
    assert len(rest) == len(list(folder.iterdir())) - 3


@pytest.mark.parametrize("change", [touch, lambda path: path.write_bytes(archive() + bytes(512))])
def test_an_archive_that_is_being_read(folder: Path, change: Callable[[Path], Any]) -> None:
    def graph() -> IterDataPipe[Any]:
        return IterableWrapper([str(folder / "0.tar")]).open_files("rb").load_from_tar()

    loader = loader_of(graph())
    assert [name[-5:] for name, _ in take(iter(loader), 2)] == ["0.txt", "1.txt"]
    state = through_json(loader.state_dict())
    change(folder / "0.tar")
    loader = loader_of(graph())
    loader.load_state_dict(state)
    with pytest.raises(
        ChangedDataError, match=r"0\.tar: .* another version of it \(10240 bytes, changed at \d+ ns; now"
    ):
        list(loader)
    loader.load_state_dict(state, on_changed_data="warn")
    with pytest.warns(UserWarning, match=r"0\.tar: the state was saved while reading another version"):
        assert [name[-5:] for name, _ in loader] == ["2.txt", "3.txt"]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ([f"s3://bkt/{n}.tar" for n in range(50)], [f"s3://bkt/{n + (n > 48)}.tar" for n in range(50)]),
        (range(50), range(50, 100)),
        (list(range(50)), list(range(49, -1, -1))),
        (list(range(50)), list(range(51))),
        (tuple(range(50)), tuple(range(1, 51))),
        ({str(n): n for n in range(50)}, {str(n + 1): n for n in range(50)}),
        (["a", "b"], ["a", "c"]),
    ],
)
def test_a_list_in_memory(was: Any, now: Any) -> None:
    loader = loader_of(IterableWrapper(was).batch(2))
    next(iter(loader))
    state = through_json(loader.state_dict())
    loader = loader_of(IterableWrapper(now).batch(2))
    with pytest.raises(StateError, match=r"saved over other data: stage 0:IterableWrapper had .*, and has .* here"):
        loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="saved over other data: stage 0:IterableWrapper had"):
        loader.load_state_dict(state, on_changed_data="warn")
    assert list(loader) == list(IterableWrapper(now).batch(2))[1:]
    with pytest.raises(ValueError, match="on_changed_data must be 'raise' or 'warn', not 'ignore'"):
        loader.load_state_dict(state, on_changed_data="ignore")


def test_a_list_of_what_is_not_plain_is_told_by_its_length() -> None:
    loader = loader_of(IterableWrapper([object() for _ in range(50)]))
    assert loader.state_dict()["graph"]["0:IterableWrapper"] == "iterable=list[50], deepcopy=True"


def test_what_differs_is_a_change() -> None:
    listing = Listing.of(["a"], lambda name: (name, "1"))
    known = listing.describe()
    listing.check(known, "x")
    listing.check(None, "x")
    for other in (
        {**known, "digest": "0"},
        {**known, "count": 2},
        Listing.of(["a"], lambda name: (name, "")).describe(),
    ):
        with pytest.raises(ChangedDataError):
            listing.check(other, "x")


def test_a_listing_is_digested_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    inner = FileLister.identity
    monkeypatch.setattr(FileLister, "identity", lambda self, name: (asked.append(name), inner(self, name))[1])
    loader = loader_of(FileLister(str(folder)).shuffle(2).batch(1), 0, 1)
    for _ in islice(iter(loader), 5):
        loader.state_dict()
    assert len(asked) == 6
