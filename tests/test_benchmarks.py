"""Benchmarks that check what they measure, or run elsewhere, run here too, small, so that they work when needed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, *options: str, warn: str = "ignore") -> list[dict[str, Any]]:
    # A GPU would make it large.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [sys.executable, "-W", warn, str(BENCHMARKS / name), "--json", *options],
        capture_output=True, text=True, env=environment, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.usefixtures("no_residue")
@pytest.mark.parametrize("options", [[], ["--fake"]], ids=["device", "fake"])
def test_the_device_benchmark_runs(options: list[str]) -> None:
    lines = run("device.py", "--workers", "1", *options)
    assert len(lines) >= 4
    if options:
        assert all(line["ours"] > 0 for line in lines)
    else:
        assert lines[-1]["wrong"] == 0


def test_columns_pandas_and_rows_give_the_same_tensors() -> None:
    pytest.importorskip("pandas")
    lines = run("columns.py", "--rows", "8000", "--batch-size", "300", "--rounds", "1", warn="default")
    assert [(line["case"], line["peer"]) for line in lines] == [
        (case, peer)
        for case in ("Parquet to tensors", "steps alone")
        for peer in ("pandas", "pandas, tuned", "row-wise Python")
    ]
    assert all(line["ratio"] > 0 for line in lines)


@pytest.mark.usefixtures("no_residue")
@pytest.mark.parametrize(("figure", "expected"), [("echo 12.5", 12.5), ("", None)])
def test_a_peer_that_hangs_is_ended_with_its_workers(
    figure: str, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    peers = importlib.import_module("transport_peers")
    monkeypatch.setattr(peers, "PATIENCE", 0.5)
    hanging = tmp_path / "python"
    hanging.write_text(f"#!/bin/sh\n{figure}\nsleep 300 &\nwait\n")
    hanging.chmod(0o755)
    if expected is None:
        with pytest.raises(RuntimeError, match=r"torchdata 0.9 gave no figure within 0 s"):
            peers.torchdata_09(str(hanging), (2,), torch.float32, 1, 1)
    else:
        assert peers.torchdata_09(str(hanging), (2,), torch.float32, 1, 1) == expected
