"""The program that repeats tests says what ran and what failed."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from stress import Repeats, add

REPORT = """<testsuites><testsuite>
<testcase classname="tests.loader2.test_x.TestX" name="test_a[1]" time="1.0"/>
<testcase classname="tests.loader2.test_x.TestX" name="test_a[2]" time="3.0"><failure message="no"/></testcase>
<testcase classname="tests.loader2.test_x" name="test_b" time="2.0"><error message="at the end"/></testcase>
<testcase classname="tests.loader2.test_x" name="test_c" time="0.0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_round_is_added_up(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    sums: dict[str, Repeats] = defaultdict(Repeats)
    for _ in range(2):
        assert add(tmp_path / "report.xml", sums) == [
            "tests.loader2.test_x.TestX.test_a[2]",
            "tests.loader2.test_x.test_b",
        ]
    assert sums == {
        "loader2.test_x.TestX.test_a": Repeats(runs=4, failures=2, seconds=8.0),
        "loader2.test_x.test_b": Repeats(runs=2, failures=2, seconds=4.0),
    }
