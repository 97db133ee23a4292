"""Checkpoint folders: visible whole or not at all, verified, pruned, and when the next is due."""

import contextlib
import json
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from slurmft.core import descent, removal, trusted
from slurmft.core.errors import SlurmftError
from slurmft.core.files import fingerprint, new_folder, parse_json, read_text
from slurmft.core.run_files import current_attempt
from slurmft.core.trusted import Door, NotOwnError
from slurmft.runs.records import warn
from slurmft.runs.rundir import BAD_CHECKPOINT, CHECKPOINT, HALF_CHECKPOINT, RunDir

_T = TypeVar("_T")
MANIFEST = "manifest.json"
CHECKPOINTS = Door(
    "the checkpoints of a run that others can look into",
    "`RUN/checkpoints/`",
    "the weights, and the state, with which a run goes on",
    cure="move it out of the run",
)
_RETRY_S = 30
"""Pause after a checkpoint that could not be written."""


# Besides an absent file, whatever a damaged manifest leads to.
_DAMAGE = (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError)


class BadCheckpointError(Exception):
    """A checkpoint whose files are not as they were written."""


def checkpoint_name(step: int, suffix: str = "") -> str:
    """Returns the name of a checkpoint; `RunDir.checkpoint_names` sorts them."""
    return f"step-{step:08d}{suffix}"


def verify(path: Path) -> None:
    """Compares all files of a checkpoint with its manifest.

    Raises:
        BadCheckpointError: a file is absent, has another size or another checksum.
        OSError: the file system fails; the checkpoint may be good.
    """
    try:
        manifest = parse_json(read_text(path / MANIFEST))
        for name, expected in manifest["files"].items():
            size_bytes = descent.through(path / name).stat().st_size
            # cheaper than a checksum, and says more
            if size_bytes != expected["bytes"]:
                raise BadCheckpointError(f"{name} has lost or gained bytes")
            if fingerprint(path / name) != expected:
                problem = "has another checksum than when it was written"
                raise BadCheckpointError(f"{name} {problem}")
    except _DAMAGE as error:
        raise BadCheckpointError(f"{type(error).__name__}: {error}") from error


def newest(run: RunDir, warn: Callable[[str], None]) -> Path | None:
    """Returns the newest checkpoint that is whole and nobody else's; damaged ones are put aside,
    and others passed over, with a warning.

    Raises:
        NotOwnError: there is none but such as somebody else can have written.
        SlurmftError: the file system cannot be read. That is no reason to start from the beginning.
    """
    names = _read(run.checkpoint_names, run.checkpoints, run)
    refused: NotOwnError | None = None
    for name in reversed(names):
        path = run.checkpoints / name
        try:
            _read(partial(_check_writers, run, path), path, run)
        except NotOwnError as error:
            refused = error
            warn(f"the checkpoint {name} is passed over: {error.message}")
            continue
        try:
            _read(partial(verify, path), path, run)
            return path
        except BadCheckpointError as error:
            # Kept until the run has finished, or for `slurmft clean`. A number in the name: the
            # same step may be saved again, and be damaged again.
            aside = path.with_name(f"bad-{name}-{time.time_ns()}")
            os.rename(descent.through(path), descent.through(aside))
            warn(
                f"the checkpoint {name} is damaged ({error}); put aside as {aside.name}"
            )
    # From the beginning, the run would replace its checkpoints.
    if refused is not None:
        raise refused
    if names:
        warn("no checkpoint is whole: the run starts from its beginning")
    return None


def _check_writers(run: RunDir, path: Path) -> None:
    """Raises NotOwnError where somebody else can have written a checkpoint."""
    # What lies in a folder that is closed to others cannot be reached: there the umask under which
    # a program of the user's own writes does not matter.
    opened = descent.through(run.path)
    is_closed = not opened.stat().st_mode & 0o077
    in_run = os.path.join(os.path.realpath(opened), run.checkpoints.name, path.name)
    if is_closed and os.path.realpath(descent.through(path)) == in_run:
        return
    # Who can rename there puts another checkpoint in the place of this one.
    with CHECKPOINTS.folder(path.parent):
        pass
    for below, folder in CHECKPOINTS.tree(path):
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.is_dir()]
        for name in names:
            os.close(CHECKPOINTS.open(path / below / name, folder))


def _read(read: Callable[[], _T], path: Path, run: RunDir, tries: int = 5) -> _T:
    """Calls `read`, again after a pause where a shared file system fails for a moment."""
    for number in range(1, tries):
        with contextlib.suppress(OSError):
            return read()
        # Longer each time, ten seconds in all.
        time.sleep(number)
    try:
        return read()
    except OSError as error:
        raise SlurmftError(
            f"cannot read {str(path)!r}: {error.strerror or error}",
            f"when the file system can be read again: slurmft resume {shlex.quote(str(run.path))}",
        ) from error


def prune(run: RunDir, keep: int, best: str | None) -> None:
    """Removes all but the newest `keep` checkpoints and the best one.

    Raises:
        OSError: one of them stays; the others are gone.
    """
    inodes: dict[str, int | None] = dict.fromkeys(run.checkpoint_names())
    if trusted.is_open_to_renames(run.checkpoints):
        inodes = _written_inodes(run.checkpoints, inodes)
    older = list(inodes)[: max(0, len(inodes) - keep)]
    errors = []
    for name in older:
        if name == best:
            continue
        try:
            # At once: a reader never sees half a checkpoint.
            path = run.checkpoints / name
            removal.remove(path, CHECKPOINT, at_once=True, inode=inodes[name])
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _written_inodes(folder: Path, names: Iterable[str]) -> dict[str, int | None]:
    """Returns the inodes of those names that are checkpoints which this user has written: others
    may have given such a name to something else of this user's."""
    inodes: dict[str, int | None] = {}
    for name in names:
        path = folder / name
        with (
            contextlib.suppress(NotOwnError, OSError),
            descent.opened(path) as opened,
        ):
            os.close(CHECKPOINTS.open(path / MANIFEST, opened))
            inodes[name] = os.fstat(opened).st_ino
    return inodes


def remove_leftovers(run: RunDir, bad: bool = False) -> list[str]:
    """Removes what a kill during a save left behind, and damaged checkpoints if `bad`; returns a
    line for each that stays."""
    if trusted.is_open_to_renames(run.checkpoints):
        why = "others can rename what is there"
        return removal.sweep(run.checkpoints, HALF_CHECKPOINT, why)
    left = removal.sweep(run.checkpoints, HALF_CHECKPOINT)
    if bad:
        left += removal.sweep(run.checkpoints, BAD_CHECKPOINT)
    return left


class Checkpoints:
    """Writes the checkpoints of a run; on its main rank."""

    def __init__(self, run: RunDir, every_s: float, keep: int) -> None:
        """
        Args:
            every_s: time between two checkpoints; 0: none is due by time.
            keep: how many of the newest stay, besides the best.
        """
        self.best: str | None = None
        """Name of the best checkpoint, which is not pruned."""
        self.seconds = 0.0
        """How long the last one took to write."""
        self._run = run
        self._every_s = every_s
        self._keep = keep
        self._failed_prunings = 0
        """How often in a row older checkpoints could not be removed."""
        self._attempt = current_attempt()
        self._idle = threading.Event()
        """Set while no thread writes a checkpoint."""
        self._idle.set()
        self._due_at = 0.0
        self.schedule()

    def is_due(self) -> bool:
        """Returns whether the time of the next one has come, and none is being written."""
        return time.monotonic() >= self._due_at and self._idle.is_set()

    def schedule(self) -> None:
        """Notes that a checkpoint begins now, and when the next one is due."""
        self._due_at = math.inf
        if self._every_s:
            self._due_at = time.monotonic() + self._every_s

    def wait(self, timeout_s: float) -> None:
        """Waits for the checkpoint that is being written, in another thread."""
        self._idle.wait(timeout_s)

    @contextlib.contextmanager
    def write(self, name: str, best: bool = False) -> Iterator[Path]:
        """Yields a folder to write a checkpoint into, which becomes visible whole.

        Raises:
            OSError: there is no room, or no file system; checkpoints that are there stay.
        """
        began_at = time.monotonic()
        self._idle.clear()
        try:
            # Not earlier: a run without checkpoints has no such folder.
            descent.through(self._run.checkpoints).mkdir(exist_ok=True)
            with new_folder(self._run.checkpoints / name) as folder:
                yield folder
                _write_manifest(descent.through(folder))
                # A process that hung while the job was started again must not save any more.
                if self._run.is_superseded(self._attempt):
                    raise OSError("a later attempt of this run has begun")
            if best:
                self.best = name
            self._prune()
            # With the pruning: it delays the end of a stop as well.
            self.seconds = time.monotonic() - began_at
        except Exception:
            # Soon, not at the next step: a disk that is full stays so for a while.
            self._due_at = time.monotonic() + _RETRY_S
            raise
        finally:
            self._idle.set()

    def _prune(self) -> None:
        """Removes older checkpoints; warns where that has failed twice in a row."""
        try:
            prune(self._run, self._keep, self.best)
            self._failed_prunings = 0
        except OSError as error:
            self._failed_prunings += 1
            # The first time it may be a file that somebody reads, which goes with the next. Later
            # the disk fills up, and the user must know.
            if self._failed_prunings == 2:
                problem = f"an older checkpoint cannot be removed, and stays: {error}"
                print(f"warning: {problem}", file=sys.stderr, flush=True)
                warn(self._run.records, problem)


def _write_manifest(folder: Path) -> None:
    """Writes the sizes and checksums of all files of a checkpoint.

    A manifest that is there has the files of other ranks, which have read them already.
    """
    manifest = folder / MANIFEST
    files = {}
    if manifest.exists():
        files = parse_json(read_text(manifest))["files"]
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and path != manifest and name not in files:
            files[name] = fingerprint(path)
    manifest.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
