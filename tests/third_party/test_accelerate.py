"""Accelerate leaves DataLoader2 as it is, and saves it with the rest of a training's state."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import loader_of

from pipes.iter import IterableWrapper

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:accelerate"),
]


def start(workers: int) -> tuple[Any, Any]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    pipe = IterableWrapper(range(38)).shuffle().sharding_filter().batch(4).collate()
    loader = loader_of(pipe, workers, 2)
    _, _, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    assert prepared is loader
    accelerator.register_for_checkpointing(loader)
    return accelerator, loader


@pytest.mark.parametrize("then", [0, 2])
@pytest.mark.parametrize("at", [1, 7, 10])
def test_it_resumes_in_mid_epoch(at: int, then: int, tmp_path: Path) -> None:
    accelerator, loader = start(2)
    list(loader)
    seen = []
    for number, batch in enumerate(loader, 1):
        seen.append(batch.tolist())
        if number == at:
            accelerator.save_state(str(tmp_path))
    after = [batch.tolist() for batch in loader]
    loader.shutdown()
    assert len(seen) == 10
    accelerator, loader = start(then)
    accelerator.load_state(str(tmp_path))
    assert [batch.tolist() for batch in loader] == seen[at:]
    assert [batch.tolist() for batch in loader] == after
    loader.shutdown()
