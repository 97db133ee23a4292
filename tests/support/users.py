"""Two real Unix users besides root, in a mount namespace that gives them names and opens Python.

The machine's own /etc/passwd stays as it is.
"""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import slurmft
from tests.conftest import Done

REPOSITORY = Path(slurmft.__file__).parent.parent
PROJECT = 21100
"""The number of a group."""


@dataclass(frozen=True)
class User:
    """A user, whose home is a folder of the place where both work."""

    name: str
    uid: int
    place: Path
    groups: tuple[int, ...] = ()

    @property
    def home(self) -> Path:
        return self.place / self.name

    def run(self, *command: str, timeout_s: float = 300, **env: str) -> Done:
        """Runs a command as this user, in their home."""
        groups = ["--groups", ",".join(map(str, self.groups))] if self.groups else []
        user = [
            "setpriv",
            f"--reuid={self.uid}",
            f"--regid={self.uid}",
            "--inh-caps=-all",
        ]
        user += groups or ["--clear-groups"]
        inside = f"{_MOUNTS.format(etc=self.place / 'etc')}\n{_opened()}\n"
        inside += (
            f"cd {shlex.quote(str(self.home))} && exec {shlex.join([*user, *command])}"
        )
        own = {
            "HOME": str(self.home),
            "USER": self.name,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        own |= {
            "PYTHONPATH": str(REPOSITORY),
            "PATH": os.environ["PATH"],
            "LC_ALL": "C.UTF-8",
        }
        shell = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "bash",
            "-euc",
            inside,
        ]
        done = subprocess.run(
            shell,
            env=own | env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def slurmft(self, *arguments: str, timeout_s: float = 300, **env: str) -> Done:
        """Runs a slurmft command as this user."""
        command = [sys.executable, "-m", "slurmft", *arguments]
        return self.run(*command, timeout_s=timeout_s, **env)

    def python(self, code: str, **env: str) -> str:
        """Runs Python code that must succeed; returns what it prints."""
        done = self.run(sys.executable, "-c", code, timeout_s=300, **env)
        assert done.code == 0, done.err
        return done.out

    def write(self, path: Path, text: str, mode: int = 0o644) -> Path:
        """A file of this user's; folders above it, too, where they are not there."""
        for folder in reversed(path.parents):
            if not folder.exists():
                folder.mkdir()
                folder.chmod(0o755)
                os.chown(folder, self.uid, self.uid)
        path.write_text(text)
        os.chown(path, self.uid, self.uid)
        path.chmod(mode)
        return path

    def own(self, folder: Path) -> Path:
        """Gives a folder, with all that is in it, to this user."""
        paths = [folder]
        for parent, folders, files in os.walk(folder):
            paths += [Path(parent, name) for name in (*folders, *files)]
        for path in paths:
            # A job of another test may end meanwhile.
            with suppress(FileNotFoundError):
                os.chown(path, self.uid, self.uid, follow_symlinks=False)
        return folder


_MOUNTS = """\
mount --bind {etc}/passwd /etc/passwd
mount --bind {etc}/group /etc/group"""


def _opened() -> str:
    """Shell lines that let everybody reach Python and slurmft, where they are in somebody's home:
    only they are to be seen there."""
    lines = []
    for needed in dict.fromkeys((Path(sys.base_prefix), Path(sys.prefix), REPOSITORY)):
        closed = [
            p for p in needed.resolve().parents if not p.stat().st_mode & stat.S_IXOTH
        ]
        if closed:
            top, path = shlex.quote(str(closed[-1])), shlex.quote(str(needed.resolve()))
            lines += [
                f"mount --bind {path} /mnt",
                f"mount -t tmpfs -o mode=755 none {top}",
            ]
            lines += [f"mkdir -p {path}", f"mount --move /mnt {path}"]
    return "\n".join(lines)


@contextmanager
def two_users(same_group: bool = False) -> Iterator[tuple[User, User]]:
    """Ada, who works, and Eve, who attacks her or shares a project's folder with her."""
    # A job that a test has cancelled may still write while it ends.
    prefix = "slurmft-users-"
    with TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        place.chmod(0o755)
        groups = (PROJECT,) if same_group else ()
        users = User("ada", 21001, place, groups), User("eve", 21002, place, groups)
        (place / "etc").mkdir()
        for name, more in (("passwd", "{0.name}:x:{0.uid}:{0.uid}::{0.home}:/bin/bash\n"),
                           ("group", "{0.name}:x:{0.uid}:\n")):  # fmt: skip
            text = Path("/etc", name).read_text() + "".join(map(more.format, users))
            (place / "etc" / name).write_text(text)
        for user in users:
            user.home.mkdir(mode=0o755)
            user.own(user.home)
        yield users
