"""What is public is listed, and what is listed is there."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import pipes

# What several stages are derived from, and users need not know.
BASES = {"AppliedPipe", "OpenerPipe", "SaverPipe"}
ROOT = Path(pipes.__file__).parent
HEAVY = ("boto3", "botocore", "obstore", "pyarrow", "PIL", "fsspec", "pandas", "requests", "rich", "webdataset")


@pytest.mark.parametrize(
    "module", ["pipes", "pipes.iter", "pipes.map", "pipes.graph", "pipes.errors", "pipes.datapipe"]
)
def test_listed_names_exist_once_in_order(module: str) -> None:
    loaded = import_module(module)
    names = loaded.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(loaded, name) for name in names)


@pytest.mark.parametrize("catalogue", ["pipes.iter", "pipes.map"])
def test_a_catalogue_lists_all_that_it_imports(catalogue: str) -> None:
    loaded = import_module(catalogue)
    assert {name for name in vars(loaded) if not name.startswith("_")} == set(loaded.__all__)


@pytest.mark.parametrize("folder", ["stages", "sources", "formats"])
def test_a_folder_lists_its_modules(folder: str) -> None:
    listed = import_module(f"pipes.{folder}").MODULES
    assert list(listed) == sorted(path.stem for path in (ROOT / folder).glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("folder", ["stages", "sources", "formats"])
def test_every_public_pipe_of_a_folder_is_in_a_catalogue(folder: str) -> None:
    known = {
        id(value) for catalogue in ("pipes.iter", "pipes.map") for value in vars(import_module(catalogue)).values()
    }
    for module in import_module(f"pipes.{folder}").MODULES:
        loaded = import_module(f"pipes.{folder}.{module}")
        for name in set(loaded.__all__) - BASES:
            value = getattr(loaded, name)
            if isinstance(value, type) and issubclass(value, pipes.IterDataPipe | pipes.MapDataPipe):
                assert id(value) in known, f"{name} of pipes.{folder}.{module}"


def test_the_catalogues_import_nothing_heavy() -> None:
    code = f"import sys, pipes.iter, pipes.map, pipes.graph; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, pipes, pipes.errors; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert done.stdout.strip() == "False False"
