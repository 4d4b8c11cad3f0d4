"""Every Python block of the README and the docs runs as it stands there; what needs a real bucket is built only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> list[object]:
    found: list[object] = []
    for page in PAGES:
        for place, match in enumerate(BLOCK.finditer(page.read_text())):
            line = page.read_text()[: match.start()].count("\n") + 2
            found.append(pytest.param(match[1], str(page), line, id=f"{page.name}-{place}"))
    return found


@pytest.mark.parametrize(("code", "page", "line"), blocks())
def test_block_runs(code: str, page: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Errors name the page and its line.
    exec(compile("\n" * (line - 1) + code, page, "exec"), {"__name__": "documentation"})


def test_readme_has_blocks() -> None:
    assert len(BLOCK.findall((ROOT / "README.md").read_text())) >= 2


def test_the_map_of_the_code_names_every_module() -> None:
    text = (ROOT / "docs" / "inside.md").read_text()
    named = set(re.findall(r"`(?:[a-z0-9]+/)?([a-z0-9_]+)`", text))
    modules = {path.stem for path in (ROOT / "pipes").rglob("*.py") if not path.stem.startswith("__")}
    assert not modules - named - {"_pipes_first"}
    for name in re.findall(r"`((?:loader2|sources|formats|stages|inspector)/[a-z0-9_]+)`", text):
        assert (ROOT / "pipes" / f"{name}.py").is_file(), name
