"""What stages share that read records out of streams."""

from __future__ import annotations

import io
from pathlib import Path

from pipes.formats.records import identity, is_text
from pipes.utils import StreamWrapper


def test_what_tells_versions_apart(tmp_path: Path) -> None:
    class Stored(io.BytesIO):
        etag = '"abc"'

    path = tmp_path / "a"
    path.write_bytes(b"12345")
    with StreamWrapper(path.open("rb")) as stream:
        assert identity(stream) == f"5 bytes, changed at {path.stat().st_mtime_ns} ns"
    assert identity(StreamWrapper(Stored())) == '"abc"'
    assert identity(io.BytesIO(b"12345")) == ""
    assert identity(object()) == ""


def test_text_streams_are_known_under_their_wrappers() -> None:
    assert is_text(StreamWrapper(StreamWrapper(io.StringIO())))
    assert is_text(io.TextIOWrapper(io.BytesIO()))
    assert not is_text(StreamWrapper(io.BytesIO()))
    assert not is_text(object())
