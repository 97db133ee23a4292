"""The records of a run: one writer, many readers. A run of a million steps costs no reader more
memory than one of a thousand, and who wants the end reads the end.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from slurmft.core.decode import decode_leniently
from slurmft.core.files import (
    exists_now,
    open_regular,
    open_to_append,
    parse_json,
    read_on,
    to_json,
)
from slurmft.core.run_files import Metrics
from slurmft.core.run_records import EVENTS, Epoch, Evaluate, Record, Resume, record_of
from slurmft.runs.rundir import RunDir

R = TypeVar("R", bound=Record)


class RecordWriter:
    """Appends records to a .jsonl file, whole lines at a time.

    What a full disk does not take is kept, and written with the next record. Half a line, of a
    process that was killed, is ended: the next record is a line of its own.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)  # open as long as the run
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - 1))
        last_byte = self._file.read(1)
        self._pending = b""
        # Of a process that was killed, or of a disk that was full.
        is_half_a_line = last_byte not in (b"", b"\n")
        if is_half_a_line:
            self._pending = b"\n"

    def write(self, *records: dict[str, Any]) -> None:
        for record in records:
            line = to_json({"time": time.time()} | record)
            self._pending += f"{line}\n".encode()
        with contextlib.suppress(OSError):
            while self._pending:  # a disk that is nearly full takes a part
                written = self._file.write(self._pending)
                self._pending = self._pending[written:]


def warn(path: Path, text: str) -> None:
    """Adds a warning to a file of records; a full disk takes none, and stops nothing."""
    with contextlib.suppress(OSError):
        RecordWriter(path).write({"event": "warning", "text": text})


class StepWindows:
    """Makes the records of many steps few: after 10,000 steps a record stands for all steps since
    the one before, up to the next that has the speed. Its loss is their mean; `steps` counts them.
    """

    def __init__(self) -> None:
        self._window: list[dict[str, Any]] = []

    def take(self, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Takes records of steps; returns the records to write now."""
        written: list[dict[str, Any]] = []
        for record in records:
            self._window.append(record)
            has_speed = "samples_per_s" in record or "left_s" in record
            is_early = record["step"] <= _EVERY_STEP_UNTIL
            if is_early or has_speed or len(self._window) >= _MOST_STEPS:
                written += self.end()
        return written

    def end(self) -> list[dict[str, Any]]:
        """Returns the record of the steps that wait for one, if some do."""
        steps = self._window
        self._window = []
        # One alone is written as it is, without a count.
        if len(steps) < 2:
            return steps
        losses = [record["loss"] for record in steps if "loss" in record]
        merged = steps[-1] | {"steps": len(steps)}
        if losses:  # a program of the user's own may record none
            # As statistics.fmean, whose module takes 2 ms of every command that lists runs.
            total = math.fsum(losses)
            merged["loss"] = total / len(losses)
        return [merged]


_EVERY_STEP_UNTIL = 10_000
_MOST_STEPS = 100
"""Of one record, where none has the speed."""


class _Line(NamedTuple):
    """A record, and the line that it was read from."""

    record: Record
    values: dict[str, Any]


class RecordReader:
    """Reads the records that were added since the last read; half a line waits for its rest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self, kind: type[R]) -> Iterator[R]:
        """Yields records of a kind that are new. Those of other kinds are not parsed: only where it
        is `Record`, all are."""
        for line in self._read(EVENTS.get(kind)):
            if isinstance(line.record, kind):
                yield line.record

    def read_values(self, event: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields records that are new, or those of one event, with all values that their program
        has recorded."""
        for line in self._read(event):
            yield line.values

    def read_sparsely(self) -> Iterator[Record]:
        """Yields the records that are new; of steps in a row the first and the last alone, which is
        as fast as to search the file."""
        mark = _mark("step")
        first = b""
        last = b""
        for lines in self._blocks():
            for line in lines.split(b"\n"):
                if mark not in line:
                    ends = (first, last, line)
                    first = b""
                    last = b""
                    for each in ends:
                        yield from _records(each)
                elif first:
                    last = line
                else:
                    first = line
        yield from _records(first)
        yield from _records(last)

    def _read(self, event: str | None) -> Iterator[_Line]:
        mark = b""  # every line has it
        if event is not None:
            mark = _mark(event)
        for lines in self._blocks():
            yield from _parsed(lines, mark)

    def _blocks(self) -> Iterator[bytes]:
        """Yields the lines that are new, many at a time."""
        rest = b""
        with contextlib.suppress(OSError):  # while a server restarts, nothing is new
            if not self._offset and not exists_now(self._path):
                return
            with open_regular(self._path) as file:
                file.seek(self._offset)
                while block := read_on(file, _BLOCK_BYTES):
                    unread = rest + block
                    whole, _, rest = unread.rpartition(b"\n")
                    if len(rest) > _LINE_BYTES:
                        rest = b""  # what follows of that line will be no record either
                    # Before they are yielded: whoever stops reading here has had them.
                    self._offset = file.tell() - len(rest)
                    yield whole

    def read_recent(self, *kinds: type[Record], samples: int = 0) -> list[Record]:
        """Returns the last records, in the last 64 KiB of the file; `read` goes on after them.

        Of a longer file, before them:

        Args:
            kinds: the newest record of each of these.
            samples: records of steps from so many places, evenly spaced.
        """
        earlier: list[_Line] = []
        with contextlib.suppress(FileNotFoundError), open_regular(self._path) as file:
            size = file.seek(0, os.SEEK_END)
            tail_start = max(0, size - _TAIL_BYTES)
            begin = _line_begin(file, tail_start)
            if samples:
                earlier += _sampled_steps(file, begin, samples)
            marks = [_mark(EVENTS[kind]) for kind in kinds]
            newest = _newest(file, begin, marks)
            earlier += reversed(newest.values())
            self._offset = begin
        records = [line.record for line in earlier]
        return records + list(self.read(Record))


def _records(line: bytes) -> Iterator[Record]:
    """Yields the record in a line, if it has one."""
    if line:
        for parsed in _parsed(line, b""):
            yield parsed.record


def _sampled_steps(file: BinaryIO, end: int, count: int) -> list[_Line]:
    """Returns records of steps from so many places before `end`, evenly spaced."""
    steps: list[_Line] = []
    spacing = end // count + 1  # above 0, also where there are more places than bytes
    for place in range(0, end, spacing):
        if _line_begin(file, place) < end:
            whole_lines = file.read(_SAMPLE_BYTES).rpartition(b"\n")[0]
            steps += _parsed(whole_lines, _mark("step"))
    return steps


_BLOCK_BYTES = 1 << 18
_TAIL_BYTES = 1 << 16
_SAMPLE_BYTES = 1 << 14
_LINE_BYTES = 1 << 22
"""Of the longest record: with the times of 60,000 ranks."""
_SEARCH_BYTES = 1 << 28
"""How far back a record is searched for."""


def _mark(event: str) -> bytes:
    return f'"event": "{event}"'.encode()  # as RecordWriter writes it


def _parsed(lines: bytes, mark: bytes) -> Iterator[_Line]:
    """Yields the records in whole lines that have a mark in them. A line that is none is left out:
    a full disk may have cut it short."""
    if mark not in lines:
        return
    for line in lines.split(b"\n"):
        if mark not in line:
            continue
        try:  # not contextlib.suppress: it takes a tenth of the time of a line
            values = parse_json(line)
            record = record_of(values)
        except ValueError:
            continue
        if record is not None:
            yield _Line(record, values)


def _line_begin(file: BinaryIO, place: int) -> int:
    """Goes to the first line that begins at a place or after it; returns where that is."""
    # One byte before: if it ends a line, the next one begins at the very place.
    file.seek(max(0, place - 1))
    if place:
        file.readline(_LINE_BYTES)
    return file.tell()


def _newest(
    file: BinaryIO, end: int, marks: Iterable[bytes], until: int = 0
) -> dict[bytes, _Line]:
    """Returns the newest record with each mark before a place, newest first: searched from there
    back, as far as to another place."""
    missing = set(marks)
    newest: dict[bytes, _Line] = {}
    rest = b""
    until = max(until, end - _SEARCH_BYTES)
    while end > until and missing:
        begin = max(until, end - _BLOCK_BYTES)
        file.seek(begin)
        block = file.read(end - begin) + rest
        end = begin
        # The first line may begin further up: it is read again with the block before.
        first_line, newline, _ = block.partition(b"\n")
        rest = first_line + newline
        if len(rest) > _LINE_BYTES:
            rest = b""
        matches = []
        for mark in missing:
            last = _last_with(mark, block)
            if last is not None:
                line_begin, line = last
                matches.append((line_begin, mark, line))
        # By the places of their lines alone: records have no order.
        for _, mark, line in sorted(matches, key=itemgetter(0), reverse=True):
            newest[mark] = line
            missing.remove(mark)
    return newest


def _last_with(mark: bytes, block: bytes) -> tuple[int, _Line] | None:
    """Returns where the last record with a mark begins in a block of lines, and the record."""
    search_end = len(block)
    # Searched for, and not split into lines: most lines are steps, which nobody asks for here.
    while (place := block.rfind(mark, 0, search_end)) >= 0:
        line_begin = block.rfind(b"\n", 0, place) + 1
        line, _, _ = block[line_begin:].partition(b"\n")
        parsed = next(_parsed(line, mark), None)
        if parsed is not None:
            return line_begin, parsed
        # A damaged line: an earlier one may be whole.
        search_end = line_begin
    return None


def add_point(curve: list[tuple[float, float]], step: float, value: float) -> None:
    """Adds a value to those over steps; steps that are done again replace."""
    while curve and curve[-1][0] >= step:
        curve.pop()
    curve.append((step, value))


@dataclass(frozen=True)
class _Progress:
    """The values of the newest record with `total_steps`; None where it has none."""

    step: int | None = None
    steps: int | None = None
    """Steps in all, of the record of a result, which has no `step`."""
    total_steps: float | None = None
    epoch: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    loss: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Latest:
    """The last news of a run; None is what is not known."""

    steps_done: int | None = None
    steps_total: float | None = None
    """Known once the ranks have met."""
    epoch: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    """Seconds of training that were left then."""
    loss: float | None = None
    metrics: Metrics | None = None
    """Of the last evaluation."""
    evaluating: tuple[int, int] | None = None
    """Samples done and in all, of an evaluation under way."""
    last_record: float | None = None
    """When the run last said anything, in Unix seconds."""


_START = _mark("start")
_RESUME = _mark("resume")
_EPOCH = _mark("epoch")
_TOTAL = b'"total_steps"'
_TIME = b'"time"'


def latest(path: Path) -> Latest:
    """Returns the last news in the records of the run in a directory."""
    newest = _newest_of_each_kind(path)
    progress = _progress(newest)
    steps_done = progress.step
    if steps_done is None:
        steps_done = progress.steps
    if _TOTAL in newest and steps_done is None:  # it has just started
        # A resume is newer than the start: `newest` has the newest record first.
        begins = [mark for mark in newest if mark in (_START, _RESUME)]
        steps_done = 0
        if begins:
            newest_begin = newest[begins[0]].record
            if isinstance(newest_begin, Resume):
                steps_done = newest_begin.step
    records = {}
    for mark, line in newest.items():
        records[mark] = line.record
    metrics = None
    evaluation = records.get(_EPOCH)
    if isinstance(evaluation, Epoch):
        metrics = evaluation.metrics
    # Under way only if nothing was recorded after its progress.
    evaluating = None
    last = records.get(_TIME)
    if isinstance(last, Evaluate):
        evaluating = (last.done, last.total)
    last_record = None
    if last is not None:
        last_record = last.time
    return Latest(
        steps_done=steps_done,
        steps_total=progress.total_steps,
        epoch=progress.epoch,
        samples_per_s=progress.samples_per_s,
        left_s=progress.left_s,
        loss=progress.loss,
        metrics=metrics,
        evaluating=evaluating,
        last_record=last_record,
    )


def _progress(newest: dict[bytes, _Line]) -> _Progress:
    # By its values, whatever its event: a program may record its progress in one of its own.
    if _TOTAL not in newest:
        return _Progress()
    return decode_leniently(newest[_TOTAL].values, _Progress)


def _newest_of_each_kind(path: Path) -> dict[bytes, _Line]:
    """Returns the newest record with each mark, the newest first: in the last 64 KiB of the file;
    that of an evaluation may lie further back."""
    newest: dict[bytes, _Line] = {}
    with contextlib.suppress(OSError), open_regular(RunDir(path).records) as file:
        end = file.seek(0, os.SEEK_END)
        marks = (_START, _RESUME, _TOTAL, _EPOCH, _TIME)
        # Not all of the file: `slurmft list` reads a thousand runs.
        tail_start = max(0, end - _TAIL_BYTES)
        newest = _newest(file, end, marks, tail_start)
        epoch = _progress(newest).epoch
        # Before the end of the first epoch there may be none: all of the file would be searched.
        is_evaluated = epoch is not None and epoch >= 1
        if is_evaluated and _EPOCH not in newest:
            newest = _newest(file, end, [_EPOCH]) | newest
    return newest
