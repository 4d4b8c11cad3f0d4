"""The command `pipes-inspect graph.yaml`.

Exit status: 0 all is fine; 1 the graph has errors, or failed while it ran; 2 wrong use, a file that cannot be read
included; 130 interrupted. Heavy imports wait until the arguments are right, so `--help` is quick.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from pipes.errors import ConfigError
    from pipes.inspector.elements import Described
    from pipes.inspector.report import Report

__all__ = ["main"]

_EPILOG = """\
exit status: 0 fine; 1 the graph has errors (printed with file, line and column); 2 wrong use

examples:
  pipes-inspect graph.yaml --set BUCKET=photos --streams 8
  pipes-inspect graph.yaml --peek 2 --functions augment.py
  pipes-inspect graph.yaml --format mermaid > graph.mmd
"""


def _whole_number(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if not least <= value <= 1_000_000:
            raise argparse.ArgumentTypeError(f"a whole number from {least} is needed, not {text!r}")
        return value

    return convert


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"NAME=VALUE is needed, not {text!r}")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipes-inspect",
        description="Show what a YAML graph of pipes does: its stages, sharding, state, length and memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("graph", help="the YAML file; - reads standard input")
    parser.add_argument("--peek", type=_whole_number(0), default=0, metavar="N", help="run it here and show N elements")
    parser.add_argument("--format", choices=("text", "json", "mermaid"), default="text", help="default: text")
    parser.add_argument(
        "--streams", type=_whole_number(1), default=1, metavar="K", help="as run by K streams (default: 1)"
    )
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="the value of ${NAME} in the graph",
    )
    parser.add_argument(
        "--functions",
        action="append",
        default=[],
        metavar="FILE",
        help="Python file or module whose functions the graph may name; its code is run",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; argparse exits with 2 by itself.

    >>> main(["no-such-file.yaml"])
    2
    """
    options = _parser().parse_args(argv)
    try:
        status = _inspect(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read our output has gone; a second flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _inspect(options: argparse.Namespace) -> int:
    from pipes.errors import ConfigError

    name = "<stdin>" if options.graph == "-" else options.graph
    try:
        data = _read(options.graph)
    except OSError as error:
        return _wrong_use(f"cannot read {name}: {error.strerror or error}")
    from pipes.config import load_functions, read_graph

    try:
        functions = load_functions(options.functions)
    except Exception as error:
        return _wrong_use(f"--functions: {type(error).__name__}: {error}")
    try:
        pipe = read_graph(data, name, functions=functions, variables=dict(options.set))
    except ConfigError as error:
        _show_errors(error, data)
        return 1
    from pipes.inspector.report import describe_graph

    report = describe_graph(pipe, options.streams)
    if options.format != "text":
        return _machine(options, name, report, pipe)
    from rich.text import Text

    from pipes.inspector.drawing import draw_elements, draw_report

    console = _console()
    for part in draw_report(report, name, console):
        console.print(part, soft_wrap=not console.is_terminal and isinstance(part, Text))
    if options.peek:
        elements = _peek(pipe, options.peek)
        if elements is None:
            return 1
        for part in draw_elements(elements, console):
            console.print(part)
    return 0


def _read(path: str) -> bytes:
    from pipes.config import MAX_BYTES

    if path == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    with open(path, "rb") as stream:
        return stream.read(MAX_BYTES + 1)


def _machine(options: argparse.Namespace, name: str, report: Report, pipe: Any) -> int:
    if options.format == "mermaid":
        from pipes.inspector.drawing import mermaid

        print(mermaid(report))
        return 0
    data = {"file": name, **report.as_data()}
    if options.peek:
        elements = _peek(pipe, options.peek)
        if elements is None:
            return 1
        data["elements"] = [element.as_data() for element in elements]
    print(json.dumps(data, indent=2))
    return 0


def _peek(pipe: Any, count: int) -> list[Described] | None:
    """Return the first elements; None after printing why the graph failed."""
    from pipes.errors import mask, notes_of
    from pipes.inspector.elements import first_elements

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            return first_elements(pipe, count)
        except Exception as error:
            print(mask(f"pipes-inspect: the graph failed: {type(error).__name__}: {error}"), file=sys.stderr)
            for note in notes_of(error):
                print(mask(f"  {note}"), file=sys.stderr)
            return None
        finally:
            for warning in caught:
                print(mask(f"warning: {warning.message}"), file=sys.stderr)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `main` knows what to do; rich would end the process with 1

    return Quiet(stderr=stderr, highlight=False, markup=False, emoji=False)


def _wrong_use(message: str) -> int:
    print(f"pipes-inspect: {message}", file=sys.stderr)
    return 2


def _show_errors(error: ConfigError, data: bytes) -> None:
    """Print each error with its line and a caret under the column."""
    from rich.text import Text

    from pipes.errors import mask

    console = _console(stderr=True)
    lines = data.decode("utf-8-sig", "replace").split("\n")
    for each in error.errors:
        console.print(
            Text.assemble(
                (f"{each.file}:{each.line}:{each.column}: ", "bold"), ("error: ", "bold red"), mask(each.message)
            ),
            soft_wrap=True,
        )
        line = lines[each.line - 1].rstrip() if each.line <= len(lines) else ""
        if line:
            before = mask(line[: each.column - 1])
            caret = "".join("\t" if character == "\t" else " " for character in before)
            console.print(Text(f"  {mask(line)}", style="dim"), soft_wrap=True)
            console.print(Text(f"  {caret}^", style="red"), soft_wrap=True)
    count = len(error.errors)
    console.print(Text(f"{count} error{'' if count == 1 else 's'}", style="bold"))
