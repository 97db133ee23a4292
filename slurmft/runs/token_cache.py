"""Tokens that were made before, for runs that need the same.

An entry is a folder, named after all that decides its content. It is written aside and renamed,
never changed, and checked byte by byte before it is used; runs need no lock for it. A run directory
gets the files themselves (as links where both are on one file system): it stays whole when the
cache is emptied, and the cache may be one that only the main rank's node sees.

Sums tell damage, not who wrote it. So every user has a cache of their own, also where the hub's
caches are shared, and nothing is used that others have written, or could have.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmft.core import permissions
from slurmft.core.errors import SlurmftError
from slurmft.core.files import fingerprint, new_folder, write_json

_SUMS = "sums.json"
_NAME = re.compile(r"(meta|texts)\.json|(train|validation)/\w+\.npy|tokenizer/\w[\w.-]*")
"""What tokens consist of; no other file is written or taken."""
_KEPT_S = 30 * 86400
"""Entries that no run has used for so long are removed when another is added."""
_LEFTOVER_S = 86400


class DamagedError(Exception):
    """An entry that is not as it was written."""


def folder() -> Path:
    """Where this user's entries are: beside the hub's caches, which users put where there is
    room."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / f"slurmft-tokens-{os.geteuid()}"


def key_of(sources: dict[str, Any]) -> str:
    """The name of the tokens that follow from `sources`, which JSON can hold."""
    text = json.dumps(sources, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def take(cache: Path, key: str, into: Path) -> bool:
    """Fills an empty folder with the files of an entry; returns whether there is one.

    One that is removed meanwhile counts as none.

    Raises:
        DamagedError: there was one, and it was not whole. It is removed; `into` is empty.
        NotOwnError: there is one, but others could have written it. `into` is empty.
    """
    try:
        with _opened(cache) as top, _opened(cache / key, top) as entry:
            with contextlib.suppress(OSError):
                os.utime(entry)  # in use from now on: nobody takes it for one that may go
            try:
                _fill(cache / key, entry, into)
            except (OSError, ValueError, RecursionError, DamagedError) as error:
                _empty(into)
                if not (cache / key).exists():
                    return False
                _remove(top, key)
                raise DamagedError(str(error)) from error
            except BaseException:
                _empty(into)
                raise
    except OSError:  # there is none, or it is closed to this user
        return False
    return True


def _fill(path: Path, entry: int, into: Path) -> None:
    with open(permissions.open_own(path / _SUMS, entry), "rb") as file:
        sums = json.loads(file.read())
    if not isinstance(sums, dict) or not all(map(_NAME.fullmatch, sums)):
        raise DamagedError(f"{_SUMS} names what tokens have not")
    files = {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()}
    if files != {_SUMS, *sums}:
        raise DamagedError(f"{_SUMS} names other files than there are")
    for name, expected in sums.items():
        target = into / name
        target.parent.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            below = (path / name).parent
            above = entry if below == path else stack.enter_context(_opened(below, entry))
            _link(path / name, above, target)
        if fingerprint(target) != expected:
            raise DamagedError(f"{name} is not as it was written")


@contextlib.contextmanager
def _opened(path: Path, above: int | None = None) -> Iterator[int]:
    """A descriptor of a folder of this user's. No link is followed to it: another's, in a shared
    folder, could lead to what this user has elsewhere, and would be emptied here."""
    descriptor = permissions.open_own(path, above, is_folder=True)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _link(path: Path, folder: int, target: Path) -> None:
    """One file twice. Arrays, which nobody changes, take their room once; what may end up in a
    model's folder is copied."""
    with open(permissions.open_own(path, folder), "rb") as file:
        if target.suffix == ".npy":
            with contextlib.suppress(OSError):  # another file system, or one without links
                os.link(path.name, target, src_dir_fd=folder, follow_symlinks=False)
                return
        with open(target, "xb") as copy:
            shutil.copyfileobj(file, copy)


def _empty(into: Path) -> None:
    for path in into.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def keep(cache: Path, key: str, tokens: Path) -> None:
    """Adds an entry with the files of a folder, unless another run was faster.

    Raises:
        OSError: it cannot be written; there is no entry then.
        SlurmftError: others can write the cache, or its owner is another user; or a file's name.
    """
    with permissions.as_in(cache.parent):
        cache.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(mode=0o700, exist_ok=True)
    with _opened(cache) as top:
        for path, _ in unused(cache, _KEPT_S):
            _remove(top, path.name)

        if (cache / key).exists():
            return
        files = [path.relative_to(tokens) for path in tokens.rglob("*") if path.is_file()]
        names = sorted(map(Path.as_posix, files))
        with new_folder(cache / key, replace=False) as entry:  # others may be reading it
            for name in names:
                if not _NAME.fullmatch(name):
                    raise SlurmftError(f"tokens have no file {name!r}")
                (entry / name).parent.mkdir(exist_ok=True)
                with _opened((tokens / name).parent) as above:
                    _link(tokens / name, above, entry / name)
            write_json(entry / _SUMS, {name: fingerprint(entry / name) for name in names})


def unused(cache: Path, for_s: float) -> Iterator[tuple[Path, float]]:
    """Entries that no run has used for so many seconds, and what kills left a day ago or more; with
    the seconds since then."""
    try:
        with _opened(cache) as top:
            names = sorted(os.listdir(top))
    except (OSError, SlurmftError):
        return  # there is none, or it is not this user's alone
    for name in names:
        path, limit_s = cache / name, _LEFTOVER_S if name.startswith(".") else for_s
        with contextlib.suppress(OSError):
            idle_s = time.time() - path.lstat().st_mtime
            if idle_s > limit_s:
                yield path, idle_s


def _remove(cache: int, name: str) -> None:
    """Removes a folder at once for whoever looks for it; or not at all, if another process does."""
    aside = f".{name.lstrip('.')}.{secrets.token_hex(4)}.old"
    with contextlib.suppress(OSError):
        os.rename(name, aside, src_dir_fd=cache, dst_dir_fd=cache)
        shutil.rmtree(aside, ignore_errors=True, dir_fd=cache)
