"""What becomes of a run after an attempt."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster import wait
from slurmft.cluster.job_state import Report
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import read_json, write_json
from slurmft.core.run_files import ATTEMPT, Failure
from slurmft.runs import attempts
from slurmft.runs.log_text import LogText
from slurmft.runs.logfiles import Choice
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.support.small_disk import fill

pytestmark = pytest.mark.processes


def make(tmp_path: Path, **job: object) -> RunDir:
    config = JobConfig(runs_dir=str(tmp_path), **job)  # type: ignore[arg-type]
    return RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=config))


def begin(run: RunDir, job: str = "7", restarts: int = 0) -> int:
    attempts.check_turn(run, job, restarts)
    return attempts.begin(run, ["n1", "n2"], job, restarts)


def save(run: RunDir, step: int) -> None:
    (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)


def end(run: RunDir, code: int) -> attempts.Outcome:
    outcome = attempts.decide(run, code)
    attempts.end(run, outcome)
    return outcome


def fail(run: RunDir, bad_host: str | None = None, secondary: bool = False) -> None:
    error = SlurmftError("it broke", code=3)
    number = run.attempt_number()
    run.add(
        Failure.of(
            "node n1", error, secondary=secondary, bad_host=bad_host, attempt=number
        )
    )


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        (0, "finished", ""),
        (3, "failed", "the tasks ended with code 3"),
        (
            75,
            "failed",
            "stopped; there is no checkpoint: it will start again; its job was killed "
            "before it was queued again",
        ),
    ],
)
def test_end_that_nobody_recorded(
    tmp_path: Path, code: int, state: str, reason: str
) -> None:
    run = make(tmp_path)
    begin(run)
    assert attempts.recovered(run) is None
    write_json(run.ended, {"attempt": 2, "code": 0})
    assert attempts.recovered(run) is None  # of another attempt
    write_json(run.ended, {"attempt": 1, "code": code})
    outcome = attempts.recovered(run)
    assert outcome is not None
    assert (outcome.state, outcome.reason) == (state, reason)
    attempts.end(run, outcome)
    assert attempts.recovered(run) is None
    run.set_state("submitted", "resumed")
    assert attempts.recovered(run) is None


def test_finished(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert begin(run) == 1
    assert end(run, 0).state == "finished"
    assert [s.state for s in run.history()] == ["submitted", "running", "finished"]


def test_what_a_begin_records(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    first = run.history()[-1]
    assert (first.state, first.reason, first.attempt) == ("running", "on n1, n2", 1)
    assert first.checkpoint is None
    save(run, 5)
    save(run, 7)
    begin(run, restarts=1)
    later = run.history()[-1]
    assert (later.reason, later.attempt) == ("attempt 2 on n1, n2", 2)
    assert later.checkpoint == "step-00000007"
    found = read_json(run.attempt) or {}
    assert found["hosts"] == ["n1", "n2"]
    assert (found["number"], found["job"], found["restarts"]) == (2, "7", 1)
    assert abs(time.time() - found["time"]) < 60


FAILURE = {"own": {}, "retry": {"retry": True}, "host": {"bad_host": "n1"}}
FAILURE |= {
    "echo": {"secondary": True},
    "echo to retry": {"secondary": True, "retry": True},
}


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize(
    ("code", "failure", "state", "exit_code"),
    [
        (0, None, "finished", 0),
        (0, "own", "finished", 0),
        (Exit.STOPPED, None, "requeued", Exit.STOPPED),
        (Exit.STOPPED, "own", "requeued", Exit.STOPPED),
        (1, "own", "failed", 3),
        (137, "own", "failed", 3),
        (1, "retry", "requeued", Exit.STOPPED),
        (1, "host", "requeued", Exit.STOPPED),
        (1, "echo", "requeued", Exit.STOPPED),
        (1, "echo to retry", "requeued", Exit.STOPPED),
        (128, None, "requeued", Exit.STOPPED),
        (255, None, "requeued", Exit.STOPPED),
    ],
)
def test_outcome(
    tmp_path: Path,
    code: int,
    failure: str | None,
    state: str,
    exit_code: int,
    saved: bool,
) -> None:
    """By exit code and failure, whether or not there is a checkpoint."""
    run = make(tmp_path)
    begin(run)
    if saved:
        save(run, 5)
    if failure:
        error, facts = SlurmftError("it broke", code=3), FAILURE[failure]
        run.add(Failure.of("rank 0 on n1", error, attempt=1, **facts))  # type: ignore[arg-type]
    outcome = end(run, code)
    assert (outcome.state, outcome.code) == (state, exit_code)
    last = run.history()[-1]
    assert (last.state, last.reason, last.exit_code) == (
        state,
        outcome.reason,
        exit_code,
    )


@pytest.mark.parametrize("code", [1, 74, 76, 127, 256])
def test_end_without_a_word_is_tried_again_where_there_is_a_checkpoint(
    tmp_path: Path, code: int
) -> None:
    run = make(tmp_path)
    begin(run)
    outcome = attempts.decide(run, code)
    assert (outcome.state, outcome.code) == ("failed", code)
    save(run, 5)
    outcome = attempts.decide(run, code)
    assert (outcome.state, outcome.reason) == (
        "requeued",
        f"the tasks ended with code {code}",
    )


def test_stop_is_requeued(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    save(run, 5)
    outcome = end(run, Exit.STOPPED)
    assert (outcome.state, outcome.code) == ("requeued", Exit.STOPPED)
    assert begin(run) == 2


def test_stop_without_requeue(tmp_path: Path) -> None:
    run = make(tmp_path, requeue=False)
    begin(run)
    save(run, 5)
    outcome = end(run, Exit.STOPPED)
    assert (outcome.state, outcome.code) == ("failed", Exit.STOPPED)
    assert outcome.reason == (
        "stopped; the newest checkpoint is step-00000005; not requeued (--no-requeue)"
    )


def test_stop_before_the_first_checkpoint(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    words = "stopped; there is no checkpoint: it will start again"
    assert end(run, Exit.STOPPED).reason == words


def test_run_that_ends_without_a_checkpoint_promises_no_start(tmp_path: Path) -> None:
    run = make(tmp_path, requeue=False)
    begin(run)
    words = "stopped; there is no checkpoint; not requeued (--no-requeue)"
    assert end(run, Exit.STOPPED).reason == words
    assert "start again" not in attempts.saved(run)


def test_error_of_the_run_is_final(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    save(run, 5)
    fail(run)
    outcome = end(run, 3)
    assert (outcome.state, outcome.code) == ("failed", 3)
    assert "it broke" in outcome.reason


def test_fault_of_a_host_is_not(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    save(run, 5)
    fail(run, bad_host="n1")
    assert end(run, 3).state == "requeued"


def test_ranks_that_only_lost_others_are_requeued(tmp_path: Path) -> None:
    """Why is not known: a node may have gone without a word."""
    run = make(tmp_path)
    begin(run)
    fail(run, secondary=True)
    assert end(run, 1).state == "requeued"


def test_limit_counts_attempts_without_progress_only(tmp_path: Path) -> None:
    run = make(tmp_path, max_requeues=1)
    for step in range(1, 5):  # with progress: as often as it takes
        begin(run)
        save(run, step)
        assert end(run, Exit.STOPPED).state == "requeued"
    begin(run)
    assert end(run, 137).state == "requeued"
    begin(run)
    outcome = end(run, 137)
    assert (outcome.state, outcome.code) == ("failed", Exit.FAILED)
    assert outcome.reason.endswith("; no new checkpoint in 2 attempts (--max-requeues)")


@pytest.mark.parametrize("code", [137, Exit.STOPPED])
def test_limit_of_none_ends_the_first_attempt_without_a_checkpoint(
    tmp_path: Path, code: int
) -> None:
    run = make(tmp_path, max_requeues=0)
    begin(run)
    run.add(
        Failure.of("node n1", SlurmftError("it broke", code=9), retry=True, attempt=1)
    )
    outcome = end(run, code)
    assert (outcome.state, outcome.code) == ("failed", 9)
    assert (
        outcome.reason
        == "it broke (node n1); no new checkpoint in this attempt (--max-requeues)"
    )


def test_attempts_without_progress(tmp_path: Path) -> None:
    """Since the newest checkpoint, or since the run was last submitted."""
    run = make(tmp_path)
    assert attempts.attempts_without_progress(run) == 0
    for number in (1, 2):
        begin(run)
        run.set_state("requeued")
        assert attempts.attempts_without_progress(run) == number
    save(run, 5)
    assert attempts.attempts_without_progress(run) == 0
    begin(run)
    assert attempts.attempts_without_progress(run) == 1
    begin(run)
    assert attempts.attempts_without_progress(run) == 2
    run.set_state("submitted")
    assert attempts.attempts_without_progress(run) == 0
    begin(run)
    assert attempts.attempts_without_progress(run) == 1


def test_starts_that_were_not_recorded_count(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a full disk takes no record: by Slurm's own count of its restarts of the job."""
    run = make(small_disk, max_requeues=2)
    begin(run)
    run.set_state("requeued", avoided=True)  # a start, too
    begin(run, restarts=2)
    ballast = fill(small_disk)
    begin(run, restarts=3)
    assert int(os.environ[ATTEMPT]) > run.attempt_number() == 2
    # Two are on record without a checkpoint, and this one is not.
    assert "in 3 attempts" in attempts.decide(run, Exit.STOPPED, restarts=3).reason
    assert attempts.decide(run, Exit.STOPPED, restarts=2).state == "requeued"
    ballast.unlink()
    save(run, 5)
    assert attempts.decide(run, Exit.STOPPED, restarts=3).state == "requeued"
    assert attempts.decide(run, Exit.STOPPED, restarts=4).state == "requeued"
    assert attempts.decide(run, Exit.STOPPED, restarts=5).state == "failed"
    # that of the last one on record: Slurm's count is no matter
    monkeypatch.setenv(ATTEMPT, "2")
    assert attempts.decide(run, Exit.STOPPED, restarts=5).state == "requeued"


@pytest.mark.parametrize("code", [Exit.OK, Exit.FAILED, Exit.STOPPED])
def test_superseded_attempt_leaves_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """However it ends, with a failure that its own end caused: the run is the later attempt's."""
    run = make(tmp_path, requeue=False)
    begin(run)
    fail(run, secondary=True)
    begin(run, restarts=1)
    history = run.history()
    monkeypatch.setenv(ATTEMPT, "1")
    outcome = end(run, code)
    assert (outcome.state, outcome.code) == (attempts.SUPERSEDED, code)
    assert run.history() == history


def test_failures_are_those_of_the_own_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is not on record."""
    run = make(tmp_path)
    begin(run)
    save(run, 5)
    fail(run)
    monkeypatch.setenv(ATTEMPT, "2")
    assert attempts.decide(run, 1).reason == "the tasks ended with code 1"
    run.add(Failure.of("rank 1 on n1", SlurmftError("no such label"), attempt=2))
    assert attempts.decide(run, 1).reason == "no such label (rank 1 on n1)"
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    attempts.await_failure(run, 1)


def test_limit_holds_where_slurm_requeues_by_itself(tmp_path: Path) -> None:
    run = make(tmp_path, max_requeues=1)
    begin(run)
    begin(run)
    words = "the last attempt ended without a word; no new checkpoint in 2 attempts"
    with pytest.raises(SlurmftError, match=words) as error:
        begin(run)
    assert error.value.hint == f"look into {run.logs}; then: slurmft resume {run.path}"
    assert run.get_state().state == "failed"
    assert run.get_state().exit_code == Exit.FAILED
    assert run.get_state().reason == error.value.message
    assert run.attempt_number() == 2


def test_submitting_again_starts_the_count_anew(tmp_path: Path) -> None:
    run = make(tmp_path, max_requeues=0)
    begin(run)
    assert end(run, 137).state == "failed"
    run.set_state("submitted", "resumed")
    assert begin(run) == 2
    fail(run)
    assert end(run, 3).code == 3


def test_cancelled_stays_cancelled(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    run.set_state("cancelled", "by jane", Exit.CANCELLED)
    assert end(run, Exit.STOPPED).code == Exit.CANCELLED
    assert run.get_state().state == "cancelled"


def test_error_before_the_tasks_is_final(tmp_path: Path) -> None:
    """A missing package, say: nothing that a requeue would cure."""
    run = make(tmp_path)
    begin(run)
    outcome = attempts.decide(run, 1)
    assert (outcome.state, outcome.reason) == ("failed", "the tasks ended with code 1")
    assert attempts.decide(run, 137).state == "requeued"  # a signal is another matter
    save(run, 5)
    assert attempts.decide(run, 1).state == "requeued"


def test_failed_run_whose_job_starts_all_the_same_runs(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    run.set_state("failed", "the controller gave no answer")
    assert begin(run) == 2
    assert end(run, 0).state == "finished"
    assert run.get_state().state == "finished"


def test_host_is_bad_after_two_attempts(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    fail(run, bad_host="n1")
    fail(run, bad_host="n1")
    fail(run, bad_host="n2", secondary=True)
    assert run.bad_hosts() == []
    begin(run)
    fail(run, bad_host="n1")
    fail(run, bad_host="n2", secondary=True)
    assert run.bad_hosts() == ["n1"]


# --- whose turn it is -----------------------------------------------------------------------------


def as_bytes(run: RunDir) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(run.path.rglob("*")) if p.is_file()}


def test_only_one_job_of_a_submission_has_the_run(tmp_path: Path) -> None:
    """As long as it runs, while it waits to run again, and also after it has failed."""
    run = make(tmp_path)
    assert begin(run) == 1
    for state in (None, "requeued", "running", "failed"):
        if state:
            run.set_state(state)
        before = as_bytes(run)
        with pytest.raises(UsageError) as caught:
            begin(run, "8")
        words = (
            f"the job 8 ends at once: the job 7 has {run.path}, in attempt 1 on n1, n2"
        )
        assert caught.value.message == words
        assert caught.value.hint is None  # one line
        assert caught.value.code == Exit.USAGE
        assert as_bytes(run) == before
    run.set_state("submitted", "resumed")
    assert begin(run, "8") == 2
    with pytest.raises(UsageError, match=r"the job 8 has .* in attempt 2 on n1, n2"):
        begin(run, "7", 1)  # the old one, by `scontrol requeue`


def test_second_job_ends_also_before_the_first_has_begun(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run, "6")
    run.set_state("failed")
    run.set_state("submitted", "resumed")
    attempts.check_turn(run, "7")
    with pytest.raises(UsageError) as caught:
        begin(run, "8")
    assert caught.value.message == f"the job 8 ends at once: the job 7 has {run.path}"
    assert begin(run, "7") == 2


def test_start_that_a_dead_node_delayed_ends(tmp_path: Path) -> None:
    """Slurm has started the job again meanwhile. Another cluster may have jobs of its number."""
    run = make(tmp_path)
    assert [begin(run, "7", n) for n in (0, 0, 1, 3)] == [1, 2, 3, 4]
    before = as_bytes(run)
    with pytest.raises(UsageError) as caught:
        begin(run, "7", 2)
    words = f"the job 7 ends at once: the job 7 has {run.path}, in attempt 4 on n1, n2"
    assert caught.value.message == words
    assert as_bytes(run) == before
    run.set_state("failed")
    run.set_state("submitted", "resumed")
    assert begin(run, "7", 0) == 5


def test_attempt_says_whose_it_is(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    run.set_state("failed")
    run.set_state("submitted", "resumed")
    assert begin(run, "8", 3) == 2
    found = read_json(run.attempt) or {}
    assert time.time() - 60 < found.pop("time") <= time.time()
    assert found == {
        "number": 2, "submission": 2, "job": "8", "restarts": 3, "hosts": ["n1", "n2"],
        "changed": {},
    }  # fmt: skip


def test_run_awaits_its_job_until_an_attempt_begins(tmp_path: Path) -> None:
    run, found = make(tmp_path), list[bool]()
    found.append(run.awaits_begin())
    begin(run)
    found.append(run.awaits_begin())
    run.set_state("requeued")
    found.append(run.awaits_begin())
    run.set_state("failed")
    run.set_state("submitted", "resumed")
    found.append(run.awaits_begin())
    assert found == [True, False, False, True]
    assert run.submissions() == 2


@pytest.mark.parametrize(
    ("code", "state"),
    [(1, "failed"), (127, "failed"), (128, "requeued"), (255, "requeued")],
)
def test_only_tasks_that_were_killed_may_leave_no_word(
    tmp_path: Path, code: int, state: str
) -> None:
    run = make(tmp_path)
    begin(run)
    assert end(run, code).state == state


def test_history_says_where_each_attempt_runs(tmp_path: Path) -> None:
    run = make(tmp_path)
    attempts.begin(run, ["n1", "n2"], "7")
    assert (read_json(run.attempt) or {})["restarts"] == 0  # where nobody counts them
    save(run, 5)
    begin(run)
    told = [(s.reason, s.checkpoint) for s in run.history()]
    assert told == [
        ("", None),
        ("on n1, n2", None),
        ("attempt 2 on n1, n2", "step-00000005"),
    ]


@pytest.mark.parametrize("state", ["finished", "cancelled"])
def test_job_that_comes_too_late_ends(tmp_path: Path, state: str) -> None:
    """A second one, or the same by `scontrol requeue`: the end is final."""
    run = make(tmp_path)
    begin(run)
    run.set_state(state)
    before = as_bytes(run)
    for job in ("7", "8"):
        with pytest.raises(UsageError) as caught:
            begin(run, job)
        words = f"the job {job} ends at once: the run {run.path} is {state}"
        assert caught.value.message == words
    assert as_bytes(run) == before
    run.set_state("submitted", "resumed")
    assert begin(run, "8") == 2


def test_of_many_jobs_that_start_at_once_one_has_the_run(tmp_path: Path) -> None:
    run, barrier = make(tmp_path), threading.Barrier(8)
    won, lost = list[int](), list[str]()

    def start(number: int) -> None:
        barrier.wait()
        try:
            attempts.check_turn(run, str(number))
            won.append(number)
        except UsageError as error:
            lost.append(error.message)

    threads = [threading.Thread(target=start, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert {words.endswith(f"the job {won[0]} has {run.path}") for words in lost} == {
        True
    }


def test_full_disk_takes_no_claim_and_ends_no_job(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.claims.write_text("no folder can be made here")
    assert begin(run) == 1


# --- why an attempt failed ------------------------------------------------------------------------

HOUR_S = 3600.0


def add(run: RunDir, where: str, clock_s: float, **facts: Any) -> str:
    """A failure of the current attempt, from a host whose clock is off; returns its message."""
    message = f"{where} {len(run.all_failures())}"
    with pytest.MonkeyPatch.context() as patch:
        now = time.time()
        patch.setattr(time, "time", lambda: now + clock_s)
        run.add(
            Failure.of(
                where,
                SlurmftError(message),
                **{"attempt": run.attempt_number()} | facts,
            )
        )
    return message


def root(run: RunDir) -> str | None:
    failure = run.root_failure()
    return str(failure.message) if failure else None


def meet(run: RunDir, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT, str(run.attempt_number()))
    run.mark_started(times, 2)


@pytest.mark.parametrize("clock_s", [-HOUR_S, 0.0, HOUR_S])
def test_cause_is_found_whatever_the_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock_s: float
) -> None:
    """Of n1, where the failures are; the head's own is right."""
    run = make(tmp_path)
    begin(run)
    add(run, "rank 1 on n1", clock_s, meetings=0)
    meet(run, 1, monkeypatch)
    assert root(run) is None  # overcome: the ranks have met since
    first = add(run, "rank 1 on n1", clock_s, meetings=1)
    assert root(run) == first
    begin(run)
    assert root(run) is None  # that of another attempt
    last = add(run, "rank 1 on n1", clock_s, meetings=0)
    assert root(run) == last
    assert run.failures_of(1)[0].message == first
    run.set_state("failed")
    run.set_state("submitted", "resumed")
    assert root(run) is None  # the job of the resume has not begun
    begin(run, "8")
    assert root(run) is None
    last = add(run, "node n1", clock_s)
    assert root(run) == last


def test_secondary_failures_come_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path)
    begin(run)
    meet(run, 1, monkeypatch)
    echo = add(run, "rank 0 on n1", -HOUR_S, meetings=1, secondary=True)
    assert root(run) == echo  # the only one
    killed = add(run, "node n2", HOUR_S, retry=True)
    assert [f.message for f in run.failures_of(1)] == [killed, echo]
    assert run.failures_of(2) == []


def test_failure_after_a_meeting_that_a_full_disk_did_not_note(tmp_path: Path) -> None:
    """The ranks themselves know how often they have met."""
    run = make(tmp_path)
    begin(run)
    add(run, "rank 0 on n1", 0.0, meetings=0)
    later = add(run, "rank 1 on n2", -HOUR_S, meetings=1)
    assert root(run) == later


def test_killed_process_is_the_reason_not_its_echo(tmp_path: Path) -> None:
    """The file of the other node appears only when the batch script looks for it."""
    run = make(tmp_path)
    begin(run)
    echo = SlurmftError("RuntimeError: Connection closed by peer")
    run.add(Failure.of("rank 0 on n1", echo, secondary=True, attempt=1, meetings=0))
    killed = SlurmftError("a rank was killed by SIGKILL (out of memory?)")
    late = threading.Timer(
        0.7, lambda: run.add(Failure.of("node n2", killed, retry=True, attempt=1))
    )
    late.start()
    attempts.await_failure(run, 1)
    late.join()
    assert end(run, 1).reason == f"{killed.message} (node n2)"
    assert run.history()[-1].reason == f"{killed.message} (node n2)"


@pytest.mark.parametrize(
    ("code", "recorded", "reason"),
    [
        (137, None, "the task of a node was killed by SIGKILL (out of memory?)"),
        (137, "echo", "the task of a node was killed by SIGKILL (out of memory?)"),
        (137, "cause", "it broke (node n1)"),
        (143, "echo", "the task of a node was killed by SIGTERM"),
        (1, "echo", "it broke (node n1)"),
        (1, "cause", "it broke (node n1)"),
        (128, None, "the tasks ended with code 128"),
        (Exit.STOPPED, None, "stopped; the newest checkpoint is step-00000005"),
        (Exit.STOPPED, "echo", "stopped; the newest checkpoint is step-00000005"),
        (Exit.STOPPED, "cause", "it broke (node n1)"),
    ],
)
def test_reason(tmp_path: Path, code: int, recorded: str | None, reason: str) -> None:
    """That a rank has lost another is the reason only where nothing else is known."""
    run = make(tmp_path)
    begin(run)
    save(run, 5)
    if recorded:
        fail(run, bad_host="n1", secondary=recorded == "echo")
    outcome = end(run, code)
    assert (outcome.state, outcome.reason) == ("requeued", reason)
    assert run.history()[-1].reason == reason


def test_a_lost_peer_is_an_effect_whose_cause_nobody_knows(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    save(run, 5)
    echo = SlurmftError("RuntimeError: Connection reset by peer")
    run.add(Failure.of("rank 0 on n1", echo, secondary=True, attempt=1, meetings=0))
    reason = (
        "a peer was lost, and no node recorded why; what was seen: "
        "RuntimeError: Connection reset by peer (rank 0 on n1)"
    )
    assert end(run, 1).reason == reason
    run.set_state("failed", reason, 1)
    error = wait.job_error(run, "7", Report(name="FAILED"))
    assert error.message == reason
    assert f"slurmft logs {run.path} --tail 50; to resume" in str(error.hint)
    (head, *_) = LogText(run, Choice()).until_now()
    assert head == (
        "a peer was lost, and no node recorded why; seen by: rank 0 on n1, attempt 1\n"
    )


@pytest.mark.parametrize("code", [Exit.OK, Exit.STOPPED])
def test_nobody_waits_for_failures_of_a_good_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    attempts.await_failure(make(tmp_path), code)


def test_waiting_for_a_cause_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, slept = make(tmp_path), list[float]()
    monkeypatch.setattr(attempts, "_FILE_LAG_S", 0.01)
    begin(run)
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds))
    fail(run, secondary=True)
    attempts.await_failure(run, 1)
    assert len(list(run.failures.iterdir())) == 1
    assert set(slept) == {0.5}
    fail(run)
    slept.clear()
    attempts.await_failure(run, 1)
    assert slept == []


def test_a_thousand_hosts_are_no_flood(tmp_path: Path) -> None:
    """Neither on the screen nor in every later state of the run."""
    run = make(tmp_path)
    attempts.begin(run, [f"n{i}" for i in range(1000)], "7")
    assert run.get_state().reason.endswith("n6, n7 and 992 more")
    assert run.state.stat().st_size < 2000
