"""What becomes of a run after an attempt."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurmft.cluster.slurm import commands
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.files import write_json
from slurmft.runs import attempts
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig


def make(tmp_path: Path, **job: object) -> RunDir:
    config = JobConfig(runs_dir=str(tmp_path), **job)  # type: ignore[arg-type]
    return RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=config))


def begin(run: RunDir) -> int:
    return attempts.begin(run, ["n1", "n2"], "7")


def save(run: RunDir, step: int) -> None:
    (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)


def fail(run: RunDir, bad_host: str | None = None, secondary: bool = False) -> None:
    error = SlurmftError("it broke", code=3)
    number = run.attempt_number()
    run.add_failure("node n1", error, secondary=secondary, bad_host=bad_host, attempt=number)


def test_finished(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert begin(run) == 1
    assert attempts.end(run, 0).state == "finished"
    assert [s["state"] for s in run.history()] == ["submitted", "running", "finished"]


def test_stop_is_requeued(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    save(run, 5)
    outcome = attempts.end(run, Exit.STOPPED)
    assert (outcome.state, outcome.code) == ("requeued", Exit.STOPPED)
    assert begin(run) == 2


def test_stop_without_requeue(tmp_path: Path) -> None:
    run = make(tmp_path, requeue=False)
    begin(run)
    save(run, 5)
    assert attempts.end(run, Exit.STOPPED).state == "failed"


def test_error_of_the_run_is_final(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    save(run, 5)
    fail(run)
    outcome = attempts.end(run, 3)
    assert (outcome.state, outcome.code) == ("failed", 3)
    assert "it broke" in outcome.reason


def test_fault_of_a_host_is_not(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    save(run, 5)
    fail(run, bad_host="n1")
    assert attempts.end(run, 3).state == "requeued"


def test_ranks_that_only_lost_others_are_requeued(tmp_path: Path) -> None:
    """Why is not known: a node may have gone without a word."""
    run = make(tmp_path)
    begin(run)
    fail(run, secondary=True)
    assert attempts.end(run, 1).state == "requeued"


def test_limit_counts_attempts_without_progress_only(tmp_path: Path) -> None:
    run = make(tmp_path, max_requeues=1)
    for step in range(1, 5):  # with progress: as often as it takes
        begin(run)
        save(run, step)
        assert attempts.end(run, Exit.STOPPED).state == "requeued"
    begin(run)
    assert attempts.end(run, 137).state == "requeued"
    begin(run)
    outcome = attempts.end(run, 137)
    assert outcome.state == "failed"
    assert "no new checkpoint in 2 attempts (--max-requeues)" in outcome.reason


def test_limit_holds_where_slurm_requeues_by_itself(tmp_path: Path) -> None:
    run = make(tmp_path, max_requeues=1)
    begin(run)
    begin(run)
    with pytest.raises(SlurmftError, match="no new checkpoint in 2 attempts"):
        begin(run)
    assert run.get_state()["state"] == "failed"


def test_submitting_again_starts_the_count_anew(tmp_path: Path) -> None:
    run = make(tmp_path, max_requeues=0)
    begin(run)
    assert attempts.end(run, 137).state == "failed"
    run.set_state("submitted", "resumed")
    assert begin(run) == 2
    fail(run)
    assert attempts.end(run, 3).code == 3


def test_cancelled_stays_cancelled(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    run.set_state("cancelled", "by jane", Exit.CANCELLED)
    assert attempts.end(run, Exit.STOPPED).code == Exit.CANCELLED
    assert run.get_state()["state"] == "cancelled"


def test_overcome_failures_are_no_reason(tmp_path: Path) -> None:
    run = make(tmp_path)
    begin(run)
    run.add_failure("rank 0 on n1", SlurmftError("it broke"), attempt=1)
    assert run.root_failure() is not None
    write_json(run.started, {"time": time.time(), "attempt": 1})  # the ranks met again
    assert run.root_failure() is None
    begin(run)
    fail(run)
    assert run.root_failure() is not None
    run.set_state("failed")
    run.set_state("submitted", "resumed")
    assert run.root_failure() is None  # of a job that has not begun


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
    assert attempts.end(run, 0).state == "finished"
    assert run.get_state()["state"] == "finished"


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


def test_down_hosts() -> None:
    assert commands.parse_down_hosts("n1|idle\nn2|down*\nn3|mixed*\nn4|down\nn4|down\n") == [
        "n2", "n3", "n4",
    ]  # fmt: skip
