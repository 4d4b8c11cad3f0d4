"""Worker processes as main holds them: how they end, how they are ended, and what is said of it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

import pytest
from worker_processes import METHODS, QUICK_METHODS, hold_the_interpreter_lock, return_payload, run, start, wait_for_end

from pipes.errors import WorkerError
from pipes.loader2 import descriptors, process
from pipes.loader2.process import describe_exit

pytestmark = pytest.mark.usefixtures("no_residue")
quick_methods = pytest.mark.parametrize("method", QUICK_METHODS)


@quick_methods
@pytest.mark.parametrize(
    ("end", "code", "raises"),
    [
        (lambda sock, payload: None, 0, False),
        (lambda sock, payload: sys.exit(7), 7, False),
        (lambda sock, payload: sys.exit("text"), 1, False),
        (lambda sock, payload: 1 / 0, 1, True),
        (lambda sock, payload: os._exit(5), 5, False),
        (lambda sock, payload: os.kill(os.getpid(), signal.SIGKILL), -9, False),
        (lambda sock, payload: os.kill(os.getpid(), signal.SIGTERM), -15, False),
        (lambda sock, payload: ctypes.string_at(0), -11, False),
    ],
    ids=["return", "exit", "exit-text", "raise", "_exit", "SIGKILL", "SIGTERM", "SIGSEGV"],
)
def test_exit_code(method: str, end: object, code: int, raises: bool, capfd: pytest.CaptureFixture[str]) -> None:
    worker = start(method, end)
    assert worker.join(20)
    assert worker.exitcode == code
    assert not worker.is_alive()
    assert ("<lambda>" in worker.crash_stack()) == (code == -11)
    worker.close()
    worker.close()
    assert worker.exitcode == code
    assert worker.sock.fileno() == -1
    assert ("ZeroDivisionError" in capfd.readouterr().err) == raises


@pytest.mark.skipif("fork" not in METHODS, reason="forks")
def test_a_crash_leaves_its_stack_though_main_lost_its_handlers() -> None:
    """As when a trainer sets all signals back at its end, and Python still takes faulthandler for switched on."""
    libc, kept = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.sigaction(signal.SIGSEGV, None, kept)
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    try:
        worker = start("fork", lambda sock, payload: ctypes.string_at(0))
        assert worker.join(20)
        assert "<lambda>" in worker.crash_stack()
        worker.close()
    finally:
        libc.sigaction(signal.SIGSEGV, kept, None)


@quick_methods
def test_large_payload_comes_whole(method: str) -> None:
    payload = os.urandom(1 << 20) * 40
    assert run(method, return_payload, payload) == (payload, 0)


@pytest.mark.race
def test_forked_child_of_main_lets_go() -> None:
    workers = [start(method, wait_for_end) for method in METHODS]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # In the child the handles are closed and must not touch the workers.
        states = [(worker.is_alive(), worker.exitcode, worker.sock.fileno()) for worker in workers]
        for worker in workers:
            worker.kill()
            worker.close()
        os.write(write, repr(states).encode())
        signal.pause()
        os._exit(0)
    os.close(write)
    with os.fdopen(read):
        try:
            assert os.read(read, 1000).decode() == repr([(False, None, -1)] * 3)
            for worker in workers:
                assert worker.sock.recv(1) == b"r"
                assert worker.is_alive()
                worker.sock.close()
                assert worker.join(10), "the forked child holds the socket"
                assert worker.exitcode == 0
                worker.close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.race
@quick_methods
def test_close_ends_a_stuck_worker(method: str) -> None:
    worker = start(method, hold_the_interpreter_lock)
    worker.sock.recv(1)
    worker.close()
    assert worker.exitcode == -9
    assert not worker.is_alive()


@pytest.mark.race
@quick_methods
def test_dropped_worker_is_ended(method: str) -> None:
    worker = start(method, wait_for_end)
    pid = worker.pid
    del worker
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@quick_methods
def test_sentinel_and_join(method: str) -> None:
    worker = start(method, wait_for_end)
    assert not worker.join(0.05)
    assert not multiprocessing.connection.wait([worker.sentinel], 0)
    worker.terminate()
    assert multiprocessing.connection.wait([worker.sentinel], 10) == [worker.sentinel]
    assert worker.exitcode == -15
    assert "SIGTERM" in repr(worker)
    worker.close()


@pytest.mark.race
@quick_methods
def test_worker_outlives_the_thread_that_started_it(method: str) -> None:
    workers: list[process.WorkerProcess] = []
    thread = threading.Thread(target=lambda: workers.append(start(method, wait_for_end)))
    thread.start()
    thread.join()
    worker = workers.pop()
    assert worker.sock.recv(1) == b"r"
    assert not worker.join(0.3)
    worker.sock.close()
    assert worker.join(10)
    assert worker.exitcode == 0
    worker.close()


def test_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "PIDFD", False)
    for method in METHODS:
        worker = start(method, wait_for_end)
        assert worker.sock.recv(1) == b"r"
        assert worker.is_alive()
        worker.kill()
        assert worker.join(10)
        assert worker.exitcode == -9
        worker.close()


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        with pytest.raises(WorkerError, match="not available on Windows"):
            start("spawn", wait_for_end)
    with pytest.raises(WorkerError, match="unknown start method 'thread'"):
        start("thread", wait_for_end)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(WorkerError, match="forked after CUDA was initialised"):
        start("fork", wait_for_end)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (255, "exit code 255, or unknown"),
        (None, "still running"),
        (-9, "killed by SIGKILL (signal 9): often the system's out-of-memory killer"),
        (-11, "segmentation fault (SIGSEGV, signal 11)"),
        (-10, "killed by SIGUSR1 (signal 10)"),
        (-50, "killed by signal 50"),
    ],
)
def test_describe_exit(code: int | None, words: str) -> None:
    assert describe_exit(code).startswith(words)
