"""How programs with a live loader end: by themselves, by Ctrl-C, by signals; nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from programs import nothing_is_left_of, run_program, wait_for_line
from worker_processes import is_running

from pipes.loader2.guard import sleep_until

pytestmark = [pytest.mark.usefixtures("no_residue"), pytest.mark.race]

every_method = pytest.mark.parametrize("method", ["forkserver", "fork"])


def end_of(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the program; return its exit code, output and errors, once all its processes are gone."""
    out, err = program.communicate(timeout=60)
    assert nothing_is_left_of(program.pid), (out, err)
    return program.returncode, out, err


class TestEndOfProgram:
    @every_method
    def test_with_a_live_loader(self, method: str, tmp_path: Path) -> None:
        body = "iterator = iter(loader_of(slow))\nprint(next(iterator), next(iterator))"
        assert end_of(run_program(tmp_path, body, method)) == (0, "0 1\n", "")

    @pytest.mark.race
    def test_with_a_daemon_thread_that_iterates(self, tmp_path: Path) -> None:
        program = run_program(
            tmp_path,
            """
            loader = loader_of(slow)
            seen = threading.Event()
            def iterate():
                for x in loader:
                    seen.set()
            threading.Thread(target=iterate, daemon=True).start()
            assert seen.wait(60)
            """,
        )
        code, out, err = end_of(program)
        assert (code, out) == (0, "")
        assert err.count("Traceback (most recent call last)") <= 1, err
        # a daemon thread is cut off in mid-word
        assert not err or err.startswith("Exception in thread"), err
        assert "SIGKILL" not in err

    @every_method
    def test_ctrl_c_in_the_loop(self, method: str, tmp_path: Path) -> None:
        program = run_program(tmp_path, "for x in loader_of(slow): print(x, flush=True)", method)
        wait_for_line(program, "0")
        os.killpg(program.pid, signal.SIGINT)
        code, _, err = end_of(program)
        assert code in (1, 130, -signal.SIGINT)
        assert err.count("Traceback (most recent call last)") == 1, err
        assert err.rstrip().endswith("KeyboardInterrupt"), err

    @pytest.mark.parametrize(
        ("sent", "method"), [(signal.SIGTERM, "forkserver"), (signal.SIGHUP, "fork"), (signal.SIGKILL, "forkserver")]
    )
    def test_a_signal_that_ends_main(self, sent: int, method: str, tmp_path: Path) -> None:
        program = run_program(tmp_path, "for x in loader_of(slow): print(x, flush=True)", method)
        wait_for_line(program, "0")
        program.send_signal(sent)
        code, _, err = end_of(program)
        assert (code, err) == (-sent, "")

    @pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
    def test_sigkill_of_main_while_a_forked_child_of_it_lives(self, method: str, tmp_path: Path) -> None:
        program = run_program(
            tmp_path,
            """
            loader = loader_of(stops_at_3)
            iterator = iter(loader)
            assert next(iterator) == 0
            child = os.fork()
            if child == 0:
                signal.pause()
            print(child, *loader.stats()["workers"], flush=True)
            signal.pause()
            """,
            method,
        )
        assert program.stdout is not None
        child, *workers = map(int, program.stdout.readline().split())
        try:
            program.kill()
            program.wait(60)
            assert sleep_until(lambda: not any(map(is_running, workers)), 15)
            assert len(workers) == 2
            assert is_running(child)
        finally:
            os.kill(child, signal.SIGKILL)
        assert end_of(program)[::2] == (-signal.SIGKILL, "")

    def test_a_handler_of_sigterm_that_exits(self, tmp_path: Path) -> None:
        program = run_program(
            tmp_path,
            """
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            loader = loader_of(stops_at_3)
            for x in loader: print(x, flush=True)
            """,
            "fork",
        )
        wait_for_line(program, "2")
        os.killpg(program.pid, signal.SIGTERM)
        code, _, err = end_of(program)
        # SIGTERM to the whole group ends the workers, too: then a restart may be told before main's handler ran
        assert code == 7, err
        assert "Traceback" not in err


INTERRUPTED = """
try:
    {body}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
GOES_ON = "assert next(iter(loader)) == 0\n"


class TestCtrlC:
    """Control comes back, the loader can be used on, or is closed, and nothing is left."""

    @pytest.mark.race
    def test_in_next_in_the_body_and_during_the_end(self, tmp_path: Path) -> None:
        # to the end, both workers are in an element, so that they do not look at main's word to stop
        program = run_program(
            tmp_path,
            "loader = loader_of(stops_at_3)"
            + INTERRUPTED.format(body="for x in loader: print(x, flush=True)")
            + GOES_ON
            + INTERRUPTED.format(body="for x in loader: print('body', flush=True); time.sleep(60)")
            + GOES_ON
            + "loader = loader_of(lambda x: time.sleep(60 if x > 1 else 0) or x)\n"
            + "iterator = iter(loader); assert [next(iterator), next(iterator)] == [0, 1]; print('end', flush=True)"
            + INTERRUPTED.format(body="loader.shutdown()")
            + "leaves_nothing()",
        )
        for line in ("2", "body", "end"):
            wait_for_line(program, line)
            time.sleep(0.2)
            os.killpg(program.pid, signal.SIGINT)
            wait_for_line(program, "interrupted")
        assert end_of(program) == (0, "", "")

    @pytest.mark.parametrize("after", [0.3, 1.5])
    def test_during_the_start(self, after: float, tmp_path: Path) -> None:
        body = "loader = loader_of(slow); print('starting', flush=True)"
        body += INTERRUPTED.format(body="while True: next(iter(loader))") + GOES_ON
        program = run_program(tmp_path, body + "loader.shutdown(); leaves_nothing()")
        wait_for_line(program, "starting")
        time.sleep(after)
        os.killpg(program.pid, signal.SIGINT)
        assert end_of(program) == (0, "interrupted\n", "")

    def test_while_a_loader_is_dropped(self, tmp_path: Path) -> None:
        body = """
            loader = loader_of(lambda x: time.sleep(60 if x > 1 else 0) or x)
            iterator = iter(loader)
            assert [next(iterator), next(iterator)] == [0, 1]
            print("ending", flush=True)
            iterator = loader = None
            leaves_nothing()
            """
        program = run_program(tmp_path, body, "fork")
        wait_for_line(program, "ending")
        time.sleep(0.2)
        os.killpg(program.pid, signal.SIGINT)
        code, _, err = end_of(program)
        # Python prints what is raised while an object is dropped, and goes on
        assert (code, "KeyboardInterrupt" in err) == (0, True), err

    @pytest.mark.race
    def test_again_and_again(self, tmp_path: Path) -> None:
        program = run_program(
            tmp_path,
            """
            loader = loader_of(slow)
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
        assert end_of(program) == (0, "done\n", "")

    def test_cells_of_a_notebook(self, tmp_path: Path) -> None:
        """As a kernel does it: cells run by exec in __main__, what they raise is kept in sys.last_value."""
        program = run_program(
            tmp_path,
            """
            import traceback
            def run(cell):
                try:
                    exec(compile(cell, "<cell>", "exec"), globals())
                except BaseException as error:
                    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
                    traceback.print_exc()
            run("scale = 10\\ndef times(x): return slow(x) * scale")
            run("loader = loader_of(times)")
            run("for x in loader: print(x, flush=True)")
            print("next cell", flush=True)
            run("scale = 20")
            run("assert next(iter(loader)) == 0 and next(iter(loader)) == 0")
            run("loader = loader_of(times)")
            run("iterator = iter(loader); next(iterator); assert next(iterator) == 20")
            run("loader = iterator = None")
            leaves_nothing()
            """,
        )
        wait_for_line(program, "50")
        os.killpg(program.pid, signal.SIGINT)
        wait_for_line(program, "next cell")
        code, _, err = end_of(program)
        assert code == 0, err
        assert err.count("Traceback (most recent call last)") == 1, err
        assert err.rstrip().endswith("KeyboardInterrupt")
