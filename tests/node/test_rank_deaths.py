"""What is recorded of ranks that signals have ended, and that start again."""

from __future__ import annotations

import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.files import write_json
from slurmft.core.program import Program
from slurmft.core.run_files import ATTEMPT
from slurmft.node import flight_recorder, heartbeat, rank_deaths, signals
from slurmft.node.hardware import host_name
from slurmft.node.peers import says_lost_peer
from slurmft.runs import hung_collective
from slurmft.runs.log_times import stamp
from slurmft.runs.rundir import RUN_DIR, RunDir, log_head
from tests.support.made_runs import calls_of_rank

_GLOO = "[enforce fail at gloo/transport/tcp/pair.cc:456] "
_MISMATCH = (
    f"{_GLOO}6772 vs 4. Received data size doesn't match expected size. Is there a distributed "
    "collective mismatch in your code?"
)
_LOST = "gloo/transport/tcp/pair.cc:553 Connection closed by peer"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    program = Program(kind="test", name="test", module="tests.none")
    run = RunDir.create(
        RunConfig(program=program, job=JobConfig(runs_dir=str(tmp_path)))
    )
    monkeypatch.setenv(ATTEMPT, "1")
    monkeypatch.setenv(RUN_DIR, str(run.path))
    return run


@pytest.mark.parametrize(
    ("number", "output", "message", "is_effect"),
    [
        (signal.SIGABRT, f"  what():  {_MISMATCH}", _MISMATCH, False),
        (signal.SIGABRT, f"  what():  {_LOST}", _LOST, True),
        (signal.SIGABRT, "", "it was killed by SIGABRT", True),
        (signal.SIGKILL, f"  what():  {_LOST}", "it was killed by SIGKILL", False),
    ],
)
def test_the_cause_of_a_start_in_place(
    run: RunDir,
    number: int,
    output: str,
    message: str,
    is_effect: bool,
) -> None:
    head = f"{stamp(1.0)} {log_head('rank 3', 'n2')}"
    old = "  what():  that of the process before"
    run.rank_log(3).write_text(f"{head}\n{old}\n{head}\n{output}\n")
    rank_deaths.record({3: -number, 2: 1})
    (failure,) = run.all_failures()
    assert failure.where.startswith("rank 3 on")
    assert message in failure.message
    assert "before" not in failure.message
    assert failure.retry
    assert failure.secondary == is_effect
    # The ranks have met again: that is overcome.
    run.mark_started((failure.meetings or 0) + 1, 4)
    assert run.root_failure(failure.attempt) is None


def test_ranks_that_a_stop_ends_are_no_failures(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(signals.STOPPING, "12")
    rank_deaths.record({3: -signal.SIGKILL})
    assert run.all_failures() == []


def test_calls_that_did_not_fit_together_before_a_start_in_place(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that gloo aborts may be the one that was right; the ranks start again, and with them
    what they have told."""
    folder = tmp_path / "watchdog"
    folder.mkdir()
    monkeypatch.setenv(heartbeat.FOLDER, str(folder))
    rank_deaths.keep_calls()  # before the first start
    for rank, size in enumerate((4, 20, 4)):
        heartbeat.note_process(folder, rank, 99999999)
        heartbeat.Heart(folder / f"beat-{rank}")
        told = calls_of_rank()
        told = replace(told, calls=[replace(told.calls[0], bytes=size)], lost_peer=True)
        # Of the process that was aborted there is nothing.
        write_json(
            Path(flight_recorder.answer_file(str(folder), rank)),
            asdict(told) if rank else None,
        )
    rank_deaths.keep_calls()
    rank_deaths.tell_mismatch()
    assert not run.records.exists()  # nobody says that calls do not fit
    run.rank_log(0).write_text(f"  what():  {_MISMATCH}\n")
    rank_deaths.record({0: -signal.SIGABRT})
    # The end of the attempt finds it once more.
    rank_deaths.tell_mismatch()
    hung_collective.record(run, 1)
    words = f"rank 1 on {host_name()} called all-reduce 7 of 20 bytes"
    assert run.records.read_text().count(words) == 1
    # It is that of one start alone.
    rank_deaths.keep_calls()
    assert [each.calls for each in run.all_rank_calls(1)] == [None] * 3


def test_collectives_that_differ_are_no_loss_of_a_peer() -> None:
    assert says_lost_peer(_LOST)
    assert not says_lost_peer(_MISMATCH)
