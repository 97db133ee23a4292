"""Tokens that were made before, for runs that need the same.

An entry is a folder, named after all that decides its content. It is written aside and renamed,
never changed, and checked byte by byte before it is used; runs need no lock for it. A run directory
gets the files themselves (as links where both are on one file system): it stays whole when the
cache is emptied, and the cache may be one that only the main rank's node sees.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmft.core.files import fingerprint, read_json, write_folder, write_json

_SUMS = "sums.json"
_KEPT_S = 30 * 86400
"""Entries that no run has used for so long are removed when another is added."""
_LEFTOVER_S = 86400


class DamagedError(Exception):
    """An entry that is not as it was written."""


def folder() -> Path:
    """Where the entries are: beside the hub's caches, which users put where there is room."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "slurmft" / "tokens"


def key_of(sources: dict[str, Any]) -> str:
    """The name of the tokens that follow from `sources`, which JSON can hold."""
    text = json.dumps(sources, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def take(cache: Path, key: str, into: Path) -> bool:
    """Fills an empty folder with the files of an entry; returns whether there is one.

    One that is removed meanwhile counts as none.

    Raises:
        DamagedError: there was one, and it was not whole. It is removed; `into` is empty.
    """
    entry = cache / key
    sums = read_json(entry / _SUMS)
    if sums is None and not entry.exists():
        return False
    with contextlib.suppress(OSError):
        os.utime(entry)  # in use from now on: nobody takes it for one that may go
    try:
        if sums is None:
            raise DamagedError(f"it has no {_SUMS}")
        for name in sums:
            _link(entry / name, into / name)
        _check(into, sums)
    except (OSError, DamagedError) as error:
        for path in into.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not entry.exists():
            return False
        _remove(entry)
        raise DamagedError(str(error)) from error
    return True


def keep(cache: Path, key: str, tokens: Path) -> None:
    """Adds an entry with the files of a folder, unless another run was faster.

    Raises:
        OSError: it cannot be written; there is no entry then.
    """
    cache.mkdir(parents=True, exist_ok=True)
    for path, _ in unused(cache, _KEPT_S):
        _remove(path)

    def fill(entry: Path) -> None:
        files = [path for path in tokens.rglob("*") if path.is_file()]
        names = sorted(path.relative_to(tokens).as_posix() for path in files)
        for name in names:
            _link(tokens / name, entry / name)
        write_json(entry / _SUMS, {name: fingerprint(entry / name) for name in names})

    if not (cache / key).exists():
        write_folder(cache / key, fill, replace=False)  # others may be reading it


def _link(source: Path, target: Path) -> None:
    """One file twice. Arrays, which nobody changes, take their room once; what may end up in a
    model's folder is copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".npy":
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _check(folder: Path, sums: dict[str, Any]) -> None:
    for name, expected in sums.items():
        if fingerprint(folder / name) != expected:
            raise DamagedError(f"{name} is not as it was written")


def unused(cache: Path, for_s: float) -> Iterator[tuple[Path, float]]:
    """Entries that no run has used for so many seconds, and what kills left a day ago or more; with
    the seconds since then."""
    try:
        paths = sorted(cache.iterdir())
    except OSError:
        return  # there is none, or it is somebody else's
    for path in paths:
        limit_s = _LEFTOVER_S if path.name.startswith(".") else for_s
        with contextlib.suppress(OSError):
            idle_s = time.time() - path.stat().st_mtime
            if idle_s > limit_s:
                yield path, idle_s


def _remove(entry: Path) -> None:
    """Removes a folder at once for whoever looks for it; or not at all, if another process does."""
    aside = entry.with_name(f".{entry.name.lstrip('.')}.{secrets.token_hex(4)}.old")
    with contextlib.suppress(OSError):
        entry.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
