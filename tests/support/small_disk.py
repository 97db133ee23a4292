"""A real file system that is soon full."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path


class SmallDisk:
    """A file system of a few MiB."""

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder = folder
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={mib}m", "tmpfs"]
        subprocess.run(["mount", *options, str(folder)], check=True, timeout=30)

    def __enter__(self) -> Path:
        return self.folder

    def __exit__(self, *error: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True, timeout=30)


def fill(folder: Path) -> Path:
    """Leaves no byte on a file system; returns the file whose removal makes room again. Called
    again, it takes what others have given back meanwhile."""
    ballast = folder / "ballast"
    with suppress(OSError), open(ballast, "ab", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    return ballast
