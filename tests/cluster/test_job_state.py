"""One answer from the run's record, the controller and accounting."""

from __future__ import annotations

from typing import Any

import pytest

from slurmft.cluster.job_state import (
    NO_ACCOUNTING,
    NO_ANSWER,
    Report,
    by_record,
    combine,
)
from slurmft.core.run_files import UNKNOWN, State


def recorded(state: str) -> State:
    code = {"finished": 0, "failed": 9, "cancelled": 5}.get(state)
    return State(state=state, time=1.0, reason="", exit_code=code, history=[])


@pytest.mark.parametrize(
    ("record", "report", "phase", "name", "is_over"),
    [
        # The job is in the queue, or has just left it.
        ("submitted", "PENDING", "pending", "PENDING", False),
        ("running", "PENDING", "requeued", "PENDING", False),
        ("requeued", "REQUEUED", "requeued", "REQUEUED", False),
        ("running", "RUNNING", "running", "RUNNING", False),
        ("stopping", "RUNNING", "stopping", "RUNNING", False),
        ("running", "COMPLETING", "running", "COMPLETING", False),
        ("running", "CONFIGURING", "running", "CONFIGURING", False),
        ("running", "TIMEOUT", "failed", "TIMEOUT", True),
        ("running", "CANCELLED", "cancelled", "CANCELLED", True),
        ("running", "NODE_FAIL", "failed", "NODE_FAIL", True),
        # The run has recorded its end: its job may still be in its epilog, or be queued again.
        ("finished", "RUNNING", "finished", "RUNNING", False),
        ("finished", "COMPLETING", "finished", "COMPLETED", True),
        ("finished", "FAILED", "finished", "COMPLETED", True),
        ("failed", "RUNNING", "failed", "RUNNING", False),
        ("failed", "COMPLETING", "failed", "FAILED", True),
        ("failed", "TIMEOUT", "failed", "TIMEOUT", True),
        ("failed", "PENDING", "requeued", "PENDING", False),
        ("cancelled", "COMPLETING", "cancelled", "COMPLETING", False),
        ("cancelled", "CANCELLED", "cancelled", "CANCELLED", True),
        # Nobody knows the job, or nobody answers.
        ("running", None, "vanished", "LOST", True),
        ("finished", None, "finished", "COMPLETED", True),
        ("failed", None, "failed", "FAILED", True),
        ("cancelled", None, "cancelled", "CANCELLED", True),
        ("running", NO_ANSWER, "unknown", "UNKNOWN", False),
        ("finished", NO_ANSWER, "finished", "COMPLETED", True),
        ("failed", NO_ANSWER, "failed", "UNKNOWN", False),
        ("running", NO_ACCOUNTING, "unknown", "UNKNOWN", False),
        ("failed", NO_ACCOUNTING, "failed", "FAILED", True),
        ("cancelled", NO_ACCOUNTING, "cancelled", "CANCELLED", True),
    ],
)  # fmt: skip
def test_every_pair(
    record: str, report: Any, phase: str, name: str, is_over: bool
) -> None:
    answer = Report(name=report) if isinstance(report, str) else report
    state = combine(recorded(record), answer)
    assert (state.phase, state.name, state.is_over) == (phase, name, is_over)
    assert state.has_left_queue == (is_over or report == NO_ACCOUNTING)
    unsure = report in (NO_ANSWER, NO_ACCOUNTING) and phase != "finished"
    assert state.is_sure != unsure


@pytest.mark.parametrize("name", ["NODE_FAIL", "PREEMPTED"])
def test_slurm_may_requeue_what_has_ended(name: str) -> None:
    state = combine(recorded("running"), Report(name=name), may_requeue=True)
    assert (state.phase, state.is_over, state.report.may_be_requeued) == (
        "requeued",
        True,
        True,
    )
    state = combine(recorded("submitted"), Report(name=name), may_requeue=True)
    assert state.phase == "pending"
    state = combine(recorded("running"), Report(name="TIMEOUT"), may_requeue=True)
    assert state.phase == "failed"


def test_a_process_of_this_host() -> None:
    """It has no epilog: one that is completing still runs. One that has recorded no end was
    killed, where a scheduler's word would be kept."""
    state = combine(recorded("failed"), Report(name="COMPLETING"), is_process=True)
    assert (state.phase, state.is_over) == ("failed", False)
    ended = Report(name="FAILED", reason="it ended without a word", exit_code=1)
    assert combine(recorded("running"), ended).phase == "failed"
    state = combine(recorded("running"), ended, is_process=True)
    assert (state.phase, state.reason) == (
        "vanished",
        "vanished: it ended without a word",
    )


def test_finished_without_a_result() -> None:
    assert combine(recorded("finished"), None, has_result=False).phase == "failed"
    assert combine(recorded("finished"), None).succeeded
    assert not combine(recorded("failed"), None).succeeded


def test_words() -> None:
    assert str(Report(name="CANCELLED", reason="by 1000")) == "cancelled by 1000"
    state = combine(recorded("submitted"), Report(name="PENDING", reason="Priority"))
    assert state.reason == "Priority"
    assert combine(recorded("running"), Report(name="SUSPENDED")).reason == "suspended"


@pytest.mark.parametrize(
    ("record", "phase", "is_over"),
    [
        ("submitted", "pending", False),
        ("requeued", "requeued", False),
        ("stopping", "stopping", False),
        ("cancelled", "cancelled", True),
        ("finished", "finished", True),
    ],
)
def test_nobody_is_asked(record: str, phase: str, is_over: bool) -> None:
    """A run that has recorded no end is where its record says, and nobody is sure of it."""
    state = by_record(recorded(record), reason="elsewhere")
    assert (state.phase, state.is_over, state.is_sure) == (phase, is_over, is_over)
    assert (state.reason == "elsewhere") == (not is_over)


def test_a_record_that_cannot_be_read_is_named() -> None:
    """Its end may have been in it."""
    damaged = State(state=UNKNOWN, time=0.0, reason="state.json is damaged", history=[])
    vanished = combine(damaged, None)
    assert vanished.reason == "vanished: state.json is damaged"
    ended = Report(name="FAILED", reason="it ended without a word", exit_code=1)
    assert combine(damaged, ended, is_process=True).reason == vanished.reason
    elsewhere = by_record(damaged, reason="elsewhere")
    assert (elsewhere.phase, elsewhere.reason) == ("unknown", "state.json is damaged")
    assert combine(recorded(UNKNOWN), ended, is_process=True).reason != vanished.reason
