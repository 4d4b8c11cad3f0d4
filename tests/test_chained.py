from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

import pipes.iter
import pipes.map
from pipes import IterDataPipe, MapDataPipe
from pipes import _generate_chained as generator


def test_the_committed_file_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    status = generator.main(["--check"])
    assert status == 0, capsys.readouterr().err


def test_a_stale_file_is_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    stale = tmp_path / "_chained.py"
    stale.write_text("old")
    monkeypatch.setattr(generator, "PATH", stale)
    monkeypatch.setattr(generator, "render", lambda: "new")
    assert generator.main(["--check"]) == 1
    assert "python -m pipes._generate_chained" in capsys.readouterr().err
    assert stale.read_text() == "old"
    assert generator.main([]) == 0
    assert stale.read_text() == "new"
    assert generator.main(["--check"]) == 0


def methods(name: str) -> dict[str, ast.FunctionDef]:
    module = ast.parse(generator.PATH.read_text())
    [mixin] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.name: node for node in mixin.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("mixin", "family"), [("ChainedIter", IterDataPipe), ("ChainedMap", MapDataPipe)])
def test_each_built_in_name_has_one_method_with_its_parameters(mixin: str, family: Any) -> None:
    written = methods(mixin)
    built_in = {name: maker for name, maker in family.functions.items() if generator.is_built_in(maker)}
    assert written.keys() == built_in.keys()
    for name, method in written.items():
        assert ast.get_docstring(method), name
        given = [argument.arg for argument in (*method.args.args[1:], *method.args.kwonlyargs)]
        if method.args.vararg is None:
            parameters = list(inspect.signature(built_in[name]).parameters.values())[1:]
            assert given == [each.name for each in parameters if each.kind is not each.VAR_KEYWORD], name
            assert (method.args.kwarg is None) == all(each.kind is not each.VAR_KEYWORD for each in parameters), name


def test_names_of_users_are_left_out() -> None:
    class Own(IterDataPipe[Any]):
        pass

    IterDataPipe.register_datapipe_as_function("test_only_here", Own)
    try:
        assert "test_only_here" not in generator.render()
    finally:
        del IterDataPipe.functions["test_only_here"]
        delattr(IterDataPipe, "test_only_here")


def test_every_chained_class_is_in_its_catalogue() -> None:
    listed = [getattr(catalogue, name) for catalogue in (pipes.iter, pipes.map) for name in catalogue.__all__]
    for family in (IterDataPipe, MapDataPipe):
        for name, maker in family.functions.items():
            assert maker in listed or not generator.is_built_in(maker), name
