"""What a client of NFS remembers of names that were not there, as measured in tests/lab."""

from __future__ import annotations

import builtins
import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest


def remember_absent_names(monkeypatch: pytest.MonkeyPatch, top: Path) -> None:
    """Below `top`, a name that was not there stays so until its folder is opened. (NFS forgets it
    after 30 to 60 seconds, too, which no wait of slurmft's should rely on.)"""
    absent: set[Path] = set()
    stat, os_open, listdir, open_file = os.stat, os.open, os.listdir, builtins.open

    def look_up(path: Any) -> None:
        if (
            not isinstance(path, (str, Path))
            or top not in (place := Path(path)).parents
        ):
            return
        if place not in absent and not os.path.lexists(place):
            absent.add(place)
        if place in absent:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def ask_again(folder: Any) -> None:
        absent.difference_update(
            [path for path in absent if str(path.parent) == str(folder)]
        )

    def remembering_stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        look_up(path)
        return stat(path, *args, **kwargs)

    def remembering_open(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "r" in mode:
            look_up(path)
        return open_file(path, mode, *args, **kwargs)

    def asking_os_open(path: Any, *args: Any, **kwargs: Any) -> int:
        ask_again(path)
        return os_open(path, *args, **kwargs)

    def asking_listdir(path: Any = ".") -> list[str]:
        ask_again(path)
        return listdir(path)

    monkeypatch.setattr(os, "stat", remembering_stat)
    monkeypatch.setattr(os, "open", asking_os_open)
    monkeypatch.setattr(os, "listdir", asking_listdir)
    monkeypatch.setattr(builtins, "open", remembering_open)
    monkeypatch.setattr(io, "open", remembering_open)  # by which a Path reads
