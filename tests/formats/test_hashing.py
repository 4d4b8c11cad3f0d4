from __future__ import annotations

import hashlib
import io
from typing import Any

import pytest
from one_way import OneWay
from stage_contract import check_everywhere, check_stage

from pipes.errors import DataError, HashError
from pipes.iter import FileOpener, IterableWrapper
from pipes.utils import StreamWrapper

HASHES = {name: hashlib.sha256(name.encode() * 9).hexdigest() for name in "abc"}


def pairs(*names: str) -> IterableWrapper[Any]:
    return IterableWrapper([(name, name.encode() * 9) for name in names])


def test_contract() -> None:
    check_stage(lambda: pairs(*"abc").check_hash(HASHES), [(name, name.encode() * 9) for name in "abc"])
    hashes = {str(x): hashlib.sha256(b"x" * x).hexdigest() for x in range(14)}
    check_everywhere(lambda source: source.map(lambda x: (str(x), b"x" * x)).check_hash(hashes))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, str, io.BytesIO, StreamWrapper])
def test_all_kinds_of_data(kind: Any) -> None:
    data = b"a" * 9

    def made() -> Any:
        if kind is str:
            return data.decode()
        return StreamWrapper(io.BytesIO(data)) if kind is StreamWrapper else kind(data)

    for hash_type in ("sha256", "md5"):
        hashes = {"a": hashlib.new(hash_type, data).hexdigest().upper()}
        [(name, found)] = IterableWrapper([("a", made())], deepcopy=False).check_hash(hashes, hash_type)
        assert name == "a"
        assert (found.read() if hasattr(found, "read") else found) == (made() if kind is str else data)


def test_a_stream_goes_back_to_where_it_stood() -> None:
    stream = io.BytesIO(b"--" + b"a" * 9)
    stream.seek(2)
    source = IterableWrapper([("a", stream)], deepcopy=False)
    assert [data.tell() for _, data in source.check_hash(HASHES)] == [2]
    assert [data.tell() for _, data in source.check_hash(HASHES, rewind=False)] == [11]


def test_a_stream_that_goes_forward_only() -> None:
    def source() -> Any:
        return IterableWrapper([("a", OneWay(b"a" * 9))], deepcopy=False)

    with pytest.raises(ValueError, match=r"a: its stream goes forward only.*read_from_stream"):
        list(source().check_hash(HASHES))
    assert len(list(source().check_hash(HASHES, rewind=False))) == 1
    assert list(source().read_from_stream().check_hash(HASHES)) == [("a", b"a" * 9)]


def test_files(tmp_path: Any) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"a" * 9)
    opened = FileOpener([str(path)], "rb").check_hash({str(path): HASHES["a"]})
    assert [stream.read() for _, stream in opened] == [b"a" * 9]
    with pytest.raises(TypeError, match="the stream gives str; open it in binary mode"):
        list(FileOpener([str(path)], "r").check_hash({str(path): HASHES["a"]}))


@pytest.mark.parametrize("hashes", [{}, {**HASHES, "b": HASHES["a"]}])
def test_another_hash_or_none_names_the_file(hashes: dict[str, str]) -> None:
    what = "b: its sha256 hash .* does not match the expected" if hashes else "Unspecified hash for file b"
    with pytest.raises(HashError, match=what) as caught:
        list(pairs("b").check_hash(hashes))
    assert isinstance(caught.value, DataError)
    assert isinstance(caught.value, RuntimeError)
    assert "in stage 1:HashChecker" in caught.value.__notes__[0]
    assert "on element 'b'" in caught.value.__notes__[0]


def test_skip_leaves_out_what_is_damaged() -> None:
    pipe = pairs(*"abc").check_hash({**HASHES, "b": HASHES["a"]}, on_error="skip")
    assert [name for name, _ in pipe] == ["a", "c"]
    assert len(pairs(*"abc").check_hash(HASHES)) == 3
    with pytest.raises(TypeError, match="may skip"):
        len(pipe)


def test_wrong_settings_and_elements() -> None:
    with pytest.raises(ValueError, match="hash_type='sha1' is none of 'sha256', 'md5'"):
        pairs("a").check_hash(HASHES, "sha1")
    with pytest.raises(TypeError, match="hash_dict must be a dict of names and hashes, not a list"):
        pairs("a").check_hash(["x"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pairs"):
        list(IterableWrapper(["a"]).check_hash(HASHES))
    with pytest.raises(TypeError, match="a: its data is bytes, a str or a binary stream, not int"):
        list(IterableWrapper([("a", 5)]).check_hash(HASHES))
