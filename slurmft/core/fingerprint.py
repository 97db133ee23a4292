"""What a run reads, told apart from what it was at its submission.

A file of up to 16 MiB is hashed whole. Of a larger one 256 blocks of 64 KiB are, evenly spaced, its
beginning and its end among them: a second's work for any size. What changes between them, and
keeps the size, shows in the time of modification alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import slurmft
from slurmft.core import process
from slurmft.core.config import RunConfig
from slurmft.core.text import in_bytes, some

_PACKAGES = """\
import json, os, sys
found = {}
for folder in reversed([path for path in sys.path if os.path.isdir(path)]):
    for name in os.listdir(folder):
        if name.endswith("-info") and name.count("-") > 1:
            found.update([name.rpartition(".")[0].split("-")[:2]])
print(json.dumps(found))"""
_WHOLE_BYTES = 2**24
_BLOCK_BYTES = 2**16


def of(path: Path) -> dict[str, Any]:
    """The fingerprint of a file, or of the files in a folder (not of folders in it): bytes;
    mtime_ns, the newest; sha256, see above."""
    import hashlib  # not for every command

    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.glob("[!.]*") if p.is_file())
    digest, size, changed = hashlib.sha256(), 0, 0
    for file in files:
        stat = file.stat()
        size, changed = size + stat.st_size, max(changed, stat.st_mtime_ns)
        digest.update(f"{file.relative_to(path)}\0{stat.st_size}\0".encode())
        for block in _blocks(file, stat.st_size):
            digest.update(block)
    return {"bytes": size, "mtime_ns": changed, "sha256": digest.hexdigest()}


def _blocks(path: Path, size: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        if size <= _WHOLE_BYTES:
            yield file.read(_WHOLE_BYTES)
            return
        count = _WHOLE_BYTES // _BLOCK_BYTES
        for number in range(count):
            file.seek((size - _BLOCK_BYTES) * number // (count - 1))
            yield file.read(_BLOCK_BYTES)


def of_code() -> str:
    """Of slurmft itself: of the contents of its modules."""
    import hashlib

    top = Path(slurmft.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(top.rglob("*.py")):
        digest.update(f"{path.relative_to(top)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def packages(python: str) -> dict[str, str]:
    """The packages that a Python finds, name -> version; none where it cannot be started. By the
    names of their folders: importlib.metadata would read a file of each."""
    printed = (process.output([python, "-c", _PACKAGES], 60) or "").rstrip()
    try:
        found: dict[str, str] = json.loads(printed.rpartition("\n")[2])  # others may print, too
    except ValueError:
        return {}
    return found


def changes(config: RunConfig) -> dict[str, str]:
    """What has changed since a run was submitted, its data, model and slurmft itself: path, or
    "slurmft" -> how, in words."""
    found = {path: _change(Path(path), before) for path, before in config.program.inputs.items()}
    before = config.submission
    if before.get("code", "") not in ("", of_code()):
        version, now = str(before.get("slurmft")), slurmft.__version__
        found["slurmft"] = f"was {version}, is {now}" if version != now else "other modules"
    return {name: how for name, how in found.items() if how}


def _change(path: Path, before: dict[str, Any]) -> str:
    try:
        now = of(path)
    except OSError as error:
        return "gone" if isinstance(error, FileNotFoundError) else ""  # closed to who asks
    if now["bytes"] != before["bytes"]:
        old, new = in_bytes(before["bytes"]), in_bytes(now["bytes"])
        return f"size {old} -> {new}" if old != new else f"size {now['bytes']:,} bytes, another"
    if now["sha256"] != before["sha256"]:
        return "same size, other content"
    if now["bytes"] > _WHOLE_BYTES and now["mtime_ns"] != before["mtime_ns"]:
        return "written again; size and samples are the same"
    return ""


def words(changed: dict[str, str]) -> str:
    """ "train.csv (size 10.0 MiB -> 12.0 MiB), slurmft (other modules)" """
    return some([f"{Path(name).name} ({how})" for name, how in changed.items()])
