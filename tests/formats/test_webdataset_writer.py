"""`.save_to_webdataset`: samples come back as they were, shards are whole or not there, and equal to the byte."""

from __future__ import annotations

import io
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import loader_of, through_json
from one_way import OneWay
from stage_contract import saved, start

from pipes.datapipe import IterDataPipe
from pipes.errors import DataError
from pipes.formats.decode import decode
from pipes.formats.tar import TarReader
from pipes.formats.webdataset import group_samples
from pipes.formats.webdataset_writer import members_of, pack
from pipes.iter import FileLister, IterableWrapper


def sample(number: int) -> dict[str, Any]:
    return {"__key__": f"d.1/{number:04d}", "cls": number, "seg.json": {"n": number}, "txt": f"ü{number}", "bin": b""}


def samples(count: int) -> IterDataPipe[Any]:
    return IterableWrapper(range(count)).map(sample)


def read_back(folder: Path) -> list[dict[str, Any]]:
    found = FileLister(str(folder), "*.tar").open_files("rb").load_from_tar().webdataset().map(decode)
    return [{**each, "__key__": each["__key__"].partition(".tar/")[2]} for each in found]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_samples_come_back_as_they_were_in_shards_of_a_size(tmp_path: Path) -> None:
    names = list(samples(10).save_to_webdataset(tmp_path / "new" / "folder", "train", maxcount=4))
    folder = tmp_path / "new" / "folder"
    assert names == [f"{folder}/train-000-{shard:06d}.tar" for shard in range(3)]
    assert sorted(contents(folder)) == [Path(name).name for name in names]
    assert read_back(folder) == [sample(number) for number in range(10)]
    assert all(len(data) % 10240 == 0 for data in contents(folder).values())


def test_a_shard_ends_with_the_sample_that_reaches_its_size(tmp_path: Path) -> None:
    pipe = IterableWrapper([{"__key__": str(n), "bin": bytes(1000)} for n in range(5)])
    list(pipe.save_to_webdataset(tmp_path, maxsize=3 * 1024))
    counts = [len(list(TarReader(io.BytesIO(path.read_bytes()), "t"))) for path in sorted(tmp_path.iterdir())]
    assert counts == [2, 2, 1]
    assert list(IterableWrapper([]).save_to_webdataset(tmp_path / "none")) == []
    assert not (tmp_path / "none").exists()


def test_equal_samples_give_equal_bytes_without_owner_and_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        list(samples(5).save_to_webdataset(tmp_path / folder))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    with tarfile.open(tmp_path / "a" / "shard-000-000000.tar") as archive:
        for info in archive:
            assert (info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode) == (0, 0, 0, "", "", 0o644)


keys = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0/."), min_size=1, max_size=60), min_size=1,
                max_size=4).map("/".join)  # fmt: skip
fields = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=60).filter(
    lambda field: not field.startswith((".", "__"))
)


@given(st.lists(st.tuples(keys, st.dictionaries(fields, st.binary(max_size=1500), min_size=1, max_size=3)), max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_names_and_bytes_come_back(found: list[tuple[str, dict[str, bytes]]]) -> None:
    wanted: list[dict[str, Any]] = []
    for key, values in found:
        if not wanted or wanted[-1]["__key__"] != key:
            wanted.append({"__key__": key, **values})
    data = b"".join(pack(name, value) for each in wanted for name, value in members_of(each)) + bytes(1024)
    reader = TarReader(OneWay(data, 700), "a.tar")
    assert list(group_samples((member.name, member.data) for member in reader)) == wanted


def test_a_shard_ends_with_two_zero_blocks_and_keeps_names_that_are_no_utf8(tmp_path: Path) -> None:
    for count in range(1, 21):
        pipe = IterableWrapper([{"__key__": f"k\udcff{n}", "bin": bytes([n])} for n in range(count)])
        (name,) = pipe.save_to_webdataset(tmp_path)
        data = Path(name).read_bytes()
        assert len(data) % 10240 == 0
        assert not any(data[-1024:])
    assert [each["__key__"] for each in read_back(tmp_path)] == [f"k\udcff{n}" for n in range(20)]


def test_the_webdataset_package_reads_them(tmp_path: Path) -> None:
    tariterators = pytest.importorskip("webdataset.tariterators")
    names = list(samples(7).save_to_webdataset(tmp_path, maxcount=3))
    # Its opener of names leaves files to the garbage collector, which is a warning.
    opened = [{"url": name, "stream": io.BytesIO(Path(name).read_bytes())} for name in names]
    found = list(tariterators.group_by_keys(tariterators.tar_file_expander(opened)))
    assert [(each["__key__"], each["cls"], each["seg.json"], each["txt"].decode()) for each in found] == [
        (f"d.1/{n:04d}", b"%d" % n, b'{"n": %d}' % n, f"ü{n}") for n in range(7)
    ]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"txt": "x"}, "needs its key under '__key__'"),
        ({"__key__": 3, "txt": "x"}, "a str; this one has 3"),
        *(({"__key__": key, "txt": "x"}, "a key is a relative path")
          for key in ("", "/abs", "a//b", "../up", "a/../b", "./a", "a.b", "a/b.c", "a/", "a\0b")),
        ({"__key__": "a"}, "has no field"),
        ({"__key__": "a", "__url__": "x"}, "has no field"),
        ({"__key__": "a", "": b""}, "it is empty, or has '/'"),
        ({"__key__": "a", "b/c": b""}, "it is empty, or has '/'"),
        ({"__key__": "a", "b\0c": b""}, "cannot be written"),
        ({"__key__": "a", "txt": b"", ".txt": b""}, "'.txt' twice"),
        ({"__key__": "a", "jpg": 3}, "field 'jpg' does not encode"),
    ],
)  # fmt: skip
def test_a_sample_that_would_not_come_back_is_refused_and_leaves_no_part(
    tmp_path: Path, bad: dict[str, Any], words: str
) -> None:
    pipe = IterableWrapper([sample(0), sample(1), sample(2), bad]).save_to_webdataset(tmp_path, maxcount=2)
    with pytest.raises(DataError, match=words) as caught:
        list(pipe)
    assert "WebDatasetSaver" in caught.value.__notes__[0]
    assert list(contents(tmp_path)) == ["shard-000-000000.tar"]


def test_what_breaks_off_leaves_whole_shards_only(tmp_path: Path) -> None:
    class Stop(BaseException):
        """As KeyboardInterrupt is."""

    def failing(number: int) -> dict[str, Any]:
        if number == 5:
            raise Stop
        return sample(number)

    (tmp_path / "shard-000-000002.tar").write_bytes(b"of an earlier run")
    with pytest.raises(Stop):
        list(IterableWrapper(range(9)).map(failing).save_to_webdataset(tmp_path, maxcount=2))
    found = contents(tmp_path)
    assert sorted(found) == [f"shard-000-{shard:06d}.tar" for shard in range(3)]
    assert found["shard-000-000002.tar"] == b"of an earlier run"


def test_a_resume_goes_on_with_the_next_shard(tmp_path: Path) -> None:
    whole = list(samples(9).shuffle(4).save_to_webdataset(tmp_path / "a", maxcount=2))
    first = start(samples(9).shuffle(4).save_to_webdataset(tmp_path / "a", maxcount=2))
    names = list(islice(first, 2))
    state = saved(first)
    whole_run = list(start(samples(9).shuffle(4).save_to_webdataset(tmp_path / "a", maxcount=2)))
    expected = contents(tmp_path / "a")
    rest = list(start(samples(9).shuffle(4).save_to_webdataset(tmp_path / "a", maxcount=2), state))
    assert whole == whole_run == names + rest
    assert contents(tmp_path / "a") == expected


@pytest.mark.usefixtures("no_residue")
def test_workers_write_shards_of_their_own_and_resume(tmp_path: Path) -> None:
    def graph(folder: str) -> IterDataPipe[Any]:
        return (
            IterableWrapper(range(23)).sharding_filter().map(sample).save_to_webdataset(tmp_path / folder, maxcount=3)
        )

    with loader_of(graph("a"), 2) as loader:
        names = list(loader)
    assert sorted(Path(name).name for name in names) == sorted(contents(tmp_path / "a"))
    assert {Path(name).name[:9] for name in names} == {"shard-000", "shard-001"}
    assert sorted(each["cls"] for each in read_back(tmp_path / "a")) == list(range(23))
    with loader_of(graph("b"), 2) as loader:
        given = list(islice(iter(loader), 3))
        state = through_json(loader.state_dict())
    with loader_of(graph("b"), 2) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    assert [Path(name).name for name in given + rest] == [Path(name).name for name in names]
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


@pytest.mark.parametrize("settings", [{"maxcount": 0}, {"maxsize": 0}, {"prefix": "a/b"}, {"prefix": "a\0b"}])
def test_wrong_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"maxcount=|prefix="):
        samples(1).save_to_webdataset(tmp_path, **settings)
