"""The benchmark that is to run on a borrowed accelerator runs here too, small, so that it works when it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.usefixtures("no_residue")
@pytest.mark.parametrize("options", [[], ["--fake"]], ids=["device", "fake"])
def test_the_device_benchmark_runs(options: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCHMARKS / "device.py"), "--json", "--workers", "1", *options],
        capture_output=True, text=True, env=environment, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) >= 4
    if options:
        assert all(line["ours"] > 0 for line in lines)
    else:
        assert lines[-1]["wrong"] == 0
