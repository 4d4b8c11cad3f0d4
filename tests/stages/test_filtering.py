from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stage_contract import check_everywhere, check_stage

from pipes.iter import IterableWrapper


def even(x: int) -> bool:
    return x % 2 == 0


def test_contract() -> None:
    check_stage(lambda: IterableWrapper(range(9)).filter(even), [0, 2, 4, 6, 8])
    check_stage(lambda: IterableWrapper(range(9)).filter(lambda x: False), [])
    check_everywhere(lambda source: source.filter(lambda x: x % 3 != 0))


def test_columns() -> None:
    rows = [(0, 1), (1, 0), (2, 2)]
    assert list(IterableWrapper(rows).filter(even, input_col=1)) == [(1, 0), (2, 2)]
    assert list(IterableWrapper(rows).filter(lambda a, b: a < b, input_col=[0, 1])) == [(0, 1)]
    assert list(IterableWrapper([{"a": 1}, {"a": 2}]).filter(even, input_col="a")) == [{"a": 2}]


def test_numpys_bool_is_a_bool() -> None:
    assert list(IterableWrapper(range(3)).filter(lambda x: np.bool_(x > 0))) == [1, 2]


@pytest.mark.parametrize("answer", [1, 0, None, "yes", np.int64(1)])
def test_any_other_answer_is_an_error_that_names_function_and_element(answer: Any) -> None:
    def odd_answer(x: int) -> Any:
        return answer

    with pytest.raises(ValueError, match=rf"odd_answer gave {type(answer).__name__}; wrap it in bool") as caught:
        list(IterableWrapper([7]).filter(odd_answer))
    assert "in stage 1:Filter built at" in caught.value.__notes__[0]
    assert "on element 7" in caught.value.__notes__[0]


def test_it_has_no_length() -> None:
    with pytest.raises(TypeError, match="Filter"):
        len(IterableWrapper(range(3)).filter(even))
