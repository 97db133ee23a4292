"""Waiting for a job: when Slurm is asked, and when not."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmft.cluster import job_state, local, wait
from slurmft.cluster.job_state import Report
from slurmft.cluster.slurm import commands
from slurmft.cluster.wait import JobWatch
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_json
from slurmft.core.run_files import RESULT_KEYS
from slurmft.runs.rundir import RunDir
from tests.support.lockfs import TwoNodes
from tests.support.made_runs import write_run
from tests.support.nfs import remember_absent_names


class Clock:
    """Time that passes only in pauses. Counts what Slurm is asked, and does things at times."""

    def __init__(self) -> None:
        self.now, self.asked_at = 0.0, list[float]()
        self.state: Report | None = Report(name="RUNNING")
        self.plans: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        for plan in [plan for plan in self.plans if plan[0] <= self.now]:
            self.plans.remove(plan)
            plan[1]()

    def job_state(self, job_id: str) -> Report | None:
        assert job_id == "7"
        self.asked_at.append(self.now)
        return self.state

    def at(self, seconds: float, act: Callable[[], object]) -> None:
        self.plans.append((seconds, act))

    def set(self, name: str | None, reason: str = "") -> None:
        self.state = Report(name=name, reason=reason) if name else None

    def asked(self, begin: float, end: float) -> int:
        return sum(begin <= when < end for when in self.asked_at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(wait, "time", made)
    monkeypatch.setattr(commands, "job_state", made.job_state)
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = write_run(tmp_path / "r", state="running")
    write_json(made.job, {"cluster": "slurm", "id": "7"})
    return made


def follow(run: RunDir, clock: Clock, until_s: float) -> JobWatch:
    """Watches a job to its end, or for so long."""
    watch = JobWatch(run)
    for _ in watch.looks():
        if clock.now >= until_s:
            break
    return watch


def step(run: RunDir) -> None:
    with open(run.records, "a") as file:
        file.write(json.dumps({"event": "step", "step": 1}) + "\n")


def test_a_run_that_records_is_not_asked_for(run: RunDir, clock: Clock) -> None:
    for second in range(0, 3600, 50):
        clock.at(second, lambda: step(run))
    follow(run, clock, 3600)
    assert len(clock.asked_at) == 1


def test_a_silent_run_is_asked_for_once_a_minute(run: RunDir, clock: Clock) -> None:
    follow(run, clock, 3600)
    assert 58 <= len(clock.asked_at) <= 60
    gaps = [b - a for a, b in itertools.pairwise(clock.asked_at)]
    assert min(gaps) >= 60
    assert max(gaps) <= 65  # and a look at the files


def test_a_run_that_falls_silent(run: RunDir, clock: Clock) -> None:
    """A dead node says nothing: the job's end is seen a minute after the last record."""
    for second in range(0, 1000, 10):
        clock.at(second, lambda: step(run))
    clock.at(995, lambda: clock.set("NODE_FAIL"))
    watch = follow(run, clock, 1e6)
    assert watch.state.name == "NODE_FAIL"
    assert clock.now < 990 + 60 + 30


@pytest.mark.parametrize(
    ("recorded", "slurm"),
    [("finished", "COMPLETED"), ("failed", "FAILED"), ("cancelled", "CANCELLED")],
)
def test_the_end_of_a_run_is_seen_at_once(
    run: RunDir, clock: Clock, recorded: str, slurm: str
) -> None:
    """The script ends some seconds after it has recorded the end."""
    write_json(run.result, dict.fromkeys(RESULT_KEYS, 0))
    clock.at(1000, lambda: run.set_state(recorded))
    clock.at(1003, lambda: clock.set(slurm))
    watch = follow(run, clock, 1e6)
    assert watch.state.name == slurm
    assert clock.now < 1003 + 5
    assert clock.asked(995, 2000) <= 4


def test_a_stop_and_a_requeue_are_seen(run: RunDir, clock: Clock) -> None:
    clock.at(1000, lambda: run.set_state("stopping"))
    clock.at(1010, lambda: run.set_state("requeued"))
    clock.at(1011, lambda: clock.set("PENDING", "BeginTime"))
    seen = []
    watch = JobWatch(run)
    for lives in watch.looks():
        assert lives
        seen.append((clock.now, watch.state.name))
        if clock.now >= 2000:
            break
    pending_at = min(when for when, name in seen if name == "PENDING")
    assert pending_at < 1016
    assert clock.asked(1000, 1010) <= 6
    assert clock.asked(1300, 2000) <= 20  # less and less
    assert clock.asked(1900, 2000) <= 2


def test_a_job_that_waits_is_asked_for_less_and_less(run: RunDir, clock: Clock) -> None:
    run.state.unlink()
    run.set_state("submitted")
    clock.set("PENDING", "Priority")
    clock.at(36_000, lambda: run.set_state("running"))
    clock.at(36_000, lambda: clock.set("RUNNING"))
    watch = follow(run, clock, 36_010)
    assert clock.asked(0, 20) == pytest.approx(10, abs=1)
    assert clock.asked(18_000, 18_600) == pytest.approx(10, abs=1)
    assert watch.state.name == "RUNNING"  # seen by the state that it recorded


def test_a_script_that_fails_in_its_setup(run: RunDir, clock: Clock) -> None:
    """Slurm says that the job runs, the run does not yet: nothing will be recorded."""
    run.state.unlink()
    run.set_state("submitted")
    clock.at(15, lambda: clock.set("FAILED"))
    follow(run, clock, 1e6)
    assert clock.now < 15 + 5


def test_a_preempted_job_is_asked_for_until_it_is_queued(
    run: RunDir, clock: Clock
) -> None:
    """Slurm calls it preempted for a moment, then queues it again."""
    clock.at(1000, lambda: run.set_state("stopping"))
    clock.at(1000, lambda: clock.set("PREEMPTED"))
    clock.at(1012, lambda: clock.set("PENDING", "BeginTime"))
    watch = follow(run, clock, 1100)
    assert clock.now >= 1100
    assert watch.state.name == "PENDING"


def test_a_job_that_nobody_knows_is_lost_after_a_minute(
    run: RunDir, clock: Clock
) -> None:
    clock.at(500, lambda: clock.set(None))
    watch = follow(run, clock, 1e6)
    assert (watch.state.name, watch.state.report.ended) == ("LOST", False)
    gone_at = next(when for when in clock.asked_at if when >= 500)
    assert 60 <= clock.now - gone_at < 75
    assert "neither queue nor accounting" in watch.state.reason


@pytest.mark.parametrize("state", [job_state.NO_ANSWER, job_state.NO_ACCOUNTING])
def test_no_answer_is_never_a_loss(run: RunDir, clock: Clock, state: Report) -> None:
    def silent() -> None:
        clock.state = state

    clock.at(500, silent)
    watch = follow(run, clock, 20_000)
    assert watch.state.report == state
    assert clock.now >= 20_000
    # a controller that is down is spared, too
    assert clock.asked(10_000, 20_000) <= 167


def test_an_end_that_only_the_run_knows(run: RunDir, clock: Clock) -> None:
    """The job left the queue long ago, and accounting does not answer: its own record counts."""
    run.set_state("failed", "rank 3 on n4: boom", 4)
    clock.state = job_state.NO_ACCOUNTING
    watch = follow(run, clock, 1e6)
    assert clock.asked_at == [0.0]
    with pytest.raises(SlurmftError, match="rank 3 on n4: boom"):
        watch.outcome()


def test_a_process_of_this_host_is_looked_at_often(run: RunDir, clock: Clock) -> None:
    write_json(run.job, {"cluster": "local", "id": "1"})
    me = {"pid": 1, "started": "never", "boot": ""}
    run.submitit.mkdir()
    write_json(run.submitit / "pid.json", me)
    watch = follow(run, clock, 100)
    assert (watch.state.name != "RUNNING", clock.asked_at) == (True, [])
    assert clock.now < 100


def test_files_are_looked_at_often_only_after_news(run: RunDir, clock: Clock) -> None:
    looks = []
    watch = JobWatch(run)
    for _ in watch.looks():
        if clock.now >= 600:
            break
        looks.append(clock.now)
    assert sum(when < 6 for when in looks) == pytest.approx(20, abs=1)
    assert sum(when >= 300 for when in looks) == pytest.approx(150, abs=1)


def test_a_result_that_nfs_remembers_as_absent(
    clock: Clock, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`slurmft list` had looked for it shortly before."""
    run.result.unlink(missing_ok=True)
    clock.set("COMPLETED")
    remember_absent_names(monkeypatch, run.path)
    assert not run.result.exists()
    result = dict.fromkeys(RESULT_KEYS, 0)
    clock.at(2, lambda: write_json(run.result, result))
    assert JobWatch(run).wait() == result


def test_a_result_that_never_comes_is_waited_for_once(
    clock: Clock, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.result.unlink(missing_ok=True)
    write_json(
        run.state, {"state": "finished", "reason": "", "time": 1.0, "history": []}
    )
    clock.set("COMPLETED")
    watch = JobWatch(run)
    for _ in watch.looks():
        pass
    ended_at = clock.now
    assert ended_at >= wait._FILE_LAG_S
    no_result = SlurmftError("no result")
    monkeypatch.setattr(wait, "job_error", lambda *_: no_result)
    with pytest.raises(SlurmftError, match="no result"):
        watch.outcome()
    assert clock.now == ended_at


@pytest.mark.processes
@pytest.mark.usefixtures("two_nodes")  # it says what is missing
def test_a_job_goes_on_while_its_file_system_fails(tmp_path: Path) -> None:
    """A job on this machine, of which only files tell: as where a GlusterFS server restarts."""
    with TwoNodes(tmp_path) as two:
        run = write_run(two.nodes[0] / "run", state="running")
        write_json(run.job, {"cluster": "local", "id": str(os.getpid())})
        run.submitit.mkdir()
        local.note_controller(run, os.getpid())
        watch = JobWatch(run)
        two.crash(0)
        assert not watch.has_ended()
        assert watch.state.name == "UNKNOWN"
        assert run.all_failures() == []
