"""What a death and a stuck worker mean, by what is known of them: another start, or an error that names and advises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipes.errors import WorkerDiedError
from pipes.loader2.progress import Progress
from pipes.loader2.recovery import Death, give_up_on
from pipes.loader2.settings import Settings
from pipes.loader2.slot import Slot
from pipes.loader2.streams import StreamState
from pipes.loader2.whereabouts import Phase, Place, Whereabouts

WAITING = Whereabouts(Phase.WAITING)


def settings(*, max_restarts: int = 2, recover: bool = True) -> Settings:
    return Settings(2, "forkserver", 2, True, 1, 1, 1, 1.5, max_restarts, recover, None, None)


def making(output: int, element: str = "") -> Whereabouts:
    return Whereabouts(Phase.OUTPUT, 1, output, "2:Mapper" if element else "", element)


def slot(number: int, at: Whereabouts = WAITING, **process: Any) -> Any:
    made: Any = Slot(number, 2)
    made.page = SimpleNamespace(read=lambda: at)
    made.process = SimpleNamespace(
        pid=70 + number, stack=lambda: f"stack {number}", join=lambda seconds: True, **process
    )
    return made


def die(worker: Slot, at: Whereabouts, ahead: Place | None = (1, 5), *, code: int | None = -9) -> None:
    Death(71, code, "stream 1 after output 5", at, ahead, "\ncrash").allow_restart(worker, settings())


def test_what_is_looked_at() -> None:
    streams = [Progress(number, number % 2, StreamState(given=4 + number)) for number in range(6)]
    streams[1].ended = True
    worker = slot(1, making(7), exitcode=3, crash_stack=lambda: "crash")
    reached = "stream 3 after output 7, stream 5 after output 9"
    assert Death.of(worker, streams) == Death(71, 3, reached, making(7), (3, 7), "\ncrash")
    worker = slot(1, WAITING, exitcode=None, crash_stack=lambda: "")
    assert Death.of(worker, streams[:3]) == Death(71, None, "no open stream", WAITING, None, "")


@pytest.mark.parametrize(
    ("deaths", "advice"),
    [
        ([making(5), making(5), making(5, "'x'")], "it died 3 times at this one, .* leave out the element that is"),
        ([WAITING, making(5), making(5)], "it died 2 times at this one, .* leave out an element of the output that"),
        ([making(4), making(5), making(6)], "it died at another place each time, so look at the memory"),
        ([making(5), WAITING, making(4)], "it died at another place each time, so look at the memory"),
        ([making(5), making(5), WAITING], "mend that, or try num_workers=0"),
    ],
)
def test_where_it_died_decides_on_the_advice(deaths: list[Whereabouts], advice: str) -> None:
    worker = slot(1)
    for number, at in enumerate(deaths[:2]):
        told = rf"worker 1 \(pid 71\) died: killed by SIGKILL .*; it was {at}; it ran stream 1 after output 5; it is "
        with pytest.warns(RuntimeWarning, match=rf"(?s){told}.*\(restart {number + 1} of at most 2 in .*\)\ncrash$"):
            die(worker, at)
        # What the next process makes one by one.
        assert worker.traced == (at.place or (1, 5))
    with pytest.raises(
        WorkerDiedError, match=rf"(?s)restarted 2 times .*max_restarts=2\); {advice}.*\ncrash$"
    ) as caught:
        die(worker, deaths[2])
    at, error = deaths[2], caught.value
    assert (error.worker, error.pid, error.signal, error.exit_code, error.restarts) == (1, 71, 9, None, 2)
    assert (error.stream, error.output, error.stage, error.element) == (at.stream, at.output, at.stage, at.element)
    worker.begin_epoch()
    assert (worker.restarts, worker.traced, worker.counts.restarts) == (0, None, 2)


@pytest.mark.parametrize(("code", "told"), [(0, (None, 0)), (3, (None, 3)), (-11, (11, None)), (None, (None, None))])
def test_without_recovery_the_first_death_is_the_error(code: int | None, told: tuple[Any, ...]) -> None:
    worker = slot(0)
    death = Death(70, code, "no open stream", WAITING, None, "")
    with pytest.raises(WorkerDiedError, match=r"on_worker_death='raise' turns recovery off$") as caught:
        death.allow_restart(worker, settings(recover=False))
    assert (caught.value.signal, caught.value.exit_code, worker.restarts) == (*told, 0)


def test_workers_that_are_stuck() -> None:
    workers = [slot(0), slot(1, making(3))]
    assert str(give_up_on(workers, settings())) == (
        "worker 0 (pid 70) and worker 1 (pid 71) gave no output within timeout=1.5 s; raise the timeout, or see where "
        "it is stuck:\nworker 0, waiting for main:\nstack 0\nworker 1, making output 3 of stream 1:\nstack 1"
    )
    assert all(worker.stuck for worker in workers)
