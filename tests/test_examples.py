"""The examples run by themselves and check their own results; here with less data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.usefixtures("no_residue")
def test_train_from_s3() -> None:
    # The module beside the example is found through the script's own folder.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "01_train_from_s3.py"), "--samples", "2400", "--shards", "8"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the 19 batches after the resume are those that would have come: True" in done.stdout
    assert "samples lost" in done.stdout
