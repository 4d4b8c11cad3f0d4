"""`${NAME}` in a YAML graph: values given by the caller, else from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

__all__ = ["Variables"]

_FOUND = re.compile(r"\$\$\{|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^}]*)?\})?")
_SECRET = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|CUSTOMER_?KEY", re.IGNORECASE)


class Variables:
    """Puts values in for `${NAME}` and `${NAME:-default}`; `$${` stays a literal `${`.

    The environment is read for names that are not given, but never for one that looks like a secret: a graph from
    somebody else could send it to a server of theirs.

    >>> Variables({"BUCKET": "photos"}).put_into("s3://${BUCKET}/${PREFIX:-train}/")
    ('s3://photos/train/', [])
    """

    def __init__(self, given: Mapping[str, object] | None = None) -> None:
        self.given = {name: str(value) for name, value in (given or {}).items()}

    def put_into(self, text: str) -> tuple[str, list[tuple[int, str]]]:
        """Return the text with values, and what is wrong with it as (offset in `text`, message)."""
        wrong: list[tuple[int, str]] = []

        def value(found: re.Match[str]) -> str:
            name, default = found["name"], found["default"]
            if found[0] == "$${":
                return "${"
            if name is None:
                wrong.append((found.start(), "'${' should be ${NAME} or ${NAME:-default}; a literal '${' is '$${'"))
            elif name in self.given:
                return self.given[name]
            elif _SECRET.search(name) and name in os.environ:
                wrong.append((found.start(), f"${{{name}}} looks like a secret; {_HOW[1]}"))
            elif name in os.environ:
                return os.environ[name]
            elif default is not None:
                return default[2:]
            else:
                wrong.append((found.start(), f"${{{name}}} has no value; {_HOW[0].format(name=name)}"))
            return ""

        return _FOUND.sub(value, text), wrong


_HOW = (
    "set it in the environment, with `pipes-inspect --set {name}=...` or load_graph(..., variables={{...}})",
    "those are not read from the environment: S3 stages find theirs by themselves, for others pass it with --set",
)
