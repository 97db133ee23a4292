"""The frozen code of a run: each of its files as the submission has recorded it, before it runs.

`code.sums` has a line for each file; its own sha256 is in the configuration of the run.
"""

import contextlib
import hashlib
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from slurmft.core.config import RunConfig
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_bytes
from slurmft.core.program import PREDICT, kind_of, trained_by
from slurmft.core.trusted import Door, sha256_of
from slurmft.runs.rundir import RunDir

CODE = Door(
    "the frozen code of a run",
    "`RUN/code/`, `RUN/code.sums`",
    "the program of `slurmft run`, or the task of `--task`; each file is compared with its sum",
    cure="submit anew",
)
_THREADS = 8
"""A file takes a millisecond on shared file systems, so several are read at a time."""
_COMPILED = "__pycache__"
_MOST_BYTES = 2**28
"""Size of the largest `code.sums` that is read: that of a million files."""


class ChangedCodeError(SlurmftError):
    """A file of the frozen code is not as it was submitted."""

    def __init__(self, path: str, how: str) -> None:
        super().__init__(
            f"the frozen code {how} since the submission: {path!r}",
            "submit anew: a run starts with the code that it was submitted with",
        )


class UnreadableCodeError(SlurmftError):
    """The file system does not give the frozen code."""

    retry = True


def line(kind: str, digest: str, name: str) -> str:
    """Returns the line of a file in `code.sums`.

    Args:
        kind: its mode, as 444; or "link".
        digest: the sha256 of its content, or of what the link leads to.
        name: its path below `code`.
    """
    return f"{kind} {digest} {name}"


def record(run: RunDir, lines: list[str]) -> str:
    """Writes `code.sums`; returns its sha256."""
    # No file name holds a NUL: other lines cannot have the same text.
    content = os.fsencode("\0".join(sorted(lines)))
    write_bytes(run.code_sums, content)
    return hashlib.sha256(content).hexdigest()


def cache_folder(folder: str) -> str:
    """Returns the path of the folder in which Python keeps the compiled modules of a folder. The
    submission makes it: by the umask of the program, which would make it, others might write
    there."""
    return os.path.join(folder, _COMPILED)


def check(run: RunDir, config: RunConfig) -> None:
    """Compares the frozen code with its sums; a run without any passes. Other code that the program
    executes is examined, too.

    Raises:
        ChangedCodeError: a file is gone, or has other content.
        NotOwnError: a file or folder is another user's, or others can write it.
        UnreadableCodeError: a file cannot be read.
    """
    _check_elsewhere(config, check)
    snapshot = config.submission.snapshot
    if snapshot is None:
        return
    try:
        # The chain of sums begins at config.json, which is opened as what nobody else can have
        # written (`CONFIG`).
        content = CODE.read(run.code_sums, _MOST_BYTES)
        if hashlib.sha256(content).hexdigest() != snapshot.sha256:
            raise ChangedCodeError(str(run.code_sums), "was changed")
        recorded: dict[str, tuple[str, str]] = {}
        for each in os.fsdecode(content).split("\0"):
            kind, digest, name = each.split(" ", 2)
            recorded[name] = (kind, digest)
        present = dict(_digests(run, recorded))
    # Before OSError, of which it is one: a server may come back, a file that is gone does not.
    except FileNotFoundError as error:
        raise ChangedCodeError(str(error.filename), "has lost a file") from None
    except OSError as error:
        raise UnreadableCodeError(
            f"cannot read the frozen code: {error.filename!r}: {error.strerror}",
            "when the file system can be read again: slurmft resume "
            f"{shlex.quote(str(run.path))}",
        ) from None
    for name, (_, digest) in recorded.items():
        if present.get(name) != digest:
            raise ChangedCodeError(str(run.code / name), "was changed")


def check_owner(run: RunDir, config: RunConfig) -> None:
    """Checks whose the frozen code is, for a process that executes it: others may have put another
    run in the place of this one since `check`, which reads every file once on each node.

    Raises:
        NotOwnError: it is another user's, or others can write it.
    """
    _check_elsewhere(config, check_owner)
    if config.submission.snapshot is not None:
        with CODE.folder(run.code):
            pass


def _check_elsewhere(
    config: RunConfig, check_code: Callable[[RunDir, RunConfig], None]
) -> None:
    """Examines what a program executes that is not in its run; raises as `check`.

    Args:
        check_code: `check` or `check_owner`.
    """
    program = config.program
    kind_of(program).check_python()
    # The task of a prediction stays in the run of its training, in whose place others may have put
    # theirs while the job waited.
    if program.kind == PREDICT and program.code:
        trained = RunDir(Path(trained_by(program.settings)))
        check_code(trained, trained.load_own_config())


def _digests(
    run: RunDir, recorded: dict[str, tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yields the files of the code that were recorded, with their sums as they are now."""
    # Here: it imports logging, which takes time that other commands need not spend.
    from concurrent.futures import ThreadPoolExecutor

    by_folder: defaultdict[str, list[str]] = defaultdict(list)
    for name in recorded:
        by_folder[os.path.dirname(name)].append(name)
    # What the program has written beside its code is its own business.
    entered = set()
    for folder in by_folder:
        entered.add(os.path.join(folder, _COMPILED))
        while folder:
            entered.add(folder)
            folder = os.path.dirname(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        for folder, descriptor in CODE.tree(run.code, entered):
            # What is left in it at the end are folders that are gone.
            names = by_folder.pop(folder, [])
            digest = partial(_digest, run, descriptor, recorded)
            # To the end, before `tree` closes the folder's descriptor in the next turn.
            yield from zip(names, pool.map(digest, names), strict=True)
    for folder in by_folder:
        raise ChangedCodeError(str(run.code / folder), "has lost a folder")


def _digest(
    run: RunDir, folder: int, recorded: dict[str, tuple[str, str]], name: str
) -> str:
    """Returns the sum of a file, or of what a link leads to, by its name in an open folder."""
    path = run.code / name
    kind, _ = recorded[name]
    if kind == "link":
        with contextlib.suppress(OSError):
            return of_link(os.readlink(path.name, dir_fd=folder))
        return ""  # it is none any more
    descriptor = CODE.open(path, folder)
    try:
        return sha256_of(descriptor)
    finally:
        os.close(descriptor)


def of_link(goal: str) -> str:
    """Returns the sum of what a link leads to."""
    return hashlib.sha256(os.fsencode(goal)).hexdigest()
