"""Errors that users see: what happened with which value, and what to do about it."""

import contextlib
import errno
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypedDict

from slurmft.core.credentials import redact
from slurmft.core.interruption import exit_code
from slurmft.core.terminal import STDOUT, leave_output, plain


class Exit(IntEnum):
    """Exit codes of every slurmft command and of every job."""

    OK = 0
    FAILED = 1
    """The run or the job failed."""
    USAGE = 2
    """The request cannot be right: a flag, a file, a name. Nothing was submitted or trained."""
    SUBMIT = 3
    """The scheduler refused the job, or could not be asked."""
    RENDEZVOUS = 4
    """The nodes of the job cannot reach each other."""
    CANCELLED = 5
    """The job was cancelled."""
    STOPPED = 75
    """The run stopped on request, has saved its state, and can resume (BSD's EX_TEMPFAIL)."""


NAME_BYTES = 255
"""Most bytes of the name of a file, on all file systems of Linux."""
PATH_BYTES = 4095
"""Most bytes of a path that Linux takes (PATH_MAX, without the NUL)."""
TOO_LONG = "too long for a path"
TOO_LONG_CURE = (
    f"a name has at most {NAME_BYTES} bytes, a path {PATH_BYTES:,}: give a shorter one"
)
_WORD_CHARACTERS = 1000
"""A longer word in a message is cut: whole screens of it would hide the rest."""
_KEPT_START = 60
_KEPT_END = 20
"""Characters that stay of such a word; with its end the quote behind it stays."""


class SlurmftError(Exception):
    """An error that its reader can act on.

    Args:
        message: what happened, with the offending value.
        hint: what to do; None where there is nothing better to say than the message.
        code: exit code of the process that ends with this error: an `Exit`, or a job's own.
    """

    bad_hosts: Sequence[str] = ()
    """Hosts that are to blame, where others could go on without them."""
    retry = False
    """Another start may help: it was not an error of the run itself."""
    out_of_memory = False
    """The memory of a node was too small; see `Failure`."""

    def __init__(
        self, message: str, hint: str | None = None, code: int = Exit.FAILED
    ) -> None:
        super().__init__(message)
        # Names and messages of others may be in it: none of them may command the terminal.
        self.message = _readable(message)
        self.hint = None
        if hint is not None:
            self.hint = _readable(hint)
        self.code = code

    def __str__(self) -> str:
        if self.hint is None:
            return self.message
        return f"{self.message}\nhint: {self.hint}"


def _readable(text: str) -> str:
    """Returns a text without commands to a terminal, and its longest words cut."""

    def cut(match: "re.Match[str]") -> str:
        word = match[0]
        return f"{word[:_KEPT_START]}...{word[-_KEPT_END:]}"

    return re.sub(rf"\S{{{_WORD_CHARACTERS},}}", cut, plain(text))


class ErrorFacts(TypedDict):
    """Why a command failed."""

    message: str
    """What happened, with the value."""
    hint: str | None
    """What to do."""
    exit_code: int


class Failed(TypedDict):
    """What a command with --json prints, in one line, where it fails."""

    error: ErrorFacts


class UsageError(SlurmftError):
    """The request cannot be right."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint, Exit.USAGE)


class SlurmftWarning(UserWarning):
    """Warning of what looks like a mistake, and may be none."""


def run_main(
    command: Callable[[], int], debug: bool = False, as_json: bool = False
) -> int:
    """Runs a command; turns its errors into two lines on stderr and an exit code. Warnings are a
    line each.

    Args:
        command: returns the exit code.
        debug: the traceback comes first.
        as_json: an error is printed on stdout, too, as `Failed`.
    """
    # Not the file and the line: the reader cannot act on them.
    warnings.formatwarning = lambda text, *_, **__: f"warning: {redact(str(text))}\n"
    try:
        code = command()
        # Here an error has its words; at the end of Python it would be "Exception ignored".
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except SlurmftError as error:
        if debug:
            _print_traceback()
        return _report(error, as_json)
    except KeyboardInterrupt as interrupt:
        # The terminal may be what has ended this command.
        with contextlib.suppress(OSError):
            print("interrupted", file=sys.stderr)
        return exit_code(interrupt)
    # As in `slurmft ... | head`.
    except BrokenPipeError:
        leave_output()
        return 141  # as a shell counts a death by SIGPIPE
    # A full disk, a folder that vanished.
    except OSError as error:
        if debug:
            _print_traceback()
        return _report(of_system(error), as_json)


def _report(error: SlurmftError, as_json: bool) -> int:
    """Prints an error; returns the exit code."""
    print(f"error: {redact(str(error))}", file=sys.stderr)
    if as_json:
        import json  # most errors are for people

        # One line: `slurmft logs --json` prints one object a line.
        facts = ErrorFacts(
            message=redact(error.message), hint=error.hint, exit_code=int(error.code)
        )
        # stderr has the error, whatever becomes of stdout.
        try:
            print(json.dumps(Failed(error=facts)), flush=True)
        except OSError:
            leave_output()
    return error.code


def of_system(error: OSError) -> SlurmftError:
    """Returns an error of the system in words, and what to do."""
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{error.filename!r} is {TOO_LONG}", TOO_LONG_CURE)
    if error.filename == STDOUT:
        leave_output()
        return SlurmftError(
            f"{STDOUT} cannot be written: {error.strerror}", "write it to another place"
        )
    from pathlib import Path

    from slurmft.core import filesystem  # which imports this module's neighbours

    path = filesystem.place_of(error, Path())
    disk = filesystem.why_not(error, path)
    if disk is None:
        return SlurmftError(str(error), "--debug shows where")
    _, hint = disk
    reason = filesystem.reason(error, path)
    return SlurmftError(f"{str(path)!r} cannot be written: {reason}", hint)


def _print_traceback() -> None:
    import traceback  # 1 ms: only --debug pays for it

    traceback.print_exc()


def one_line(error: BaseException) -> str:
    """Returns an error as one line of a message."""
    if isinstance(error, SlurmftError):
        return " ".join(error.message.split())
    # Without the number and the path; those that Python or a library makes may lack the text.
    if isinstance(error, OSError):
        return error.strerror or str(error) or repr(error)
    if isinstance(error, UnicodeError):  # its repr has the whole of what was read
        return str(error)
    # repr has the type, without which a KeyError's text is a bare name.
    return repr(error)


def nearest(word: str, words: Sequence[str]) -> str | None:
    """Returns the one of `words` that `word` was probably meant to be; None: none is near."""
    import difflib  # 3 ms: only a typo pays for it

    matches = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return next(iter(matches), None)


def unknown(
    what: str, word: str, words: Sequence[str], page: str | None = None
) -> UsageError:
    """Returns the error for a name that is none of `words`. `page`: which page of the
    documentation lists them all; None: none does."""
    from slurmft.core.text import some  # an error alone pays for it

    near = nearest(word, words)
    hint = f"known: {some(words)}"
    if page is not None:
        hint += f"; all: slurmft help {page}"
    # Not both: in a list nobody would see it.
    if near:
        hint = f"did you mean {near}?"
    return UsageError(f"unknown {what} {word!r}", hint)
