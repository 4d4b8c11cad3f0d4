"""Random graphs on random numbers of workers, while workers die and stall and states are saved and loaded.

    python tests/soak.py --seconds 60 --seed 7
    python tests/soak.py --graphs 1 --seed 1000019       # one graph again: each prints its seed when it fails

Every output is compared with that of a run in one process, when it comes and again a few outputs later, when its memory
may have been used for another; so are the counts of skipped elements, at the end of each epoch. The same seed gives the
same graphs, events and deaths; when in an output a signal hits is up to the system. Ends with the sums, or at the first
difference with both outputs and the seed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from loading import loader_of, plain, through_json
from random_graphs import RandomGraph, errors_of, write_shards
from residue import Holdings, settled

from pipes.loader2 import fault_points, process, slot, worker

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
KEPT = 6


@dataclass
class Tally:
    """What a soak did."""

    graphs: int = 0
    loaders: int = 0
    outputs: int = 0
    skipped: int = 0
    signals: int = 0
    faults: int = 0
    restarts: int = 0
    stalls: int = 0
    saves: int = 0
    loads: int = 0
    pauses: int = 0
    forkservers: int = 0
    broken_off: int = 0
    lost: int = 0
    doubled: int = 0
    stages: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = [(each.name, getattr(self, each.name)) for each in fields(self) if each.name != "stages"]
        lines = [f"{name.replace('_', ' '):>12} {count:,}" for name, count in counts]
        used = ", ".join(f"{name} {count}" for name, count in sorted(self.stages.items()))
        return "\n".join([*lines, f"      stages {used}"])


class Difference(AssertionError):
    """A run gave something else than the run in one process."""


def faulty_work(after: int, way: int, *work: Any) -> None:
    """Be a worker that dies as it passes a fault point for the `after`-th time."""
    left = after

    def reach(*point: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), way)

    fault_points.reach = reach
    worker.work(*work)


class FaultyWork:
    """Stands for `worker.work`; what each process that is started dies of is drawn when it is pickled for it."""

    def __init__(self, draw: random.Random, tally: Tally) -> None:
        self._draw, self._tally = draw, tally

    def __call__(self, *work: Any) -> None:
        raise NotImplementedError("it is called in workers, as what it is pickled to")

    def __reduce__(self) -> Any:
        if self._draw.random() < 0.4:
            return partial, (worker.work,)
        self._tally.faults += 1
        return partial, (faulty_work, 1 + int(self._draw.expovariate(1 / 120)), self._draw.choice(SIGNALS))


class Soak:
    """One graph, run by one loader after the other until its last epoch is over."""

    def __init__(self, plan: RandomGraph, tally: Tally) -> None:
        self.plan, self.tally = plan, tally
        self.draw = random.Random(f"run {plan.seed}")
        self.expected = plan.expected()
        self.epoch = self.at = 0
        self.state: Any = None
        self.timers: list[threading.Timer] = []
        self.kept: deque[tuple[Any, Any, str]] = deque()

    def run(self) -> None:
        self.tally.graphs += 1
        for stage in (*self.plan.above, *self.plan.below):
            self.tally.stages[stage.__name__] += 1
        while self.epoch < self.plan.epochs:
            self._run_loader()
        while self.kept:
            self._check_again()

    def _run_loader(self) -> None:
        draw = self.draw
        workers = draw.randint(0, 4)
        options = {
            "prefetch": draw.randint(1, 4),
            "snapshot_every": draw.choice([1, 3, 16]),
            "max_bytes_in_flight": draw.choice([1, 200_000, 1 << 30]),
            "multiprocessing_context": draw.choice(["forkserver"] * 9 + ["fork"]),
            "max_held": draw.choice([None, 0, 2]),
            "in_order": self.plan.in_order,
        }
        self.tally.loaders += 1
        loader = loader_of(self.plan.graph(), workers, self.plan.streams, max_restarts=10**6, timeout=90, **options)
        self.where = f"{workers} workers, {self.plan.streams} streams, {options}"
        try:
            if self.state is not None:
                loader.load_state_dict(self.state)
                self.tally.loads += 1
            self._iterate(loader)
            if draw.random() < 0.2:
                self._hit(loader, 1.0)
        finally:
            self.tally.restarts += loader.stats()["restarts"]
            loader.shutdown()
            for timer in self.timers:
                timer.join()
            self.timers.clear()

    def _iterate(self, loader: Any) -> None:
        """Take outputs until the last epoch is over, or another loader shall go on."""
        draw, once = self.draw, self.plan.source == "generator"
        iterator, asked = iter(loader), False
        while True:
            chance = draw.random()
            if chance < 0.08:
                self._hit(loader, draw.random())
            elif chance < 0.12:
                self._stall(loader)
            elif chance < 0.15:
                self._save(loader)
                return
            elif chance < 0.17 and not once:
                self._save(loader)
                loader.load_state_dict(self.state)
                self.tally.loads += 1
                iterator, asked = iter(loader), False
            elif chance < 0.21:
                self._pause(iterator)
            elif chance < 0.213:
                self._kill_the_forkserver()
            elif chance < 0.22 and asked and self.epoch + 1 < self.plan.epochs:
                # An iterator that was never asked would share its epoch with the next.
                self.tally.broken_off += 1
                self.epoch, self.at = self.epoch + 1, 0
                iterator = iter(loader)
            asked = True
            if self._take(loader, iterator):
                continue
            self.epoch, self.at = self.epoch + 1, 0
            if self.epoch == self.plan.epochs:
                return
            if draw.random() < 0.3:
                self._save(loader)
                return
            iterator, asked = iter(loader), False

    def _take(self, loader: Any, iterator: Iterator[Any]) -> bool:
        """Take the next output and compare it; False at the end of the epoch."""
        epoch, errors = self.expected[self.epoch]
        place = f"epoch {self.epoch}, output {self.at}, {self.where}"
        output = next(iterator, self)
        if output is self:
            if self.at < len(epoch):
                self._differ(f"the end came instead of {epoch[self.at]!r:.300}", place, epoch[self.at :], [])
            if errors_of(loader) != errors:
                raise Difference(f"{place}: expected the counts {errors}\ncame                {errors_of(loader)}")
            self.tally.skipped += sum(skipped + replaced for _, skipped, replaced in errors.values())
            return False
        self.tally.outputs += 1
        came = plain(output)
        if not self.plan.in_order and came in epoch[self.at :]:
            # Those that are still to come are in no order.
            epoch.insert(self.at, epoch.pop(epoch.index(came, self.at)))
        if epoch[self.at : self.at + 1] != [came]:
            wanted = f"{epoch[self.at]!r:.300}" if self.at < len(epoch) else "the end"
            rest = [came, *(plain(other) for other in iterator)]
            self._differ(f"expected {wanted}\ncame     {came!r:.300}", place, epoch[self.at :], rest)
        self.kept.append((output, epoch[self.at], place))
        if len(self.kept) > KEPT:
            self._check_again()
        self.at += 1
        return True

    def _check_again(self) -> None:
        output, expected, place = self.kept.popleft()
        if plain(output) != expected:
            raise Difference(
                f"{place}: overwritten while it was kept: {expected!r:.300}\nis now {plain(output)!r:.300}"
            )

    def _differ(self, what: str, place: str, expected: list[Any], came: list[Any]) -> None:
        wanted, got = Counter(map(repr, expected)), Counter(map(repr, came))
        self.tally.lost += (wanted - got).total()
        self.tally.doubled += (got - wanted).total()
        raise Difference(f"{place}: {what}")

    def _save(self, loader: Any) -> None:
        self.state = through_json(loader.state_dict())
        self.tally.saves += 1

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self.timers.append(threading.Timer(seconds, act))
        self.timers[-1].start()

    def _hit(self, loader: Any, share: float) -> None:
        """Kill some workers, at least one: now or within the next outputs."""
        number, which = self.draw.choice(SIGNALS), self.draw.random()

        def act() -> None:
            pids = living(loader)
            for pid in pids[int(which * len(pids)) :][: 1 + int(share * len(pids))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    self.tally.signals += 1

        self._later(self.draw.random() * 0.02, act) if self.draw.random() < 0.7 else act()

    def _pause(self, iterator: Any) -> None:
        iterator.pause()
        time.sleep(self.draw.random() * 0.01)
        iterator.resume()
        self.tally.pauses += 1

    def _kill_the_forkserver(self) -> None:
        """Kill it with all its workers; the next one is another."""
        if process._server.pid is not None:
            os.kill(process._server.pid, signal.SIGKILL)
            self.tally.forkservers += 1

    def _stall(self, loader: Any) -> None:
        """Stop a worker for some milliseconds."""
        pids = living(loader)
        if not pids:
            return
        pid = self.draw.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.tally.stalls += 1

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._later(self.draw.random() * 0.1, go_on)


def living(loader: Any) -> list[int]:
    """Return the workers that run; a number that another process has meanwhile is left out."""
    pids = []
    for pid in loader.stats()["workers"]:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if psutil.Process().pid in (process.ppid(), *(parent.pid for parent in process.parents())):
                pids.append(pid)
    return pids


def soak(seed: int, *, seconds: float | None = None, graphs: int | None = None, say: bool = False) -> Tally:
    """Run graphs until the time is over or so many are done; raises Difference, with what came and the seed."""
    tally = Tally()
    started = told = time.monotonic()
    original = slot.work
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        write_shards(Path(folder))
        warnings.simplefilter("ignore")
        while graphs is None or tally.graphs < graphs:
            own = seed * 1_000_003 + tally.graphs if graphs != 1 else seed
            process.start_forkserver()
            before = Holdings.now()
            slot.work = FaultyWork(random.Random(f"faults {own}"), tally)  # type: ignore[assignment]
            try:
                Soak(RandomGraph(own, Path(folder)), tally).run()
                if not settled(before, seconds=1.0):
                    # A forkserver that came in the place of a killed one counts as new.
                    process.stop_forkserver()
                if not settled(before, seconds=10.0):
                    raise Difference("left behind:\n" + "\n".join(Holdings.now().news_since(before)))
            except BaseException as error:
                error.add_note(f"to repeat: python tests/soak.py --graphs 1 --seed {own}\n{tally}")
                raise
            finally:
                slot.work = original
            now = time.monotonic()
            if say and now - told > 10:
                told = now
                print(f"{now - started:4.0f} s: {tally.graphs} graphs, {tally.restarts} restarts", flush=True)
            if seconds is not None and now - started >= seconds:
                break
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description="Random graphs under kills, stalls, saves and loads.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=None, help="of all that is random (default: another each time)")
    parser.add_argument(
        "--graphs", type=int, default=None, help="so many graphs instead; 1: the one whose seed this is"
    )
    options = parser.parse_args()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    logging.getLogger("pipes").setLevel(logging.ERROR)
    print(f"seed {seed}", flush=True)
    print(soak(seed, seconds=None if options.graphs else options.seconds, graphs=options.graphs, say=True))


if __name__ == "__main__":
    sys.exit(main())
