"""The run directory: every path and file name of a run, and the only ways to write them.

A reader never sees half a file: whole files are written aside, synced and renamed; records are
whole lines, appended in one write each.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmft import permissions
from slurmft.config import RunConfig
from slurmft.credentials import redact
from slurmft.errors import SlurmftError, UsageError
from slurmft.filesystem import absolute

FINAL_STATES = ("finished", "failed", "cancelled")

ATTEMPT = "SLURMFT_ATTEMPT"
"""Variable with the number of the attempt, from 1, in every process of a job."""


class _Below:
    """A path below that of a run. Made when it is asked for: paths are slow to make, runs many."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self._name


class RunDir:
    """The files of one run, below `path`."""

    config = _Below("config.json")
    environment = _Below("environment.json")
    records = _Below("records.jsonl")
    result = _Below("result.json")
    state = _Below("state.json")
    job = _Below("job.json")
    model = _Below("model")
    tokens = _Below("tokens")
    tracking = _Below("tracking")
    logs = _Below("logs")
    failures = _Below("failures")
    checkpoints = _Below("checkpoints")
    attempt = _Below("attempt.json")
    started = _Below("started.json")
    meeting = _Below("meeting.json")
    submitit = _Below("submitit")
    script = _Below("submitit/job.sh")

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, config: RunConfig, mark: str = "") -> RunDir:
        """Makes the directory of a new run and writes its configuration.

        It is its user's alone, or its group's to read (`--share-with-group`), as is all that this
        process writes from then on. Its name is task, time and a mark, or a random part:
        runs-dir/emotion-20261120-093012-a1b2.

        Raises:
            UsageError: the folder cannot be made or written to.
        """
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{config.train.task}-{stamp}-{mark or secrets.token_hex(2)}"
        run = cls(Path(config.job.runs_dir) / name)
        try:
            run.make_folders(config)
            write_text(run.config, config.to_json())
            run.set_state("submitted")
        except OSError as error:
            run.discard()
            raise UsageError(
                f"cannot write the run directory {str(run.path)!r}: {error.strerror or error}",
                "give a folder that you can write, on a file system that the nodes see: --runs-dir",
            ) from None
        return run

    def make_folders(self, config: RunConfig) -> None:
        """Makes the folders of a new run.

        Raises:
            OSError: it is there, or cannot be made.
        """
        share = config.job.share_with_group
        permissions.make_folder(self.path, share)
        permissions.settle(share)
        for folder in (self.logs, self.failures, self.submitit):
            folder.mkdir()

    def settle_permissions(self) -> None:
        """Lets those read who may read the run what this process writes from now on."""
        permissions.settle(self.load_config().job.share_with_group)

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run.

        Raises:
            UsageError: the folder holds no run, or is closed to this user.
        """
        run = cls(absolute(path))
        if not run.exists():
            raise UsageError(f"{str(path)!r} is no run directory: it has no {run.config.name}")
        return run

    def exists(self) -> bool:
        """Whether the folder holds a run.

        Raises:
            UsageError: it is closed to this user.
        """
        try:
            return self.config.is_file()
        except PermissionError:
            raise UsageError(
                f"{str(self.path)!r} cannot be read: Permission denied", "its owner can open it"
            ) from None

    @classmethod
    def of_job(cls, runs_dir: str, mark: str, where: str = "") -> RunDir | None:
        """The newest run that was created with its job's id as its mark; None: there is none.

        Args:
            runs_dir: the folder of run directories.
            mark: the job's id.
            where: its Slurm cluster: another may have the same folder, and a job of that number.
        """
        found = [cls(path) for path in Path(runs_dir).glob(f"*-{mark}")]
        jobs = [(run, read_json(run.job) or {}) for run in found]
        wheres = {"", where}  # older runs do not say it
        runs = [
            run
            for run, job in jobs
            if job.get("id") == mark and (not where or job.get("where", "") in wheres)
        ]
        return max(runs, key=lambda run: run.job.stat().st_mtime, default=None)

    def load_config(self) -> RunConfig:
        """The configuration that the login node wrote."""
        try:
            return RunConfig.from_json(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SlurmftError(f"cannot read {str(self.config)!r}: {error}") from None

    def discard(self) -> None:
        """Removes the run: its job never came to be."""
        shutil.rmtree(self.path, ignore_errors=True)

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:03d}.log"

    def stacks(self, rank: int) -> Path:
        """Where the threads of a rank that hung were."""
        return self.logs / f"stacks-rank-{rank:03d}.txt"

    def set_state(
        self, state: str, reason: str = "", exit_code: int | None = None, **extra: Any
    ) -> None:
        """Records what the run is doing, with the time.

        A final state is only left by submitting the run again, and "failed" by a job that starts
        all the same. One process writes at a time: the login node's until the job starts and after
        it ended, the head node's in between.
        """
        past = self.history()
        last = past[-1]["state"] if past else ""
        goes_on = state == "submitted" or (last == "failed" and state == "running")
        if last in FINAL_STATES and not goes_on:
            return
        now = {"state": state, "time": time.time(), "reason": redact(reason)}
        now |= {"exit_code": exit_code}
        write_json(self.state, now | extra | {"history": [*past, now | extra]})

    def history(self) -> list[dict[str, Any]]:
        """All recorded states, oldest first."""
        found: list[dict[str, Any]] = (read_json(self.state) or {}).get("history", [])
        return found

    def get_state(self) -> dict[str, Any]:
        """The last recorded state: state, time (Unix seconds), reason, exit_code, history."""
        return read_json(self.state) or {"state": "unknown", "reason": "", "exit_code": None}

    # --- attempts: from the start of a job to its end or requeue ----------------------------------

    def attempt_number(self) -> int:
        """How often the job of this run has started; 0: not yet."""
        return int((read_json(self.attempt) or {}).get("number", 0))

    def is_superseded(self, attempt: int) -> bool:
        """Whether a later attempt has begun: this one lives on a node that Slurm gave up."""
        return self.attempt_number() > attempt > 0

    def mark_started(self) -> None:
        """Notes that the ranks have met: failures before this are overcome."""
        with contextlib.suppress(OSError):  # a full disk does not end a run
            write_json(self.started, {"time": time.time(), "attempt": current_attempt()})

    def checkpoint_names(self) -> list[str]:
        """The checkpoints, oldest first: step-00000120, step-00000120-e00000512 (within the
        evaluation after that step), step-00000120-evaluated."""
        return sorted(path.name for path in self.checkpoints.glob("step-*"))

    # --- failures ---------------------------------------------------------------------------------

    def add_failure(
        self,
        where: str,
        error: SlurmftError,
        trace: str | None = None,
        *,
        echo: bool = False,
        step: int = 0,
        retry: bool = False,
        bad_host: str | None = None,
        attempt: int | None = None,
    ) -> dict[str, Any]:
        """Keeps what went wrong in one process; returns it as it is kept.

        Args:
            where: the process, in words: "rank 3 on n1".
            error: message, hint and exit code.
            trace: the traceback, of an error that nobody foresaw.
            echo: it only says that another process failed.
            step: the optimizer step at which it happened.
            retry: the job may go on after a requeue: it was no error of the run itself.
            bad_host: the host that may be to blame, by Slurm's name.
            attempt: the attempt that failed; the current one, if not given.
        """
        failure = {
            "where": where,
            "message": redact(error.message),
            "hint": error.hint and redact(error.hint),
            "code": int(error.code),
            "traceback": trace and redact(trace),
            "echo": echo,
            "step": step,
            "retry": retry or bad_host is not None,
            "bad_host": bad_host,
            "attempt": current_attempt() if attempt is None else attempt,
            "time": time.time(),
        }
        name = f"{where.replace(' ', '-')}-{os.getpid()}-{time.time_ns()}.json"
        write_json(self.failures / name, failure)
        return failure

    def all_failures(self) -> list[dict[str, Any]]:
        """Every failure of the run, oldest first."""
        found = [f for p in self.failures.glob("*.json") if (f := read_json(p))]
        return sorted(found, key=lambda f: float(f["time"]))

    def root_failure(self) -> dict[str, Any] | None:
        """The failure that ended the last attempt: the first that is no echo of another's.

        When one rank dies, its neighbours see their connections close; those are echoes. What
        happened to ranks before they last met was overcome.
        """
        attempt, started = read_json(self.attempt), read_json(self.started)
        submitted = [h["time"] for h in self.history() if h["state"] == "submitted"]
        if attempt and submitted and attempt["time"] < submitted[-1]:
            return None  # the job of a resume, whose attempt has not begun
        number = attempt["number"] if attempt else 0
        met = started["time"] if started and started["attempt"] == number else 0.0
        found = [
            f
            for f in self.all_failures()
            if f["attempt"] == number and not (f["where"].startswith("rank") and f["time"] < met)
        ]
        found.sort(key=lambda f: (f["echo"], f["time"]))
        return found[0] if found else None

    def bad_hosts(self) -> list[str]:
        """Hosts that were to blame in two attempts or more."""
        failures = [f for f in self.all_failures() if f["bad_host"] and not f["echo"]]
        blamed = {(f["bad_host"], f["attempt"]) for f in failures}
        counts = Counter(host for host, _ in blamed)
        return sorted(host for host, count in counts.items() if count >= 2)


def current_attempt() -> int:
    """The attempt that this process belongs to; 0: none, it was started by hand."""
    return int(os.environ.get(ATTEMPT, "0"))


def log_head(what: str, host: str) -> str:
    """The first line of a process in its log, which later ones of the same rank continue."""
    return f"{what} on {host}, attempt {current_attempt()}, pid {os.getpid()}"


_LOG_HEAD = re.compile(r"(?:rank|node) \d+ on (\S+), attempt (\d+), pid \d+")


def read_log_head(line: str) -> tuple[str, int] | None:
    """Host and attempt, from a line that `log_head` made; None for another line."""
    found = _LOG_HEAD.fullmatch(line)
    return (found[1], int(found[2])) if found else None


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once: readers see the old or the new text, also after a crash."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """The same for what is no text."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=2) + "\n")


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON as all its readers take it: null for NaN and infinities."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_folder(path: Path, fill: Callable[[Path], Any], replace: bool = True) -> None:
    """Makes or replaces a folder: `fill` writes into one beside it, which is then renamed.

    Readers see it whole, or, for a moment while an older one gives way, not at all.

    Args:
        replace: else a folder that is there meanwhile, of another process, stays.
    """
    name = f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}"
    aside, old = path.with_name(name), path.with_name(f"{name}.old")
    try:
        aside.mkdir()
        fill(aside)
        mode = aside.stat().st_mode & 0o666  # some libraries write by mkstemp: for us alone
        for file in (*aside.rglob("*"), aside):
            if not file.is_dir():
                file.chmod(mode)
            _sync(file)
        if replace and path.exists():  # from an attempt that ended just after it
            os.rename(path, old)
        os.rename(aside, path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        was_slower = isinstance(error, OSError) and path.exists() and not replace
        if not was_slower:
            raise


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    import hashlib  # not for every command

    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where the file is absent or holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class RecordWriter:
    """Appends records to a .jsonl file, whole lines at a time.

    What a full disk does not take is kept, and written with the next record.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        self._pending = b""

    def write(self, *records: dict[str, Any]) -> None:
        lines = "".join(to_json({"time": time.time()} | r) + "\n" for r in records)
        self._pending += lines.encode()
        with contextlib.suppress(OSError):
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]


class RecordReader:
    """Reads the records that were added since the last read; half a line waits for its rest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self, event: str | None = None) -> Iterator[dict[str, Any]]:
        """Records that are new; of one event only, if it is given: the others are not parsed."""
        mark = f'"event": "{event}"'.encode() if event else b""  # as RecordWriter writes it
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if mark not in line:
                continue
            with contextlib.suppress(ValueError):  # a line that a full disk cut short
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record
