"""Fingerprints of the files that a run reads: have they changed since its submission?

A file of up to 16 MiB is hashed whole. Of a larger one 256 blocks of 64 KiB are, evenly spaced, its
beginning and its end among them: a second's work for any size. What changes between them, and
keeps the size, shows in the time of modification alone.
"""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import slurmft
from slurmft.core import interpreter
from slurmft.core.config import RunConfig
from slurmft.core.files import open_regular
from slurmft.core.text import in_bytes, some

# Backwards, so that of two versions the one counts that is first on the path: that is imported.
# NAME-VERSION.dist-info has two hyphens; a folder with one has no version.
_PACKAGES = """\
import json, os, sys
versions = {}
for folder in reversed([path for path in sys.path if os.path.isdir(path)]):
    for name in os.listdir(folder):
        if name.endswith("-info") and name.count("-") > 1:
            versions.update([name.rpartition(".")[0].split("-")[:2]])
print(json.dumps(versions))"""
"""Program that prints the packages that its Python finds."""
FOLDER = "folder"
"""What a fingerprint is of, where it is of an argument of a program: the program itself may write
there."""
_WHOLE_BYTES = 2**24
_BLOCK_BYTES = 2**16


def of(path: Path) -> dict[str, Any]:
    """Returns the fingerprint of a file, of the files in a folder, or of those that a name with a
    star stands for.

    Folders within the folder, and hidden files, do not count.

    Returns:
        bytes; mtime_ns, of the file that was written last; sha256, of what the module's docstring
        says.
    """
    import hashlib  # not for every command

    files = [path]
    folder = path
    if path.is_dir():
        files = sorted(file for file in path.glob("[!.]*") if file.is_file())
    elif "*" in path.name and not path.exists():
        folder = path.parent
        files = sorted(folder.glob(path.name))
        if not files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    digest = hashlib.sha256()
    size_bytes = 0
    mtime_ns = 0
    for file in files:
        stat = file.stat()
        size_bytes += stat.st_size
        mtime_ns = max(mtime_ns, stat.st_mtime_ns)
        # Names and sizes, too: a byte that moves from one file to the next is a change.
        head = f"{file.relative_to(folder)}\0{stat.st_size}\0"
        digest.update(head.encode())
        for block in _blocks(file, stat.st_size):
            digest.update(block)
    return {"bytes": size_bytes, "mtime_ns": mtime_ns, "sha256": digest.hexdigest()}


def _blocks(path: Path, size_bytes: int) -> Iterator[bytes]:
    """Yields the parts of a file that are hashed."""
    with open_regular(path) as file:
        if size_bytes <= _WHOLE_BYTES:
            yield file.read(_WHOLE_BYTES)
            return
        count = _WHOLE_BYTES // _BLOCK_BYTES
        last_place = size_bytes - _BLOCK_BYTES
        for number in range(count):
            # The first block begins the file, the last one ends it.
            file.seek(last_place * number // (count - 1))
            yield file.read(_BLOCK_BYTES)


def of_code() -> str:
    """Returns the checksum of slurmft itself: of the contents of its modules."""
    import hashlib

    package = Path(slurmft.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        head = f"{path.relative_to(package)}\0"
        digest.update(head.encode() + path.read_bytes())
    return digest.hexdigest()


def packages(python: str) -> dict[str, str]:
    """Returns name -> version of the packages that a Python finds; {} where it cannot be started.

    The names of their folders say it: importlib.metadata would read a file of each.
    """
    from slurmft.core import process  # 6 ms: `status` and `list` start no Python

    command = interpreter.foreign_code(python, _PACKAGES)
    environment = interpreter.library_environment(dict(os.environ))
    printed = process.output(command, 60, env=environment) or ""
    # What the Python imports at its start may print, too: the answer is the last line.
    last_line = printed.rstrip().rpartition("\n")[2]
    try:
        versions: dict[str, str] = json.loads(last_line)
    except ValueError:
        return {}
    return versions


def changes(config: RunConfig, has_run: bool = False) -> dict[str, str]:
    """Returns what has changed of a run's data and model, and of slurmft, since its submission.

    Args:
        has_run: an attempt has begun before: folders that arguments of a program name may have
            changed by the program.

    Returns:
        path, or "slurmft" -> the change in words; without what is as it was.
    """
    changed = {}
    for path, before in config.program.inputs.items():
        if has_run and before["what"] == FOLDER:
            continue
        change = _change(Path(path), before)
        if change:
            changed[path] = change
    code_before = config.submission.code
    # Nothing is known of code that the submission has not recorded.
    if code_before not in ("", of_code()):
        version_before = config.submission.slurmft
        if version_before == slurmft.__version__:
            changed["slurmft"] = "other modules"
        else:
            changed["slurmft"] = f"was {version_before}, is {slurmft.__version__}"
    return changed


def _change(path: Path, before: dict[str, Any]) -> str:
    """Returns in words how a file differs from its fingerprint; "" if it does not."""
    try:
        now = of(path)
    except FileNotFoundError:
        return "gone"
    # It is closed to the user who asks, and may be unchanged.
    except OSError:
        return ""
    if now["bytes"] != before["bytes"]:
        size_before = in_bytes(before["bytes"])
        size_now = in_bytes(now["bytes"])
        # They differ by less than is shown: "1.2 GiB -> 1.2 GiB" would look like a fault.
        if size_before == size_now:
            return f"size {now['bytes']:,} bytes, another"
        return f"size {size_before} -> {size_now}"
    if now["sha256"] != before["sha256"]:
        return "same size, other content"
    # Of a smaller file the checksum is of all: it is the same, whenever it was written.
    if now["bytes"] > _WHOLE_BYTES and now["mtime_ns"] != before["mtime_ns"]:
        return "written again; size and samples are the same"
    return ""


def words(changed: dict[str, str]) -> str:
    """Returns changes as a line: train.csv (size 10.0 MiB -> 12.0 MiB), slurmft (other modules)"""
    descriptions = []
    for name, how in changed.items():
        descriptions.append(f"{Path(name).name} ({how})")
    return some(descriptions)
