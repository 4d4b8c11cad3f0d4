"""The command `pipes-inspect`, most of it in this process, its edges in real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipes.inspector.cli import main

GRAPH = "version: 1\npipe:\n  - IterableWrapper: !range ${N:-9}\n  - sharding_filter\n  - map: str\n  - batch: 2\n"
EXAMPLE = Path(__file__).parents[2] / "examples" / "graph.yaml"


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    file = tmp_path / "g.yaml"
    file.write_text(GRAPH)
    return file


def run(*arguments: object, code: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "pipes.inspector"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def test_text(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(graph), "--streams", "2"]) == 0
    out, err = capsys.readouterr()
    assert "4 stages, 2 streams" in out
    assert "sharding_filter" in out
    assert "\x1b" not in out
    assert err == ""


def test_peek(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(graph), "--peek", "2"]) == 0
    out, _ = capsys.readouterr()
    assert "element 1" in out
    assert "element 2" not in out
    assert "2 items: '0', '1'" in out


def test_json(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(graph), "--format", "json", "--peek", "1", "--set", "N=3"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["file"] == str(graph)
    assert [stage["name"] for stage in data["stages"]] == ["IterableWrapper", "sharding_filter", "map", "batch"]
    assert data["stages"][-1]["length"] == 2
    assert data["elements"] == [{"kind": "DataChunk", "text": "2 items: '0', '1'"}]


def test_mermaid(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(graph), "--format", "mermaid"]) == 0
    assert capsys.readouterr().out.startswith("flowchart TD\n")


def test_errors_show_their_line_with_a_caret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(
        "version: 1\npipe:\n  - IterableWrapper: [1]\n  - shufle: 3\n  - header: {limit: x, secret_key: hush}\n"
    )
    assert main([str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"{file}:4:5: error: there is no stage 'shufle'; did you mean 'shuffle'?",
        "    - shufle: 3",
        "      ^",
        f"{file}:5:21: error: header: limit should be int or null, not str",
        "    - header: {limit: x, secret_key: ***",
        "                      ^",
        f"{file}:5:24: error: header has no parameter 'secret_key'; it takes limit",
        "    - header: {limit: x, secret_key: ***",
        "                         ^",
        "3 errors",
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["none.yaml"], "cannot read none.yaml: No such file"),
        (["."], "cannot read .: Is a directory"),
        ([str(EXAMPLE), "--functions", "none.py"], "--functions: ImportError: there is no file none.py"),
        ([str(EXAMPLE), "--functions", "pipes_no_such_module"], "--functions: ModuleNotFoundError"),
    ],
)
def test_wrong_use_is_2(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["g", "--peek", "-1"],
        ["g", "--peek", "x"],
        ["g", "--streams", "0"],
        ["g", "--set", "N"],
        ["g", "--format", "xml"],
    ],
)
def test_wrong_options_are_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: pipes-inspect" in capsys.readouterr().err


def test_functions_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cli_test_mine.py").write_text("def shout(text):\n    return text.upper()\n")
    file = tmp_path / "g.yaml"
    file.write_text("version: 1\npipe: [IterableWrapper: [ab], map: shout]\n")
    assert main([str(file), "--peek", "1"]) == 1
    assert "--functions" in capsys.readouterr().err
    assert main([str(file), "--peek", "1", "--functions", str(tmp_path / "cli_test_mine.py")]) == 0
    assert "'AB'" in capsys.readouterr().out


def test_a_graph_that_fails_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.yaml"
    file.write_text("version: 1\npipe: [IterableWrapper: [x], map: int]\n")
    assert main([str(file), "--peek", "1"]) == 1
    err = capsys.readouterr().err
    assert "the graph failed: ValueError: invalid literal" in err
    assert f"in stage 1:Mapper built at {file}:2, on element 'x'" in err
    assert "Traceback" not in err


def test_the_example_reads_a_real_store(moto_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    import io
    import tarfile

    import boto3
    from PIL import Image

    client = boto3.client("s3", endpoint_url=moto_server)
    client.create_bucket(Bucket="cli-example")
    for shard in range(2):
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as archive:
            for number in range(70):
                image = io.BytesIO()
                Image.new("RGB", (8, 6), (number, 0, 0)).save(image, "JPEG")
                for name, data in (
                    (f"{number:03d}.jpg", image.getvalue()),
                    (f"{number:03d}.cls", b"%d" % (number % 3)),
                ):
                    member = tarfile.TarInfo(f"{shard}/{name}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        client.put_object(Bucket="cli-example", Key=f"train/{shard}.tar", Body=raw.getvalue())
    client.close()
    arguments = [str(EXAMPLE), "--set", "BUCKET=cli-example", "--set", f"ENDPOINT={moto_server}", "--peek", "2"]
    assert main([*arguments, "--format", "json"]) == 0
    elements = json.loads(capsys.readouterr().out)["elements"]
    assert [element["inside"]["jpg"]["text"] for element in elements] == ["uint8 3x6x8"] * 2
    assert main(arguments) == 0
    assert "uint8 3x6x8" in capsys.readouterr().out


def test_help_is_light() -> None:
    code = (
        "import sys\nfrom pipes.inspector.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'boto3', 'botocore', 'yaml', 'rich', 'obstore'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = run(code=code)
    assert done.returncode == 0, done.stderr
    assert "usage: pipes-inspect" in done.stdout


def test_standard_input_no_color_and_module_start() -> None:
    done = run("-", "--peek", "1", input=GRAPH, env={**os.environ, "FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("<stdin>", "\x1b[1m<stdin>"))
    assert "\x1b[3" not in done.stdout


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    stages = "".join(f"  - skip: {n}\n" for n in range(300))
    file.write_text(f"version: 1\npipe:\n  - IterableWrapper: [1]\n{stages}")
    with subprocess.Popen(
        [sys.executable, "-m", "pipes.inspector", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (0, b"")


def test_an_interrupt_is_130(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\ndef slow(value):\n    pathlib.Path({str(mark)!r}).touch()\n    time.sleep(60)\n"
    )
    file = tmp_path / "g.yaml"
    file.write_text("version: 1\npipe: [IterableWrapper: [1], map: slow]\n")
    with subprocess.Popen(
        [sys.executable, "-m", "pipes.inspector", str(file), "--peek", "1", "--functions", str(tmp_path / "slow.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        for _ in range(1200):
            if mark.exists() or process.poll() is not None:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")
