"""Tokens that were made before, for runs of the same user that need the same.

An entry is a folder, named after all that decides its content. It is written aside and renamed,
never changed, and checked byte by byte before it is used; runs need no lock for it. A run directory
gets the files themselves (as links where both are on one file system): it stays whole when the
cache is emptied, and the cache may be one that only the main rank's node sees.

Checksums tell damage, not who wrote a file. So the cache is private: its folder belongs to the user
and has mode 0700, and nothing is used of one that others may look into or write. It holds a mark:
others may have renamed another folder of the user's to its name.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmft.core import permissions, removal, trusted
from slurmft.core.errors import SlurmftError
from slurmft.core.files import fingerprint, new_folder, write_json

CACHE = trusted.Door(
    "the token cache",
    "`$HF_HOME/slurmft-tokens-UID/`",
    "the tokens that a run trains on; each file is compared with its sum",
    cure="set HF_HOME to a folder of yours",
)
_SUMS = "sums.json"
_NAME = re.compile(
    r"(meta|texts)\.json|(train|validation)/\w+\.npy|tokenizer/\w[\w.-]*"
)
"""Files that tokens consist of; no other file is written or taken, whatever damage says."""
_TOP = re.compile(r"(meta|texts)\.json|train|validation|tokenizer")
"""Names of these in the folder of an entry."""
_MARK = "slurmft-token-cache"
"""A file in each cache, which is made with it."""
ENTRY = re.compile(rf"[0-9a-f]{{32}}|\.[0-9a-f]{{32}}{removal.ASIDE_ENDING}")
"""Names of entries, as `key_of` makes them, and of those that are being written or removed."""
_UNUSED_S = 30 * 86400
"""Entries that no run has used for so long are removed when another is added."""
_LEFTOVER_S = 86400
"""Age from which on what a killed process left is removed."""


class DamagedError(Exception):
    """An entry that is not as it was written."""


def folder() -> Path:
    """Returns the folder of this user's entries.

    It is beside the hub's caches, which users put where there is room.
    """
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / f"slurmft-tokens-{os.geteuid()}"


def key_of(sources: dict[str, Any]) -> str:
    """Returns the name of the tokens that follow from `sources`, which JSON can hold."""
    text = json.dumps(sources, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# --- the private folder ---------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(cache: Path) -> Iterator[Path]:
    """Opens a cache; yields a path through a descriptor of it.

    Raises:
        NotOwnError: it is not this user's alone, or slurmft has not made it.
        OSError: there is none, or it is a link.
    """
    with CACHE.private(cache) as private:
        if not os.path.lexists(private / _MARK):
            raise trusted.NotOwnError(
                f"{CACHE.what} {str(cache)!r} is a folder that slurmft has not made: it has no "
                f"{_MARK!r}",
                "move it elsewhere",
            )
        yield private


def _make(cache: Path) -> None:
    """Makes a cache with its mark, unless something is there.

    Raises:
        OSError: it cannot be made.
    """
    if os.path.lexists(cache):
        return
    with permissions.as_in(cache.parent):
        cache.parent.mkdir(parents=True, exist_ok=True)
    aside = removal.aside_of(cache)
    aside.mkdir(mode=0o700)
    with CACHE.private(aside) as private:
        # Others may have put another folder there.
        if os.listdir(private):
            return
        try:
            private.joinpath(_MARK).touch()
            # Another process may be faster: no rename replaces a folder that holds something.
            os.rename(aside, cache)
        except OSError:
            inode = private.stat().st_ino
            with contextlib.suppress(OSError):
                removal.remove(aside, removal.ASIDE, inode=inode)
            if not os.path.lexists(cache):
                raise


def _is_entry(path: Path) -> bool:
    """Returns whether a folder holds what entries hold, and nothing else."""
    try:
        names = set(os.listdir(path))
    except OSError:
        return False
    if not all(name == _SUMS or _TOP.fullmatch(name) for name in names):
        return False
    # One that is being written or removed may lack any of them.
    is_whole = not path.name.startswith(".")
    return not is_whole or not names.isdisjoint((_SUMS, "meta.json"))


def _remove(cache: Path, name: str) -> None:
    """Removes an entry at once for whoever looks for it; or not at all, if another process does."""
    if not _is_entry(cache / name):
        return
    # `unused` takes what a kill leaves of it for a leftover.
    removal.discard(cache / name, ENTRY, at_once=True)


def unused(cache: Path, for_s: float) -> Iterator[tuple[Path, float]]:
    """Yields entries that no run has used for so many seconds, with the seconds since then.

    So it does what kills left a day ago or more.
    """
    now = time.time()
    try:
        with _opened(cache) as private:
            idle_s = {}
            for path in filter(_is_entry, removal.matching(private, ENTRY)):
                # `take` touches an entry that it uses.
                idle_s[path.name] = now - path.lstat().st_mtime
    except (OSError, SlurmftError):
        return  # there is none, or it is not this user's alone
    for name, seconds in idle_s.items():
        limit_s = _LEFTOVER_S if name.startswith(".") else for_s
        if seconds > limit_s:
            yield cache / name, seconds


# --- entries --------------------------------------------------------------------------------------


def take(cache: Path, key: str, into: Path) -> bool:
    """Fills an empty folder with the files of an entry; returns whether there is one.

    One that is removed meanwhile counts as none.

    Raises:
        DamagedError: there was one, and it was not whole. It is removed; `into` is empty.
        NotOwnError: the cache is not this user's alone, or not made by slurmft.
    """
    try:
        with _opened(cache) as private:
            return _take(private, key, into)
    except OSError:  # there is none, or it is closed to this user
        return False


def _take(cache: Path, key: str, into: Path) -> bool:
    entry = cache / key
    if not entry.is_dir():
        return False
    with contextlib.suppress(OSError):
        os.utime(entry)  # in use from now on: nobody takes it for one that may go
    try:
        _fill(entry, into)
    except (OSError, ValueError, RecursionError, DamagedError) as error:
        _empty(into)
        if not entry.exists():
            return False
        _remove(cache, key)
        raise DamagedError(str(error)) from error
    except BaseException:
        _empty(into)
        raise
    return True


def _fill(entry: Path, into: Path) -> None:
    sums = json.loads((entry / _SUMS).read_bytes())
    # Before any file is placed: a name such as ../x would lead out of the folder.
    if not isinstance(sums, dict) or not all(map(_NAME.fullmatch, sums)):
        raise DamagedError(f"{_SUMS} names what tokens have not")
    files = set(_files_in(entry))
    if files != {_SUMS, *sums}:
        raise DamagedError(f"{_SUMS} names other files than there are")
    for name, expected in sums.items():
        _place(entry / name, into / name)
        # The copy is checked, not the entry: what the run will read.
        if fingerprint(into / name) != expected:
            raise DamagedError(f"{name} is not as it was written")


def _files_in(folder: Path) -> list[str]:
    """Returns the names of the files in a folder, at any depth, in order."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def _place(source: Path, target: Path) -> None:
    """Puts a file into another folder.

    Arrays, which nobody changes, take their room once; what may end up in a model's folder is
    copied.
    """
    target.parent.mkdir(exist_ok=True)
    if target.suffix == ".npy":
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _empty(into: Path) -> None:
    removal.sweep(into, _TOP)


def keep(cache: Path, key: str, tokens: Path) -> None:
    """Adds an entry with the files of a folder, unless another run was faster.

    Raises:
        OSError: it cannot be written; there is no entry then.
        SlurmftError: the cache is not this user's alone, or not made by slurmft; or a file has a
            name that tokens have not.
    """
    _make(cache)
    with _opened(cache) as private:
        for path, _ in unused(cache, _UNUSED_S):
            _remove(private, path.name)
        if (private / key).exists():
            return
        names = _files_in(tokens)
        # others may be reading it
        with new_folder(private / key, replace=False) as entry:
            for name in names:
                if not _NAME.fullmatch(name):
                    raise SlurmftError(f"tokens have no file {name!r}")
                _place(tokens / name, entry / name)
            sums = {name: fingerprint(entry / name) for name in names}
            write_json(entry / _SUMS, sums)
