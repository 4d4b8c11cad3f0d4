"""A minute of the soak, and what it would find."""

from __future__ import annotations

from typing import Any

import pytest
import soak
from faults import stress_round

from pipes.loader2.engine import Engine

pytestmark = pytest.mark.usefixtures("no_residue")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_random_graphs_under_kills_stalls_saves_and_loads(capsys: pytest.CaptureFixture[str]) -> None:
    tally = soak.soak(1 + stress_round(), seconds=60.0)
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.lost == tally.doubled == 0
    assert min(tally.graphs, tally.restarts, tally.stalls, tally.loads) > 0
    assert tally.outputs > 50


@pytest.mark.parametrize("fault", ["lost", "doubled"])
def test_it_finds_what_it_looks_for(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver, count = Engine._next, 0

    def faulty(engine: Engine) -> Any:
        nonlocal count
        count += 1
        if count == 10 and fault == "lost":
            deliver(engine)
        faulty.last = faulty.last if count == 10 and fault == "doubled" else deliver(engine)  # type: ignore[attr-defined]
        return faulty.last  # type: ignore[attr-defined]

    monkeypatch.setattr(Engine, "_next", faulty)
    with pytest.raises(soak.Difference) as caught:
        soak.soak(5, graphs=30)
    assert any(f"python tests/soak.py --graphs 1 --seed {5 * 1_000_003}" in note or "--seed" in note for note in caught.value.__notes__)
