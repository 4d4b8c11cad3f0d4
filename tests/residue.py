"""What this process holds: the measure behind the fixture `no_residue`."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Holdings:
    """What this process holds: its children, Python threads, descriptors by target, names of shared memory."""

    children: dict[int, str]
    threads: frozenset[threading.Thread]
    descriptors: Counter[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        children = {child.pid: _describe(child) for child in psutil.Process().children(recursive=True)}
        return cls(children, frozenset(threading.enumerate()), _descriptors(), _shared_memory())

    def news_since(self, before: Holdings) -> list[str]:
        """One line for each thing held now and not before."""
        news = [f"process {pid}: {what}" for pid, what in self.children.items() if pid not in before.children]
        news += [f"thread {thread.name}" for thread in self.threads - before.threads if thread.is_alive()]
        # by number, not by name: a log file that was replaced or a socket that was opened anew is no leak
        surplus = self.descriptors.total() - before.descriptors.total()
        if surplus > 0:
            fresh = sorted((self.descriptors - before.descriptors).elements())
            news.append(f"{surplus} descriptors, among these: {', '.join(fresh)}")
        news += [
            f"shared memory {name}"
            for name in sorted(self.shared_memory - before.shared_memory)
            if not _used_by_strangers(name)
        ]
        return news


def settled(before: Holdings, seconds: float) -> bool:
    """Wait until nothing is held that was not held before; False when that does not come."""
    deadline = time.monotonic() + seconds
    while Holdings.now().news_since(before):
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.02)
    return True


def start_forkserver() -> None:
    """Start the package's forkserver, when this process has loaded the module: one for all tests saves seconds each."""
    _call_if_loaded("start_forkserver")


def stop_forkserver() -> None:
    """End the package's forkserver, when this process may have one."""
    _call_if_loaded("stop_forkserver")


def _call_if_loaded(function: str) -> None:
    module = sys.modules.get("pipes.loader2.process")
    if module is not None:
        getattr(module, function)()


def _describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.ZombieProcess:
        return "zombie: it ended and nobody waited for it"
    except psutil.Error:
        return "gone"


def _descriptors() -> Counter[str]:
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return Counter({"descriptor": psutil.Process().num_fds()})
    targets: Counter[str] = Counter()
    for entry in os.listdir(folder):
        try:
            targets[os.readlink(folder / entry)] += 1
        except OSError:
            continue  # the descriptor of the listing itself
    return targets


def _shared_memory() -> frozenset[str]:
    try:
        return frozenset(os.listdir("/dev/shm"))
    except OSError:
        return frozenset()


def _used_by_strangers(name: str) -> bool:
    """Whether a process outside our tree has this shared memory open: other programs' names come and go meanwhile."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    path = f"/dev/shm/{name}"
    try:
        # A mapping of a POSIX semaphore bears the name of the file that it was first made as.
        inode = os.stat(path).st_ino
    except OSError:
        return True
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines()
            if any("/dev/shm/" in line and int(line.split()[4]) == inode for line in lines):
                return True
            if any(os.readlink(entry) == path for entry in Path(f"/proc/{process.pid}/fd").iterdir()):
                return True
        except OSError:
            continue
    return False
