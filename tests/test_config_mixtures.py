"""Any mixture of stages and values, right or wrong, is loaded or refused with its place, and never anything else."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import yaml

from pipes.config import dump_graph, read_graph
from pipes.config_stages import Parameter, find_stage, stage_names
from pipes.errors import ConfigError
from pipes.inspector.drawing import lanes, mermaid
from pipes.inspector.report import describe_graph

NAMES = sorted(stage_names(None))
WORDS = ["x", "$a", "$b", "$c", "len", "decode", "s3://b/x", "${X:-3}", "r:*", "os:system", ".", "b", "deep"]
SCALARS: list[Any] = [None, True, 0, 1, 2, -1, 1.5, "", *WORDS]


def parameters(name: str) -> tuple[Parameter, ...]:
    stage = find_stage(name, "iter") or find_stage(name, "map")
    assert stage is not None
    return stage.parameters


KEYS = [
    *sorted({each.name for name in NAMES for each in parameters(name)}),
    "len",
    "Decoder",
    "itemgetter",
    "$a",
    3,
    None,
]


def a_value(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.random()
    if kind < 0.5 or depth > 3:
        return dice.choice(SCALARS)
    if kind < 0.75:
        return [a_value(dice, depth + 1) for _ in range(dice.randint(0, 3))]
    return {dice.choice(KEYS): a_value(dice, depth + 1) for _ in range(dice.randint(0, 3))}


def a_stage(dice: random.Random) -> Any:
    name, kind = dice.choice(NAMES), dice.random()
    if kind < 0.3:
        return name
    if kind < 0.6:
        return {name: {each.name: a_value(dice) for each in parameters(name) if dice.random() < 0.6}}
    return {name: a_value(dice)}


def a_list(dice: random.Random) -> list[Any]:
    sources = [{"IterableWrapper": [[1, 2], [3]]}, "$a", "$b", {"SequenceWrapper": [1, 2]}, a_stage(dice)]
    return [dice.choice(sources), *(a_stage(dice) for _ in range(dice.randint(0, 2)))]


@pytest.mark.parametrize("seed", range(8))
def test_a_mixture(seed: int) -> None:
    dice = random.Random(seed)
    loaded = 0
    for _ in range(100):
        branches = {dice.choice(["a", "b", "a, b", "c", "5", 3]): a_list(dice) for _ in range(dice.randint(0, 2))}
        text = yaml.safe_dump({"version": 1, "pipes": branches, "pipe": a_list(dice)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                pipe = read_graph(text, "g.yaml")
            except ConfigError as error:
                places = [(each.line, each.column) for each in error.errors]
                assert places == sorted(places)
                continue
            loaded += 1
            report = describe_graph(pipe, dice.randint(1, 4))
            assert len([stage for _, stage in lanes(report) if stage]) == len(report.stages)
            assert mermaid(report).count("-->") == sum(len(stage.inputs) for stage in report.stages)
            try:
                written = dump_graph(pipe)
            except ConfigError:
                continue
            assert dump_graph(read_graph(written, "g.yaml")) == written
    assert loaded > 0
