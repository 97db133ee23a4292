"""What a run said last: progress, speed, metrics, from the end of its records."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.core.files import to_json
from slurmft.runs.rundir import RunDir


class RecordWriter:
    """Appends records to a .jsonl file, whole lines at a time.

    What a full disk does not take is kept, and written with the next record. Half a line, of a
    process that was killed, is ended: the next record is a line of its own.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - open as long as the run
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - 1))
        self._pending = b"" if self._file.read(1) in (b"", b"\n") else b"\n"

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


@dataclass(frozen=True, slots=True)
class Latest:
    """The last words of a run's records."""

    step: int | None = None
    """Optimizer steps done; None before the ranks have met."""
    total_steps: int | None = None
    epoch: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    """Seconds of training that were left then."""
    loss: float | None = None
    metrics: dict[str, float | None] | None = None
    """Of the last evaluation."""
    evaluating: tuple[int, int] | None = None
    """Samples done and in all, of an evaluation under way."""
    time: float | None = None
    """When it last said anything (Unix seconds)."""

    @property
    def steps(self) -> tuple[int, int] | None:
        """Optimizer steps done and in all; None: not known yet."""
        known = self.step is not None and self.total_steps is not None
        return (self.step or 0, self.total_steps or 0) if known else None


def read(path: Path) -> Latest:
    """The last words of the run in a directory."""
    records = RunDir(path).records
    lines = _tail(records, _TAIL_BYTES)
    last = _last(lines, b'"time"')
    progress = _last(lines, b'"total_steps"') or {}
    metrics = _last(lines, b'"event": "epoch"')  # as RecordWriter writes it
    if (
        metrics is None and float(progress.get("epoch") or 0) >= 1
    ):  # an evaluation lies further back
        metrics = _last(_tail(records, None), b'"event": "epoch"')
    began, now = _last(lines, b'"event": "start"', b'"event": "resume"') or {}, last or {}
    under_way = now if now.get("event") == "evaluate" else {}
    step = progress.get("step", 0) if progress else None
    if progress.get("event") == "start" and began.get("event") == "resume":
        step = began.get("step", step)
    return Latest(
        step=step,
        total_steps=progress.get("total_steps"),
        epoch=progress.get("epoch"),
        samples_per_s=progress.get("samples_per_s"),
        left_s=progress.get("left_s"),
        loss=progress.get("loss"),
        metrics=(metrics or {}).get("metrics"),
        evaluating=(under_way["done"], under_way["total"]) if under_way else None,
        time=now.get("time"),
    )


_TAIL_BYTES = 65536


def _tail(records: Path, size: int | None) -> Sequence[bytes]:
    """The last lines of a file; the first may be cut."""
    try:
        with open(records, "rb") as file:
            if size is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().splitlines()
    except OSError:
        return ()


def _last(lines: Sequence[bytes], *marks: bytes) -> dict[str, Any] | None:
    """The last record that has one of the marks in it."""
    for line in reversed(lines):
        if not any(mark in line for mark in marks):
            continue
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the line that the tail begins within, or half a last one
        if isinstance(record, dict):
            return record
    return None
