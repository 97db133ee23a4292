"""A real terminal, as far as a program can tell: what it shows is read off its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Callable

import pyte

from tests.support import PATIENCE_S


class Terminal:
    """A command of slurmft on a terminal."""

    def __init__(
        self, *arguments: str, columns: int = 80, lines: int = 24, **env: str
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            env = os.environ | {"TERM": "xterm", "LC_ALL": "C.UTF-8"} | env
            env = {
                name: value
                for name, value in env.items()
                if name not in ("COLUMNS", "LINES")
            }
            size = struct.pack("HHHH", lines, columns, 0, 0)
            fcntl.ioctl(1, termios.TIOCSWINSZ, size)  # before it asks
            # Not execv: readline, which pytest imports, has put COLUMNS into what that hands on.
            os.execve(
                sys.executable, [sys.executable, "-m", "slurmft", *arguments], env
            )
        self.raw = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(
            self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0)
        )
        self.screen.resize(lines, columns)

    def until(self, seen: Callable[[str], bool]) -> str:
        """Reads on until the screen's text fulfils a condition."""
        deadline = time.monotonic() + PATIENCE_S
        while not seen(text := "\n".join(self.screen.display)):
            assert self._read(), text
            assert time.monotonic() < deadline, text
        return text

    def _read(self) -> bool:
        ready, _, _ = select.select([self._fd], [], [], 1)
        try:
            data = os.read(self._fd, 1 << 16) if ready else None
        except OSError:  # how Linux says that the other side is closed
            data = b""
        self.raw += data or b""
        self._stream.feed(data or b"")
        return data != b""

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def end(self) -> int:
        """The exit code."""
        while self._read():
            pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def shown(self) -> list[str]:
        """What a command that has ended printed: the lines of the screen."""
        self.code = self.end()
        return [line.rstrip() for line in self.screen.display if line.strip()]
