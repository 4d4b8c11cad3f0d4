from __future__ import annotations

import numpy as np
import pytest
import torch
from stage_contract import check_everywhere, check_stage, plain
from torch.utils.data import default_collate as torch_default_collate

from pipes.iter import IterableWrapper
from pipes.stages.collating import default_collate


def test_contract() -> None:
    check_stage(lambda: IterableWrapper(range(7)).batch(3).collate())
    check_everywhere(lambda source: source.batch(3).collate())


def test_it_stacks_as_torch_does() -> None:
    samples = [{"x": np.float32(i), "y": (i, "a"), "z": torch.arange(2) + i} for i in range(3)]
    [batch] = IterableWrapper(samples).batch(3).collate()
    assert plain(batch) == plain(torch_default_collate(samples))
    assert plain(default_collate(samples)) == plain(batch)


def test_the_function_may_stand_in_either_place() -> None:
    source = IterableWrapper(range(4)).batch(2)
    assert list(source.collate(sum)) == [1, 5]
    assert list(source.collate(collate_fn=max)) == [1, 3]


def test_what_is_no_function_is_refused() -> None:
    source = IterableWrapper(range(4)).batch(2)
    with pytest.raises(TypeError, match="expected a function"):
        source.collate(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="data frames"):
        source.collate({"a": sum})  # type: ignore[arg-type]


def test_length_is_the_sources() -> None:
    assert len(IterableWrapper(range(7)).batch(3).collate()) == 3
