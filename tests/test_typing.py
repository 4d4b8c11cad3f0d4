from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_type_checkers_know_the_element_types_of_chains() -> None:
    # with the settings of `make types`, so that both share one cache; errors in pipes/ itself are its business
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "tests/typing/chains.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("tests")] == []
