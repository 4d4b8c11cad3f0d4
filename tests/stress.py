"""Repeat the tests with the marker `race`, each round with other random choices, and say what ran.

python tests/stress.py --rounds 20
PIPES_STRESS_ROUND=7 python -m pytest -m race -k ...      # one round's choices again
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table


@dataclass
class Repeats:
    """The runs of one test function, with all its parameters."""

    runs: int = 0
    failures: int = 0
    seconds: float = 0.0


def add(report: Path, sums: dict[str, Repeats]) -> list[str]:
    """Add the results of one round; return the names of what failed."""
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        repeats = sums[name.split("[")[0].removeprefix("tests.")]
        repeats.runs += 1
        repeats.seconds += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            repeats.failures += 1
            failed.append(name)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Repeat the tests of races.")
    parser.add_argument("--rounds", type=int, default=20, help="how often (default 20)")
    parser.add_argument("--first", type=int, default=1, help="the number of the first round (default 1)")
    options, rest = parser.parse_known_args()
    sums: dict[str, Repeats] = defaultdict(Repeats)
    broken = 0
    for number in range(options.first, options.first + options.rounds):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-m", "race", "tests", f"--junitxml={report}", *rest]
            environment = {**os.environ, "PIPES_STRESS_ROUND": str(number)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            failed = add(report, sums) if report.exists() else ["pytest itself"]
        broken += done.returncode != 0
        print(f"round {number}: {time.monotonic() - started:.0f} s, {len(failed)} failed", flush=True)
        if done.returncode:
            print(done.stdout[-20_000:], done.stderr[-2_000:], sep="\n", flush=True)
    table = Table(
        "test", "runs", "failures", "seconds a run", title=f"{options.rounds} rounds, {broken} of them failed"
    )
    for name, repeats in sorted(sums.items()):
        table.add_row(name, str(repeats.runs), str(repeats.failures), f"{repeats.seconds / repeats.runs:.2f}")
    total = sum(repeats.runs for repeats in sums.values())
    table.add_row("all", str(total), str(sum(repeats.failures for repeats in sums.values())), "")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
