"""Worker processes for tests of how they are started, watched and ended."""

from __future__ import annotations

import ctypes
import socket

from pipes.loader2 import process
from pipes.loader2.process import start_worker
from pipes.loader2.shipping import ship, unship

METHODS = ["forkserver", "spawn", "fork"]
# Under spawn every worker imports torch anew, which takes seconds.
QUICK_METHODS = ["forkserver", "fork"]


def run(method: str, target: object, payload: bytes = b"") -> tuple[object, int | None]:
    """Run `target(payload)` in a worker; return its result and the exit code."""

    def call(sock: socket.socket, data: bytes) -> None:
        result = ship(unship(data)[0](unship(data)[1]))
        sock.sendall(len(result).to_bytes(8, "little") + result)

    worker = start_worker(call, ship((target, payload)), method=method, name="test", number=0)
    try:
        with worker.sock.makefile("rb") as file:
            head = file.read(8)
            result = unship(file.read(int.from_bytes(head, "little"))) if head else None
        assert worker.join(20)
        return result, worker.exitcode
    finally:
        worker.close()


def start(method: str, target: object, number: int = 0) -> process.WorkerProcess:
    return start_worker(target, b"", method=method, name=f"pipes worker {number}", number=number)


def return_payload(payload: bytes) -> bytes:
    return payload


def wait_for_end(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(b"r")
    while sock.recv(1):
        pass


def hold_the_interpreter_lock(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(b"r")
    ctypes.PyDLL(None).sleep(60)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
