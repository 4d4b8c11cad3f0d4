"""Errors that do not travel well."""

from __future__ import annotations

import threading


class HoldsLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")
