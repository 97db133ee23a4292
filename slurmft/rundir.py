"""The run directory: every path and file name of a run, and the only ways to write them.

A reader never sees half a file: whole files are written aside, synced and renamed; records are
whole lines, appended in one write each.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmft.config import RunConfig
from slurmft.errors import SlurmftError, UsageError

FINAL_STATES = ("finished", "failed", "cancelled")


class RunDir:
    """The files of one run, below `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.environment = path / "environment.json"
        self.records = path / "records.jsonl"
        self.result = path / "result.json"
        self.state = path / "state.json"
        self.job = path / "job.json"
        self.model = path / "model"
        self.tokens = path / "tokens"
        self.logs = path / "logs"
        self.failures = path / "failures"
        self.submitit = path / "submitit"

    @classmethod
    def create(cls, config: RunConfig) -> RunDir:
        """Makes the directory of a new run and writes its configuration.

        Its name is task, time and a random part: runs-dir/emotion-20261120-093012-a1b2.

        Raises:
            UsageError: the folder cannot be made or written to.
        """
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{config.train.task}-{stamp}-{secrets.token_hex(2)}"
        run = cls(Path(config.job.runs_dir) / name)
        try:
            for folder in (run.path, run.logs, run.failures, run.submitit):
                folder.mkdir(parents=True, exist_ok=folder != run.path)
            write_text(run.config, config.to_json())
            run.set_state("submitted")
        except OSError as error:
            run.discard()
            raise UsageError(
                f"cannot write the run directory {str(run.path)!r}: {error.strerror or error}",
                "give a folder that you can write, on a file system that the nodes see: --runs-dir",
            ) from None
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run.

        Raises:
            UsageError: the folder holds no run.
        """
        run = cls(Path(path).expanduser().absolute())
        if not run.config.is_file():
            raise UsageError(f"{str(path)!r} is no run directory: it has no {run.config.name}")
        return run

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

    def set_state(self, state: str, reason: str = "", exit_code: int | None = None) -> None:
        """Records what the run is doing, with the time; a final state is never overwritten."""
        past = (read_json(self.state) or {}).get("history", [])
        if past and past[-1]["state"] in FINAL_STATES:
            return
        now = {"state": state, "time": time.time(), "reason": reason, "exit_code": exit_code}
        write_json(self.state, now | {"history": [*past, now]})

    def get_state(self) -> dict[str, Any]:
        """The last recorded state: state, time (Unix seconds), reason, exit_code, history."""
        return read_json(self.state) or {"state": "unknown", "reason": "", "exit_code": None}

    def add_failure(
        self, where: str, error: SlurmftError, trace: str | None = None, echo: bool = False
    ) -> dict[str, Any]:
        """Keeps what went wrong in one process; returns it as it is kept.

        Args:
            where: the process, in words: "rank 3 on n1".
            error: message, hint and exit code.
            trace: the traceback, of an error that nobody foresaw.
            echo: it only says that another process failed.
        """
        failure = {
            "where": where,
            "message": error.message,
            "hint": error.hint,
            "code": int(error.code),
            "traceback": trace,
            "echo": echo,
            "time": time.time(),
        }
        write_json(self.failures / f"{where.replace(' ', '-')}-{os.getpid()}.json", failure)
        return failure

    def root_failure(self) -> dict[str, Any] | None:
        """The failure that the others follow from: the first that is no echo of another's.

        When one rank dies, its neighbours see their connections close; those are echoes.
        """
        found = [f for p in self.failures.glob("*.json") if (f := read_json(p))]
        found.sort(key=lambda f: (f["echo"], f["time"]))
        return found[0] if found else None


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once: readers see the old or the new text, also after a crash."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_folder(path: Path, fill: Callable[[Path], Any]) -> None:
    """Makes a folder at once: `fill` writes into one beside it, which is then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        aside.mkdir()
        fill(aside)
        for file in aside.rglob("*"):
            _sync(file)
        os.rename(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


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
    """Appends records to a .jsonl file, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run

    def write(self, *records: dict[str, Any]) -> None:
        lines = "".join(
            json.dumps({"time": time.time()} | r, ensure_ascii=False) + "\n" for r in records
        )
        self._file.write(lines.encode())


class RecordReader:
    """Reads the records that were added since the last read; half a line waits for its rest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # a line that a full disk cut short
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record
