"""Records of long runs: few for many steps, and read without holding them."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from slurmft.core.run_records import Epoch, Ranks, Record, Resume, Start, Step, Warned
from slurmft.runs import records
from slurmft.runs.records import RecordReader, RecordWriter, StepWindows, add_point
from tests.support.lockfs import TwoNodes
from tests.support.made_runs import write_long_records, write_run
from tests.support.nfs import remember_absent_names


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the records of 300,000 steps: an evaluation, a warning and a record of
    the ranks lie early, the start at the very beginning."""
    run = write_run(tmp_path_factory.mktemp("long") / "run", state="running")
    write_long_records(run.records, steps=300_000, evaluated_after=[30_000, 60_000])
    return run.path


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes are read at a time, at the end of a file, and at a sample."""

    def set_to(size: int) -> None:
        for name in ("_BLOCK_BYTES", "_TAIL_BYTES"):
            monkeypatch.setattr(records, name, size)

    return set_to


def peak_bytes(act: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- fewer records --------------------------------------------------------------------------------


def steps(first: int, last: int, speed_every: int = 0) -> Iterator[dict[str, Any]]:
    for n in range(first, last + 1):
        record: dict[str, Any] = {
            "event": "step",
            "step": n,
            "loss": float(n),
            "epoch": n / 100,
        }
        if speed_every and n % speed_every == 0:
            record |= {"samples_per_s": 100.0 + n, "total_steps": 99_999}
        yield record


def test_the_first_steps_have_a_record_each() -> None:
    given = list(steps(1, 10_000, speed_every=10))
    assert StepWindows().take(given) == given


def test_later_steps_share_that_with_the_speed() -> None:
    windows = StepWindows()
    first, second = windows.take(steps(10_001, 10_020, speed_every=10))
    assert first == {
        "event": "step", "step": 10_010, "steps": 10, "loss": 10_005.5, "epoch": 100.1,
        "samples_per_s": 10_110.0, "total_steps": 99_999,
    }  # fmt: skip
    assert (second["step"], second["steps"], second["loss"]) == (10_020, 10, 10_015.5)
    assert windows.end() == []


def test_steps_without_a_speed_share_records_too() -> None:
    windows = StepWindows()
    found = windows.take(steps(9_999, 10_250))
    assert [record["step"] for record in found] == [9_999, 10_000, 10_100, 10_200]
    assert [record.get("steps") for record in found] == [None, None, 100, 100]
    (rest,) = windows.end()
    assert (rest["step"], rest["steps"], rest["loss"]) == (10_250, 50, 10_225.5)
    assert windows.end() == []


def test_what_ends_a_window() -> None:
    windows = StepWindows()
    assert windows.take([{"step": 10_001, "x": 1.0}]) == []
    (found,) = windows.take([{"step": 10_002, "x": 3.0, "left_s": 5.0}])
    # no loss, no mean
    assert found == {"step": 10_002, "x": 3.0, "left_s": 5.0, "steps": 2}
    assert windows.take([{"step": 10_003, "loss": 1.0, "samples_per_s": 1.0}]) == [
        {"step": 10_003, "loss": 1.0, "samples_per_s": 1.0}
    ]


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 50, 1000, 1 << 20])
def test_blocks_of_any_size_make_the_same_records(
    tmp_path: Path, blocks: Callable[[int], None], size: int
) -> None:
    path = tmp_path / "records.jsonl"
    RecordWriter(path).write(
        *steps(1, 30), {"event": "epoch", "epoch": 1, "metrics": {}}
    )
    with open(path, "a") as file:
        file.write("[1, 2]\nno json\n")
        file.write('{"event": "step", "step": 31')
    blocks(size)
    reader = RecordReader(path)
    assert [r["event"] for r in reader.read_values()] == ["step"] * 30 + ["epoch"]
    assert list(reader.read_values()) == []
    with open(path, "a") as file:
        file.write('}\n{"event": "step", "step": 32}\n')
    assert [r["step"] for r in reader.read_values("step")] == [31, 32]
    assert [r["epoch"] for r in RecordReader(path).read_values("epoch")] == [1]
    assert list(RecordReader(tmp_path / "none").read_values()) == []


@pytest.mark.processes
@pytest.mark.usefixtures("two_nodes")  # it says what is missing
def test_while_the_file_system_fails_nothing_is_new(tmp_path: Path) -> None:
    """`follow` goes on when it is back."""
    with TwoNodes(tmp_path) as two:
        back, path = two.back / "records.jsonl", two.nodes[0] / "records.jsonl"
        RecordWriter(back).write({"event": "step", "step": 1})
        readers = [RecordReader(path), RecordReader(path)]
        assert [r["step"] for r in readers[0].read_values()] == [1]
        two.crash(0)
        assert [list(reader.read_values()) for reader in readers] == [[], []]


@pytest.mark.parametrize("size", [50, 100, 333, 1000])
def test_the_newest_of_each_event_comes_before_the_last_lines(
    tmp_path: Path, blocks: Callable[[int], None], size: int
) -> None:
    path = tmp_path / "records.jsonl"
    early: list[dict[str, Any]] = [
        {"event": "warning", "text": "1"},
        {"event": "resume", "step": 2, "checkpoint": "x"},
        {"event": "warning", "text": "3"},
    ]
    RecordWriter(path).write(*early, *steps(1, 200))
    blocks(size)
    reader = RecordReader(path)
    recent = reader.read_recent(Warned, Resume, Epoch)
    assert [r.event for r in recent if not isinstance(r, Step)] == ["resume", "warning"]
    assert [r.text for r in recent if isinstance(r, Warned)] == ["3"]
    last = [r.step for r in recent if isinstance(r, Step)]
    assert last == list(range(200 - len(last) + 1, 201))
    assert len(last) <= size // 60
    RecordWriter(path).write({"event": "warning", "text": "4"})
    # nothing twice, nothing left out
    assert [r.text for r in reader.read(Warned)] == ["4"]


def test_recent_records_of_a_short_run_are_all(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert RecordReader(path).read_recent(Start, samples=9) == []
    RecordWriter(path).write({"event": "one"}, *steps(1, 20))
    found = RecordReader(path).read_recent(Start, samples=9)
    assert [r.event for r in found] == ["one"] + ["step"] * 20


def test_samples_of_a_long_run(long: Path) -> None:
    path = long / "records.jsonl"
    reader = RecordReader(path)
    found = reader.read_recent(Start, Epoch, Warned, Ranks, samples=64)
    at = [record.step for record in found if isinstance(record, Step)]
    assert (found[-1].event, max(at)) == ("step", 300_000)
    gaps = [b - a for a, b in zip([0, *at], at, strict=False)]
    assert at == sorted(at)
    assert max(gaps) < 300_000 / 30
    others = [r.event for r in found if r.event != "step"]
    assert sorted(set(others)) == ["epoch", "ranks", "start", "warning"]
    assert next(r for r in reversed(found) if isinstance(r, Epoch)).epoch == 2


def test_no_reader_holds_a_long_run(long: Path) -> None:
    path = long / "records.jsonl"
    assert path.stat().st_size > 5 << 20
    few = 4 << 20
    assert (
        peak_bytes(
            lambda: [r for r in RecordReader(path).read_values() if r["event"] == "x"]
        )
        < few
    )
    assert peak_bytes(lambda: list(RecordReader(path).read_values("warning"))) < few
    assert peak_bytes(lambda: RecordReader(path).read_recent(Start, Resume)) < few
    assert peak_bytes(lambda: records.latest(long)) < few


def test_last_words_of_a_long_run(long: Path) -> None:
    latest = records.latest(long)
    assert (latest.steps_done, latest.steps_total) == (300_000, 300_000)
    assert latest.metrics == {"accuracy": 0.9}  # of an evaluation that lies far back
    assert latest.samples_per_s == pytest.approx(1000)


@pytest.mark.parametrize(
    "line",
    [
        '{"time": null, "event": "step", "total_steps": "x", "step": [], "epoch": {}}',
        '{"time": 1e999, "event": "step", "total_steps": 5, "step": NaN, "epoch": Infinity}',
        '{"time": "now", "event": "start", "total_steps": 5}',
        '{"time": 1, "event": "evaluate", "done": null}',
        '{"time": 1, "event": "epoch", "metrics": [1]}',
        '{"time": 1, "event": "epoch", "metrics": {"a": "b", "c": null}}',
        '[{"time": 1, "total_steps": 1}]',
    ],
)
def test_last_words_are_numbers_or_nothing(tmp_path: Path, line: str) -> None:
    run = write_run(tmp_path / "r", state="running")
    run.records.write_text(line + "\n")
    latest = asdict(records.latest(run.path))
    metrics = latest.pop("metrics") or {}
    numbers = {k: v for k, v in latest.items() if k != "evaluating"}
    assert all(
        value is None or isinstance(value, (int, float)) for value in numbers.values()
    )
    assert all(v is None for v in metrics.values())
    json.dumps([latest, metrics], allow_nan=False)


def test_lines_that_are_too_long_and_holes_are_no_records(tmp_path: Path) -> None:
    """Each byte is read once: to put a line of 200 MB together block by block takes minutes."""
    run = write_run(tmp_path / "run", state="running")
    writer = RecordWriter(run.records)
    with open(run.records, "ab") as file:
        file.write(
            b'{"event": "step", "step": 9, "loss": ' + b" " * 20_000_000 + b"1}\n"
        )
        file.write(b"[" * 100_000 + b"\n")
        file.truncate(2**40)
    writer.write({"event": "warning", "text": "after the hole"})
    writer.write({"event": "warning", "text": "the last"})
    begin = time.monotonic()
    reader = RecordReader(run.records)
    seen = list(reader.read(Step))
    # The hole makes no line of its own: what follows it in the same line is lost.
    assert (seen[-1].step, [each.text for each in reader.read(Warned)]) == (20, [])
    assert list(reader.read(Warned)) == []
    warnings = [record.text for record in RecordReader(run.records).read(Warned)]
    assert warnings == ["the last"]
    assert records.latest(run.path).last_record is not None
    recent = RecordReader(run.records).read_recent(Start, Warned, samples=8)
    assert [each.text for each in recent if isinstance(each, Warned)] == ["the last"]
    assert time.monotonic() - begin < 60


def test_steps_of_a_run_whose_state_is_older_than_its_result(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", state="failed")
    start = {"time": 1.0, "event": "start", "total_steps": 3}
    end = {"time": 2.0, "event": "result", "steps": 3, "total_steps": 3}
    run.records.write_text(
        "".join(json.dumps(record) + "\n" for record in (start, end))
    )
    assert records.latest(run.path).steps_done == 3


def test_of_steps_in_a_row_the_first_and_the_last_are_read(long: Path) -> None:
    found = list(RecordReader(long / "records.jsonl").read_sparsely())
    all_records = list(RecordReader(long / "records.jsonl").read(Record))
    others = [record for record in found if record.event != "step"]
    assert others == [record for record in all_records if record.event != "step"]
    assert len(others) == 7
    numbers = [record.step for record in found if isinstance(record, Step)]
    assert numbers == sorted(numbers)
    # Blocks end stretches, too.
    assert len(numbers) < 200
    assert {1, 30_000, 30_010, 60_000, 60_010, 300_000} <= {*numbers}
    begin = time.process_time()
    list(RecordReader(long / "records.jsonl").read_sparsely())
    assert time.process_time() - begin < 0.5


# --- curves ---------------------------------------------------------------------------------------


def test_steps_that_are_done_again_replace() -> None:
    curve: list[tuple[float, float]] = []
    for step in (1, 2, 3, 4, 5):
        add_point(curve, step, 1.0)
    for step in (3, 4):
        add_point(curve, step, 9.0)
    assert curve == [(1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0)]


def test_first_records_where_nfs_remembers_that_there_were_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_absent_names(monkeypatch, tmp_path)
    path = tmp_path / "records.jsonl"
    reader = RecordReader(path)
    assert list(reader.read_values()) == []
    with open(path, "x") as file:  # on another node
        file.write('{"event": "start", "time": 1.0, "total_steps": 5}\n')
    assert [record["event"] for record in reader.read_values()] == ["start"]
