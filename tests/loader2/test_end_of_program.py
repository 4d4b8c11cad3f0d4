"""How programs with a live loader end: by themselves, by Ctrl-C, by signals; nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("no_residue")

N = 60


SCRIPT = """
import sys, time, random
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService
def slow(x):
    time.sleep(0.01)
    return x
graph = IterableWrapper(range(10_000)).sharding_filter().map(slow)
service = MultiProcessingReadingService(2, multiprocessing_context={method!r})
loader = DataLoader2(graph, reading_service=service)
"""


def run_script(tmp_path: Path, body: str, method: str = "forkserver") -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(method=method) + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def nothing_is_left_of(session: int) -> bool:
    """Return whether all processes of a session end within seconds."""
    deadline = time.monotonic() + 15
    while any(_session(pid) == session for pid in psutil.pids()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _session(pid: int) -> int:
    try:
        # who ended and was not waited for yet is the business of the system's first process
        return -1 if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else os.getsid(pid)
    except (OSError, psutil.Error):
        return -1


class TestEndOfProgram:
    @pytest.mark.parametrize("method", ["forkserver", "fork"])
    def test_with_a_live_loader(self, method: str, tmp_path: Path) -> None:
        program = run_script(tmp_path, "iterator = iter(loader)\nprint(next(iterator), next(iterator))", method)
        out, err = program.communicate(timeout=60)
        assert (program.returncode, out, err) == (0, "0 1\n", "")
        assert nothing_is_left_of(program.pid)

    @pytest.mark.parametrize("method", ["forkserver", "fork"])
    def test_ctrl_c_in_the_loop(self, method: str, tmp_path: Path) -> None:
        program = run_script(tmp_path, "for x in loader: print(x, flush=True)", method)
        assert program.stdout is not None
        assert program.stdout.readline() == "0\n"
        os.killpg(program.pid, signal.SIGINT)
        _, err = program.communicate(timeout=60)
        assert program.returncode in (1, 130, -signal.SIGINT)
        assert err.count("Traceback (most recent call last)") == 1, err
        assert err.rstrip().endswith("KeyboardInterrupt"), err
        assert nothing_is_left_of(program.pid)

    def test_go_on_after_ctrl_c(self, tmp_path: Path) -> None:
        program = run_script(
            tmp_path,
            """
            for attempt in range(12):
                given = []
                try:
                    for x in loader:
                        given.append(x)
                        if len(given) == 5: print("ready", flush=True)
                except KeyboardInterrupt:
                    assert given == list(range(len(given))), given
                    state = loader.state_dict()
                    loader.load_state_dict(state)
                    assert next(iter(loader)) in (len(given), len(given) + 1)
            print("done", flush=True)
            """,
        )
        assert program.stdout is not None
        for number in range(12):
            assert program.stdout.readline() == "ready\n", program.communicate()
            time.sleep(0.001 * (number % 7))
            os.killpg(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=60)
        assert (program.returncode, out, err) == (0, "done\n", "")

    def test_sigkill_of_main(self, tmp_path: Path) -> None:
        program = run_script(tmp_path, "for x in loader: print(x, flush=True)")
        assert program.stdout is not None
        program.stdout.readline()
        program.kill()
        program.communicate()
        assert nothing_is_left_of(program.pid)
