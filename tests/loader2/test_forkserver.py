"""The process that workers are forked from: its death, its end, and what it cannot start."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket

import pytest
from worker_processes import hold_the_interpreter_lock, is_running, return_payload, run, start, wait_for_end

from pipes.errors import WorkerError
from pipes.loader2 import descriptors, forkserver, process
from pipes.loader2.process import stop_forkserver

pytestmark = [pytest.mark.usefixtures("no_residue"), pytest.mark.race]


def test_forkserver_has_one_thread() -> None:
    assert run("forkserver", return_payload, b"loaded") == (b"loaded", 0)
    assert len(os.listdir(f"/proc/{process._server.pid}/task")) == 1


def test_workers_of_a_killed_forkserver_end_and_the_next_gets_a_new_one() -> None:
    workers = [start("forkserver", hold_the_interpreter_lock, number) for number in range(2)]
    for worker in workers:
        worker.sock.recv(1)
    server = process._server.pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    for worker in workers:
        assert worker.join(10)
        assert worker.exitcode == -9
        worker.close()
    assert run("forkserver", return_payload, b"again") == (b"again", 0)
    assert process._server.pid != server


def test_stop_forkserver_ends_its_workers() -> None:
    worker = start("forkserver", hold_the_interpreter_lock)
    worker.sock.recv(1)
    server = process._server.pid
    stop_forkserver()
    stop_forkserver()
    assert not is_running(server)
    assert worker.join(10)
    assert worker.exitcode == -9
    worker.close()


def test_interpreter_that_does_not_start() -> None:
    right = multiprocessing.spawn.get_executable()
    stop_forkserver()
    try:
        for method, executable in (("forkserver", "/bin/false"), ("forkserver", "/no/such"), ("spawn", "/no/such")):
            multiprocessing.set_executable(executable)
            with pytest.raises(WorkerError, match="cannot start a worker process"):
                start(method, wait_for_end)
        multiprocessing.set_executable("/bin/false")
        worker = start("spawn", wait_for_end)
        assert worker.join(10)
        assert worker.exitcode == 1
        worker.close()
    finally:
        multiprocessing.set_executable(right)


def test_full_process_table_is_an_error_and_not_the_end_of_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [forkserver.PID.pack(-errno.EAGAIN), b"F"]

    def answer(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
        return answers.pop(0), []

    monkeypatch.setattr(descriptors, "receive", answer)
    with pytest.raises(WorkerError, match="cannot fork: Resource temporarily unavailable"):
        start("forkserver", wait_for_end)
