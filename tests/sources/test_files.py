"""Listing and opening local files."""

from __future__ import annotations

import os
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from stage_contract import check_stage, saved, start

from pipes.errors import ChangedDataError, StateError
from pipes.iter import IterableWrapper
from pipes.sources.files import FileLister, FileOpener
from pipes.utils import StreamWrapper

NAMES = ("b.txt", "a.txt", "c.tar", "z/1.txt", "z/y/2.tar", "m/3.txt")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in NAMES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"in {name}\n")
    return tmp_path


def below(root: Path, *names: str) -> list[str]:
    return [str(root / name) for name in names]


def test_files_first_then_folders_each_sorted(tree: Path) -> None:
    assert list(FileLister(str(tree))) == below(tree, "a.txt", "b.txt", "c.tar")
    assert list(FileLister(tree, recursive=True)) == below(
        tree, "a.txt", "b.txt", "c.tar", "m/3.txt", "z/1.txt", "z/y/2.tar"
    )
    assert sorted(FileLister(tree, recursive=True, non_deterministic=True)) == sorted(below(tree, *NAMES))


@pytest.mark.parametrize("masks", ["*.tar", ["*.tar"], ("c*", "2*")])
def test_masks_are_for_the_base_name(tree: Path, masks: Any) -> None:
    assert list(FileLister(str(tree), masks, recursive=True)) == below(tree, "c.tar", "z/y/2.tar")
    assert list(FileLister(str(tree), [], recursive=False)) == below(tree, "a.txt", "b.txt", "c.tar")


def test_roots_may_be_files_lists_and_pipes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert list(FileLister()) == ["./a.txt", "./b.txt", "./c.tar"]
    assert list(FileLister("z", abspath=True)) == below(tree, "z/1.txt")
    assert list(FileLister("a.txt")) == ["a.txt"]
    assert list(FileLister("a.txt", abspath=True)) == below(tree, "a.txt")
    assert list(FileLister("a.txt", "*.tar")) == []
    expected = ["z/1.txt", "m/3.txt", "a.txt"]
    assert list(FileLister(["z", Path("m"), "a.txt"])) == expected
    assert list(FileLister(IterableWrapper(["z", "m", "a.txt"]))) == expected
    assert list(IterableWrapper(["z", "m"]).list_files(masks="3*")) == ["m/3.txt"]


def test_links_to_files_are_listed_and_loops_of_folders_are_not_followed(tree: Path) -> None:
    (tree / "link.txt").symlink_to(tree / "a.txt")
    (tree / "m" / "loop").symlink_to(tree)
    assert list(FileLister(str(tree), recursive=True)) == below(
        tree, "a.txt", "b.txt", "c.tar", "link.txt", "m/3.txt", "z/1.txt", "z/y/2.tar"
    )


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(str(tmp_path)) + b"/\xff.txt")).write_text("x")
    except OSError:
        pytest.skip("the file system refuses such names")

    def names() -> FileLister:
        return FileLister(str(tmp_path))

    assert [os.fsencode(name)[-5:] for name in names()] == [b"\xff.txt"]
    assert [stream.read() for _, stream in names().open_files()] == ["x"]
    run = start(names())
    next(iter(run))
    assert list(start(names(), saved(run))) == []


def test_a_folder_that_cannot_be_read_warns_and_raises(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.warns(UserWarning, match="cannot list .*missing"), pytest.raises(FileNotFoundError) as caught:
        list(FileLister(missing))
    assert "0:FileLister" in caught.value.__notes__[0]
    with pytest.warns(UserWarning, match="cannot list"), pytest.raises(OSError, match="missing"):
        list(IterableWrapper([missing]).list_files())


def test_listers_keep_every_promise_of_a_stage(tree: Path) -> None:
    folder = str(tree)
    names = below(tree, "a.txt", "b.txt", "c.tar", "m/3.txt", "z/1.txt", "z/y/2.tar")
    check_stage(lambda: FileLister(folder, recursive=True), names)
    roots = [folder, folder + "/m", folder + "/z"]
    check_stage(
        lambda: IterableWrapper(roots).list_files("*.t*"),
        below(tree, "a.txt", "b.txt", "c.tar", "m/3.txt", "z/1.txt"),
    )


def test_openers_keep_every_promise_of_a_stage(tree: Path) -> None:
    folder = str(tree)

    def read(element: tuple[str, Any]) -> str:
        return str(element[1].read())

    check_stage(lambda: FileLister(folder).open_files().map(read), ["in a.txt\n", "in b.txt\n", "in c.tar\n"])


@pytest.mark.parametrize("pipe", [False, True])
def test_a_resume_over_other_files_is_refused(tree: Path, pipe: bool) -> None:
    def graph() -> FileLister:
        return FileLister(IterableWrapper([str(tree)]) if pipe else str(tree))

    run = start(graph())
    next(iter(run))
    state = saved(run)
    (tree / "aa.txt").touch()
    with pytest.raises(ChangedDataError, match=r"lists 4 names .*saved with 3 "):
        list(start(graph(), state))
    (tree / "aa.txt").unlink()
    assert list(start(graph(), state)) == below(tree, "b.txt", "c.tar")


def test_a_restore_lists_only_for_names_that_are_wanted(tree: Path) -> None:
    pipe = FileLister(str(tree)).shuffle(buffer_size=2)
    state = saved(start(pipe))
    listed: list[str] = []
    inner = pipe.datapipe.names
    pipe.datapipe.names = lambda root: (listed.append(root), inner(root))[1]
    run = start(pipe, state)
    assert listed == []
    assert sorted(run) == below(tree, "a.txt", "b.txt", "c.tar")
    assert listed == [str(tree)]


def test_damaged_states_are_refused(tree: Path) -> None:
    run = start(FileLister(str(tree)))
    next(iter(run))
    state = saved(run)
    state["0:FileLister"]["at"] = 9
    with pytest.raises(StateError, match="damaged"):
        list(start(FileLister(str(tree)), state))


def test_lengths(tree: Path) -> None:
    assert len(FileLister(str(tree), length=3)) == 3
    with pytest.raises(TypeError, match="FileLister"):
        len(FileLister(str(tree)))
    assert len(FileOpener(["a", "b"])) == 2
    assert len(FileOpener(["a", "b"], length=5)) == 5
    with pytest.raises(TypeError, match="FileLister"):
        len(FileLister(str(tree)).open_files())


def test_modes_and_encodings(tree: Path) -> None:
    names = below(tree, "a.txt")
    for mode, kind in (("r", str), ("rt", str), ("t", str), ("rb", bytes), ("b", bytes)):
        [(name, stream)] = list(FileOpener(names, mode))
        assert (name, type(stream), type(stream.read())) == (names[0], StreamWrapper, kind)
        stream.close()
    (tree / "a.txt").write_bytes("é".encode("latin-1"))
    [(_, stream)] = list(FileOpener(names, encoding="latin-1"))
    assert stream.read() == "é"
    stream.close()
    with pytest.raises(ValueError, match="Invalid mode 'w'"):
        FileOpener(names, "w")
    with pytest.raises(ValueError, match="takes no encoding"):
        FileOpener(names, "rb", "utf-8")


def test_what_cannot_be_opened_names_the_stage(tree: Path) -> None:
    with pytest.raises(TypeError, match="a file name must be str, not int"):
        list(FileOpener([3]))
    for name, error in (("missing", FileNotFoundError), ("z", IsADirectoryError)):
        with pytest.raises(error) as caught:
            list(FileOpener([str(tree / name)]))
        assert "1:FileOpener" in caught.value.__notes__[0]


def test_a_restore_opens_only_what_is_still_wanted(tree: Path) -> None:
    names = below(tree, *NAMES) * 30

    def graph() -> Any:
        return FileOpener(names).shuffle(buffer_size=4)

    run = start(graph())
    for _, stream in islice(iter(run), 100):
        stream.close()
    state = saved(run)
    opened: list[str] = []
    again = graph()
    opener = again.datapipe
    inner = opener.opened
    opener.opened = lambda name: (opened.append(name), inner(name))[1]
    rest = start(again, state)
    assert len(opened) == 4
    for _, stream in rest:
        stream.close()
    assert len(opened) == len(names) - 100
    for _, stream in run:
        stream.close()


def test_pipes_pickle(tree: Path) -> None:
    pipe = pickle.loads(pickle.dumps(FileLister(tree, "a*").open_files()))
    assert [stream.read() for _, stream in pipe] == ["in a.txt\n"]
    assert "FileLister" in repr(pipe)
    assert "masks='a*'" in repr(pipe)
