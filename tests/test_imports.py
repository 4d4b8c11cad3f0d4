"""Imports point one way, and no file grows too long or takes a name of the standard library."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import pipes

ROOT = Path(pipes.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if "_startup" not in path.parts)

# Each may import those of its own layer and of the layers before it.
LAYERS = [
    {"errors"},
    {"cuda_memory", "devices", "device_choice", "moving"},
    {"arguments", "node", "seeds", "state", "as_built", "utils", "shard_points", "changes", "error_policy", "tallies"},
    {"held"},
    {"tree", "run"},
    {"context"},
    {"shares"},
    {"saved"},
    {"pipe_state"},
    {"iteration"},
    {"user_run"},
    {"datapipe", "_chained"},
    {"graph"},
    {"stages", "formats", "sources", "iter", "map", "_generate_chained"},
    {"config"},
    {"loader2"},
    {"inspector"},
]


# Stands where torchdata.dataloader2.random stood.
MIGRATED = Path("loader2", "random.py")


def layer_of(module: str) -> int:
    part = module.split(".")[1] if "." in module else "__init__"
    part = "config" if part.startswith("config") else part
    for place, layer in enumerate(LAYERS):
        if part in layer:
            return place
    raise AssertionError(f"pipes.{part} stands in no layer: add it to LAYERS in {__file__}")


def imports_of(path: Path) -> list[str]:
    """Return the modules of this package that loading a file imports; those for type checkers do not count."""
    found: list[str] = []

    def look(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                look(node.orelse)
            elif isinstance(node, ast.Import):
                found.extend(alias.name for alias in node.names if alias.name.startswith("pipes."))
            elif isinstance(node, ast.ImportFrom) and node.module == "pipes":
                found.extend(f"pipes.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipes."):
                found.append(str(node.module))

    look(ast.parse(path.read_text()).body)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts == ("__init__",):
        assert imports_of(path) == []
        return
    own = layer_of(".".join(("pipes", *parts)))
    for imported in imports_of(path):
        assert layer_of(imported) <= own, f"{'/'.join(parts)} imports {imported}, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_have_names_of_their_own(path: Path) -> None:
    if path.name != "_chained.py":
        assert len(path.read_text().splitlines()) <= 400
    if path.name != "__init__.py" and path.relative_to(ROOT) != MIGRATED:
        assert path.stem not in sys.stdlib_module_names
