"""An installed `pipes` wins over the standard library's module of that name, in every way to start Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import pipes

ROOT = Path(__file__).resolve().parents[1]
CURRENT = f"{sys.version_info[0]}.{sys.version_info[1]}"
PYTHONS = sorted({"3.11", "3.12", "3.13", CURRENT}, key=lambda text: int(text.split(".")[1]))
KINDS = ["wheel", "editable"]
# pure Python packages lent to the environments, which have nothing but pipes in them
LENT = [
    "pytest",
    "_pytest",
    "py",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "rich",
    "markdown_it",
    "mdurl",
    "yaml",
]

WORKERS = """
import multiprocessing, sys

def where():
    import pipes
    return pipes.__file__

if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.apply(where))
            pool.close()
            pool.join()
"""


class Environment:
    """A virtual environment with nothing but `pipes` in it."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python = python
        self.stdlib_has_pipes = python in ("3.11", "3.12")
        self.folder = folder
        subprocess.run([_interpreter(python), "-m", "venv", "--without-pip", str(folder)], check=True)
        self.executable = folder / "bin" / "python"

    def pip(self, *args: str) -> None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.executable)]
        done = subprocess.run([*command, *args], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *command: str, cwd: Path, **environ: str) -> str:
        """Run one of the environment's programs far from the checkout and return what it printed; it must not warn."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIPES"))}
        program, *args = command
        done = subprocess.run(
            [str(self.folder / "bin" / program), *args],
            cwd=cwd,
            env=clean | environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout.strip()


def _interpreter(python: str) -> str:
    if python == CURRENT:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [shutil.which(f"python{python}"), *sorted(map(str, pyenv.glob(f"{python}.*/bin/python")))]
    for candidate in filter(None, candidates):
        # a shim may stand for an interpreter that is not selected: ask it
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if subprocess.run([candidate, "-c", code], capture_output=True, text=True).stdout.strip() == python:
            return candidate
    pytest.skip(f"no Python {python} on this machine")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What pip would build for an ordinary and for an editable install."""
    built = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        build = {"wheel": "build_wheel", "editable": "build_editable"}[kind]
        code = f"import sys; from hatchling.build import {build}; {build}(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True, capture_output=True)
        (built[kind],) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def lent(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("lent")
    for name in LENT:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin) if spec.submodule_search_locations is None else Path(spec.origin).parent
        folder.joinpath(source.name).symlink_to(source)
    return str(folder)


@pytest.fixture(scope="session", params=[(p, k) for p in PYTHONS for k in KINDS], ids=lambda param: "-".join(param))
def installed(
    request: pytest.FixtureRequest, wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    python, kind = request.param
    environment = Environment(python, tmp_path_factory.mktemp(f"{kind}-{python}") / "venv")
    environment.pip("install", "--quiet", "--no-compile", "--no-deps", "--no-index", str(wheels[kind]))
    return environment


@pytest.fixture
def ours(installed: Environment, request: pytest.FixtureRequest) -> str:
    """Where `pipes` must come from in the environment."""
    kind = request.node.callspec.params["installed"][1]
    site = installed.folder / "lib" / f"python{installed.python}" / "site-packages"
    return str((site if kind == "wheel" else ROOT) / "pipes" / "__init__.py")


def test_import(installed: Environment, ours: str, tmp_path: Path) -> None:
    assert installed.run("python", "-c", "import pipes; print(pipes.__file__)", cwd=tmp_path) == ours


def test_import_in_isolated_mode(installed: Environment, ours: str, tmp_path: Path) -> None:
    assert installed.run("python", "-I", "-c", "import pipes; print(pipes.__file__)", cwd=tmp_path) == ours


def test_import_of_a_submodule(installed: Environment, tmp_path: Path) -> None:
    code = "from pipes.errors import PipesError; print(PipesError.__module__)"
    assert installed.run("python", "-c", code, cwd=tmp_path) == "pipes.errors"


def test_script(installed: Environment, ours: str, tmp_path: Path) -> None:
    tmp_path.joinpath("script.py").write_text("import pipes\nprint(pipes.__file__)\n")
    assert installed.run("python", "script.py", cwd=tmp_path) == ours


def test_folder_called_pipes_is_no_match(installed: Environment, ours: str, tmp_path: Path) -> None:
    tmp_path.joinpath("pipes").mkdir()
    assert installed.run("python", "-c", "import pipes; print(pipes.__file__)", cwd=tmp_path) == ours


def test_module_beside_the_script_comes_first(installed: Environment, tmp_path: Path) -> None:
    tmp_path.joinpath("pipes.py").write_text("mine = True\n")
    assert installed.run("python", "-c", "import pipes; print(pipes.mine)", cwd=tmp_path) == "True"


def test_console_script(installed: Environment, lent: str, tmp_path: Path) -> None:
    code = "from importlib.metadata import entry_points as e; print(e(name='pipes-inspect')['pipes-inspect'].value)"
    assert installed.run("python", "-c", code, cwd=tmp_path) == "pipes.inspector.cli:main"
    if not ROOT.joinpath("pipes", "inspector", "cli.py").exists():
        pytest.skip("pipes-inspect is not written yet")
    assert "usage" in installed.run("pipes-inspect", "--help", cwd=tmp_path, PYTHONPATH=lent).lower()


def test_dash_m(installed: Environment, tmp_path: Path) -> None:
    installed.run("python", "-m", "pipes.errors", cwd=tmp_path)


def test_under_pytest(installed: Environment, ours: str, lent: str, tmp_path: Path) -> None:
    tmp_path.joinpath("test_it.py").write_text(
        f"import pipes\n\ndef test_it():\n    assert pipes.__file__ == {ours!r}\n"
    )
    printed = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path, PYTHONPATH=lent)
    assert "1 passed" in printed


def test_workers(installed: Environment, ours: str, tmp_path: Path) -> None:
    tmp_path.joinpath("workers.py").write_text(WORKERS)
    assert installed.run("python", "workers.py", cwd=tmp_path).split() == [ours] * 3


def test_names_of_the_stdlib_module(installed: Environment, tmp_path: Path) -> None:
    assert installed.run("python", "-c", "import pipes; print(pipes.quote('a b'))", cwd=tmp_path) == "'a b'"
    code = (
        "import pipes, pickle, sys; before = sys.modules['pipes']; t = pipes.Template(); t.append('tr a-z A-Z', '--');"
        "open('in', 'w').write('hello'); t.copy('in', 'out'); print(open('out').read(), type(t) is pipes.Template,"
        "pickle.loads(pickle.dumps(t)).steps == t.steps, sys.modules['pipes'] is before is pipes)"
    )
    if installed.stdlib_has_pipes:
        printed = installed.run("python", "-W", "ignore::DeprecationWarning", "-c", code, cwd=tmp_path)
        assert printed == "HELLO True True True"
    else:
        code = "import pipes\ntry:\n    pipes.Template\nexcept AttributeError as error:\n    print(error)"
        assert "dropped it in Python 3.13" in installed.run("python", "-c", code, cwd=tmp_path)


def test_switched_off(installed: Environment, ours: str, tmp_path: Path) -> None:
    code = "import pipes; print(pipes.__file__)"
    printed = installed.run("python", "-W", "ignore", "-c", code, cwd=tmp_path, PIPES_NO_STARTUP="1")
    if installed.stdlib_has_pipes:
        assert Path(printed).name == "pipes.py"
    else:
        assert printed == ours


def test_start_imports_nothing_else(installed: Environment, tmp_path: Path) -> None:
    code = "import sys; print(*sorted(sys.modules))"
    bare = set(installed.run("python", "-S", "-c", code + ", 'site'", cwd=tmp_path).split())
    off = set(installed.run("python", "-c", code, cwd=tmp_path, PIPES_NO_STARTUP="1").split())
    on = set(installed.run("python", "-c", code, cwd=tmp_path).split())
    assert on == off
    assert ("_pipes_first" in on) is installed.stdlib_has_pipes
    assert bare <= on


def test_finder_survives_a_broken_path(installed: Environment, ours: str, tmp_path: Path) -> None:
    code = "import sys; sys.path[:0] = [None, 3, b'x', 'no/such']; import pipes; print(pipes.__file__)"
    assert installed.run("python", "-c", code, cwd=tmp_path) == ours


def test_import_loads_no_heavy_package(installed: Environment, tmp_path: Path) -> None:
    code = "import sys, pipes; print(*{'torch', 'numpy', 'boto3', 'rich', 'yaml'} & set(sys.modules))"
    assert installed.run("python", "-c", code, cwd=tmp_path) == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("python", PYTHONS)
def test_uninstall(python: str, kind: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = Environment(python, tmp_path / "venv")
    before = sorted(tmp_path.joinpath("venv").rglob("*.p*"))
    environment.pip("install", "--quiet", "--no-compile", "--no-deps", "--no-index", str(wheels[kind]))
    environment.run("python", "-c", "import pipes.errors", cwd=tmp_path)
    environment.pip("uninstall", "--quiet", "--yes", "pipes")
    left = set(tmp_path.joinpath("venv").rglob("*.p*")) - set(before)
    assert {path for path in left if path.suffix != ".pyc"} == set()
    assert environment.run("python", "-c", "pass", cwd=tmp_path) == ""
    code = "import importlib.util as u; spec = u.find_spec('pipes'); print(spec.origin if spec else None)"
    printed = environment.run("python", "-c", code, cwd=tmp_path)
    assert Path(printed).name == ("pipes.py" if environment.stdlib_has_pipes else "None")


def test_public_names_agree() -> None:
    assert set(pipes._HOME) == {*pipes.__all__, "quote"}
    assert set(pipes.__all__) <= set(dir(pipes))


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Batcher'; stages are in pipes\.iter"):
        pipes.Batcher  # noqa: B018


def test_version_is_that_of_the_distribution() -> None:
    assert version("pipes") == pipes.__version__
