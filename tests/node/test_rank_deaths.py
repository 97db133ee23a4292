"""What is recorded of ranks that signals have ended, and that start again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.program import Program
from slurmft.core.run_files import ATTEMPT
from slurmft.node import rank_deaths, signals
from slurmft.node.peers import says_lost_peer
from slurmft.runs.log_times import stamp
from slurmft.runs.rundir import RUN_DIR, RunDir, log_head

_GLOO = "[enforce fail at gloo/transport/tcp/pair.cc:456] "
_MISMATCH = (
    f"{_GLOO}6772 vs 4. Is there a distributed collective mismatch in your code?"
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


def test_collectives_that_differ_are_no_loss_of_a_peer() -> None:
    assert says_lost_peer(_LOST)
    assert not says_lost_peer(_MISMATCH)
