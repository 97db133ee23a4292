r"""Commands print text, and no commands to the terminal, whoever wrote it.

Names of runs, records, logs and Slurm's words may be a colleague's; data files hold anything. On a
terminal, some characters move its cursor, set its title or fill its clipboard, or turn the order of
what is read around. They are printed as JSON writes them (\u001b), so that JSON stays what it is;
colours are left out.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

# Behind it, the carriage return of lines that end as on Windows.
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m|\r(?=\n)")
STDOUT = "standard output"
"""Name of the file in errors of writing to it."""
_PROGRESS_EVERY_S = 1.0
_COMMAND = re.compile(
    # C0 without tab and newline, C1: a CSI of one character
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    # ends of lines, the direction of text
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff]"  # bytes of file names that are no UTF-8
)


def plain(text: str) -> str:
    """Returns a text without commands to a terminal; lines and tabs stay."""
    # Nearly all texts: tables of ten thousand runs have a hundred thousand.
    if text.isascii() and text.isprintable():
        return text
    # Colours go first: their escapes would be printed as \u001b otherwise.
    without_colours = _COLOUR.sub("", text)
    # JSON's escape of the character, without the quotes around it.
    return _COMMAND.sub(lambda match: json.dumps(match[0])[1:-1], without_colours)


class _Plain:
    """Stream that writes `plain` text to another one."""

    def __init__(self, raw: Any) -> None:
        self.raw_stream = raw

    def write(self, text: str) -> int:
        with _named(self.raw_stream):
            self.raw_stream.write(plain(text))
        # Callers count their own characters, and not the escapes.
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with _named(self.raw_stream):
            self.raw_stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


@contextlib.contextmanager
def _named(stream: Any) -> Iterator[None]:
    """Says that it is the output that cannot be written: the error of a write names no file."""
    try:
        yield
    except BrokenPipeError:
        # The reader has what it wanted.
        raise
    except OSError as error:
        if stream is not sys.__stdout__:
            raise
        raise OSError(error.errno, error.strerror, STDOUT) from None


def leave_output() -> None:
    """Drops what is still to be printed on standard output, which cannot be written: at its end,
    Python would complain about it, and return another exit code."""
    # A test's stream has no file, and nobody is left behind it.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def protect() -> None:
    """Lets this process print `plain` text only; what the terminal cannot encode is escaped."""
    for name in ("stdout", "stderr"):
        # None where the parent has closed the descriptor.
        stream: Any = getattr(sys, name)
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Plain(stream))


def raw(stream: Any) -> Any:
    """Returns the stream itself, for our own bars and screens: texts of others in them must be
    `plain`."""
    return getattr(stream, "raw_stream", stream)


def overwritten(text: str) -> None:
    """Prints a line on stderr that the next line replaces, if stderr is a terminal."""
    stream = raw(sys.stderr)
    if stream.isatty():
        # Escape [K clears the line; the carriage return lets the next text begin at its start.
        print(f"\x1b[K{plain(text)}\r", end="", file=stream, flush=True)


class ProgressLine:
    """A line on stderr about work that takes more than a second, where stderr is a terminal."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _PROGRESS_EVERY_S
        self._is_shown = False

    def show(self, text: str) -> None:
        """Shows how far the work has come, once a second."""
        now = time.monotonic()
        if now >= self._due:
            overwritten(text)
            self._due = now + _PROGRESS_EVERY_S
            self._is_shown = True

    def clear(self) -> None:
        """Removes the line."""
        if self._is_shown:
            overwritten("")


@contextlib.contextmanager
def unprotected() -> Iterator[None]:
    """Lets the progress bars of a library work in the block."""
    stdout = sys.stdout
    stderr = sys.stderr
    sys.stdout = raw(stdout)
    sys.stderr = raw(stderr)
    try:
        yield
    finally:
        sys.stdout = stdout
        sys.stderr = stderr
