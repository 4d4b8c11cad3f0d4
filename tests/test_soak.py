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
    real, count, last = Engine.next, 0, None

    def faulty(engine: Engine) -> Any:
        nonlocal count, last
        count += 1
        if count % 5 == 0:
            if fault == "doubled":
                return last
            real(engine)
        last = real(engine)
        return last

    monkeypatch.setattr(Engine, "next", faulty)
    with pytest.raises(soak.Difference) as caught:
        soak.soak(5, graphs=30)
    assert any("to repeat: python tests/soak.py --graphs 1 --seed 500" in note for note in caught.value.__notes__)
