"""What has the methods of iopath's PathManager that the pipes call, over one local folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class FolderManager:
    """Paths "here://..." lie in `folder`; others are local."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def _local(self, path: str) -> Path:
        return Path(self.folder, path.removeprefix("here://"))

    def ls(self, path: str) -> list[str]:
        return os.listdir(self._local(path))

    def isfile(self, path: str) -> bool:
        return self._local(path).is_file()

    def mkdirs(self, path: str) -> None:
        self._local(path).mkdir(parents=True, exist_ok=True)

    def rm(self, path: str) -> None:
        self._local(path).unlink()

    def open(self, path: str, mode: str = "r") -> Any:
        return self._local(path).open(mode)
