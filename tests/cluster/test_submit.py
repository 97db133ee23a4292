"""Resuming a run: what is checked, what is written, and what stays if the job is refused."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster import ending, job_state, launcher, submit, wait
from slurmft.cluster.job_state import JobState, Phase, Report, combine
from slurmft.cluster.slurm import commands
from slurmft.core import trusted
from slurmft.core.config import RunConfig
from slurmft.core.errors import Exit, SlurmftError, SlurmftWarning, UsageError
from slurmft.core.files import read_json, write_json
from slurmft.core.run_files import Attempt, Failure, Job, Submission
from slurmft.runs.rundir import RunDir
from tests.support import CHECKOUT
from tests.support.made_runs import write_run

ORIGIN = Submission(command="slurmft resume last")


class Queue:
    """A launcher that takes jobs and starts none."""

    def __init__(self) -> None:
        self.state: Report | None = Report(name="CANCELLED")
        """Of every job."""
        self.on_submit: Callable[[RunDir], None] = lambda run: None
        self.submitted: list[RunConfig] = []
        self.cancelled: list[str] = []
        self.here = os.uname().nodename

    STARTS_RANKS = False
    LOCATION_KIND = "host"

    def location(self) -> str:
        return self.here

    def submit(self, config: RunConfig, run: RunDir) -> str:
        self.on_submit(run)
        self.submitted.append(config)
        return str(10 + len(self.submitted))

    def job_state(self, job_id: str, run: RunDir) -> Report | None:
        return self.state

    def cancel(self, job_id: str, run: RunDir) -> None:
        self.cancelled.append(job_id)
        run.set_state("cancelled", "by slurmft cancel", Exit.CANCELLED)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    made, umask = Queue(), os.umask(0o022)
    monkeypatch.setattr(launcher, "get", lambda cluster: made)
    yield made
    os.umask(umask)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose job 7 was cancelled."""
    made = write_run(tmp_path / "r", state="running", cluster="local")
    launcher.note_job(made, "local", "7", os.uname().nodename)
    made.set_state("cancelled", "by slurmft cancel", Exit.CANCELLED)
    return made


def files(run: RunDir) -> dict[str, bytes]:
    """All that a run's files hold, but for the lock."""
    found = {
        str(p.relative_to(run.path)): p for p in run.path.rglob("*") if p.is_file()
    }
    return {name: p.read_bytes() for name, p in found.items() if name != "resume.lock"}


def resume(run: RunDir, **flags: Any) -> str:
    return submit.resume(run, flags, ORIGIN)


def test_resume_submits_the_run_again(queue: Queue, run: RunDir) -> None:
    seen: list[str] = []
    queue.on_submit = lambda run: seen.append(run.get_state().state)
    assert resume(run, nodes=3) == "11"
    assert seen == ["submitted"]  # before the job can say that it runs
    assert (run.get_state().state, run.get_state().reason) == ("submitted", "resumed")
    assert [s.state for s in run.history()][-2:] == ["cancelled", "submitted"]
    config = run.load_config()
    assert queue.submitted == [config]
    assert (config.job.nodes, config.submission.resumed) == (3, [ORIGIN])
    assert config.submission.user == "ada"  # who submitted it first
    here = os.uname().nodename
    assert read_json(run.job) == {"cluster": "local", "id": "11", "where": here}
    resume(run)
    assert run.load_config().submission.resumed == [ORIGIN, ORIGIN]
    assert run.load_config().job.nodes == 3


@pytest.mark.parametrize(
    "error",
    [
        SlurmftError("sbatch refused the job"),
        OSError(errno.ENOSPC, "full"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_refused_resume_leaves_the_run_as_it_was(
    queue: Queue, run: RunDir, error: BaseException
) -> None:
    def refuse(run: RunDir) -> None:
        raise error

    before, queue.on_submit = files(run), refuse
    with pytest.raises(type(error)) as caught:
        resume(run, nodes=3)
    assert caught.value is error
    assert files(run) == before
    queue.on_submit = lambda run: None
    assert resume(run) == "11"  # and it can be tried again


def test_run_that_has_lost_its_state_is_resumed(queue: Queue, run: RunDir) -> None:
    run.state.unlink()
    assert resume(run) == "11"
    assert [s.state for s in run.history()] == ["submitted"]


def test_more_memory_counts_for_the_starts_that_follow(run: RunDir) -> None:
    """Also where another requeue comes in between; a start that had it, and a refusal, end that."""
    run.set_state("submitted")
    run.set_state("running", attempt=1)
    assert run.get_state().raised_mem_mib_since(1) is None
    run.set_state("requeued", raised_mem_mib=3072)
    run.set_state("requeued", avoided=True)
    assert run.get_state().raised_mem_mib_since(1) == 3072
    run.set_state("running", attempt=2)
    run.set_state("requeued")
    assert run.get_state().raised_mem_mib_since(2) is None
    run.set_state("requeued", raised_mem_mib=4608)
    run.set_state("requeued", raised_mem_mib=0)
    assert run.get_state().raised_mem_mib_since(2) is None


def test_memory_that_a_requeue_has_asked_for_stays(queue: Queue, run: RunDir) -> None:
    """Until the user asks for another size."""
    resume(run, mem="2G")
    assert run.load_config().job.mem == "2G"
    run.set_state("requeued", raised_mem_mib=3072)
    run.set_state("failed")
    resume(run)
    assert run.load_config().job.mem == "3072M"
    run.set_state("requeued", raised_mem_mib=4608)
    run.set_state("failed")
    resume(run, mem="9G")
    assert run.load_config().job.mem == "9G"


def test_shorter_time_does_not_shorten_the_lead(queue: Queue, run: RunDir) -> None:
    assert resume(run, time="60", stop_lead_s=600) == "11"
    before = files(run)
    with pytest.raises(
        UsageError, match="--stop-lead-s 600 leaves nothing of --time 10 to run"
    ):
        resume(run, time="10")
    assert (len(queue.submitted), files(run)) == (1, before)
    resume(run, time="15")
    assert run.load_config().job.lead_s == 600


@pytest.fixture
def on_slurm(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "choose", lambda cluster: "slurm")
    queue.here = ""


@pytest.mark.usefixtures("on_slurm")
def test_job_that_would_never_start(
    queue: Queue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job_id: str) -> None:
        raise SlurmftError("Slurm would never start the job: it requests 9 nodes")

    monkeypatch.setattr(commands, "check_starts", refuse)
    before = files(run)
    with pytest.raises(
        SlurmftError, match="Slurm would never start the job: it requests 9 nodes"
    ):
        resume(run, nodes=9)
    assert files(run) == before


@pytest.mark.usefixtures("on_slurm")
def test_interruption_after_the_submission_keeps_the_job(
    queue: Queue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(job_id: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "check_starts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resume(run, nodes=3)
    assert launcher.job_of(run).id == "11"
    assert (run.get_state().state, run.load_config().job.nodes) == ("submitted", 3)


def test_disk_that_takes_no_job_id_loses_no_job(
    queue: Queue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job records its id when it starts."""

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launcher, "note_job", full)
    assert resume(run) == "11"
    assert run.get_state().state == "submitted"


@pytest.mark.parametrize("name", ["PENDING", "RUNNING", "COMPLETING"])
def test_job_that_has_not_ended_is_not_submitted_again(
    queue: Queue, run: RunDir, name: str
) -> None:
    before, queue.state = files(run), Report(name=name)
    with pytest.raises(
        UsageError, match=f"the job 7 of this run is {name.lower()}"
    ) as caught:
        resume(run)
    cure = f"slurmft cancel {run.path}"
    if name == "COMPLETING":  # it has been cancelled, or ends
        cure = "its processes are ending: try again in some seconds"
    assert caught.value.hint == cure
    assert (queue.submitted, files(run)) == ([], before)


def test_without_an_answer_no_second_job_is_submitted(
    queue: Queue, run: RunDir
) -> None:
    before, queue.state = files(run), job_state.NO_ANSWER
    words = "whether the job 7 has ended is unknown: Slurm does not answer"
    with pytest.raises(UsageError, match=words):
        resume(run)
    assert (queue.submitted, files(run)) == ([], before)


@pytest.mark.parametrize(
    "state",
    [None, Report(name="FAILED"), Report(name="TIMEOUT"), job_state.NO_ACCOUNTING],
)
def test_job_that_has_ended_or_is_forgotten_is(
    queue: Queue, run: RunDir, state: Report | None
) -> None:
    queue.state = state
    assert resume(run) == "11"


def test_finished_run_is_not_resumed(queue: Queue, tmp_path: Path) -> None:
    run = write_run(tmp_path / "done", cluster="local")
    launcher.note_job(run, "local", "7", "")
    with pytest.raises(UsageError, match="has finished") as error:
        resume(run)
    # A prediction has no model, nor has a program of the user's own.
    assert error.value.hint == f"what it has left: slurmft status {run.path}"
    run.model.mkdir()
    with pytest.raises(UsageError, match="has finished") as error:
        resume(run)
    assert error.value.hint == f"its model: {run.model}"
    assert queue.submitted == []


def test_run_of_another_host_is_resumed_here_only_if_asked(
    queue: Queue, run: RunDir
) -> None:
    launcher.note_job(run, "local", "7", "login7")
    queue.state = Report(name="RUNNING")  # somebody else's job of that number
    with pytest.raises(UsageError, match="is on the host login7; seen from"):
        resume(run)
    assert resume(run, cluster="local") == "11"


def test_run_of_somebody_else_is_not_touched(
    queue: Queue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="you cannot write to the run"):
        resume(run)
    assert not (run.path / "resume.lock").exists()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_a_resume_writes_is_for_those_who_may_read_the_run(
    queue: Queue, run: RunDir
) -> None:
    """Whatever the umask of the shell."""
    resume(run)
    assert (mode(run.path / "resume.lock"), mode(run.config)) == (0o600, 0o600)
    resume(run, share_with_group=True)
    assert mode(run.config) == 0o640


# --- the first submission -------------------------------------------------------------------------


def test_submission(queue: Queue, run: RunDir) -> None:
    made = submit.submit(run.load_config(), "local", "mark")
    assert made.path.parent == run.path.parent
    assert "-mark-" in made.path.name
    assert queue.submitted == [made.load_config()]
    assert launcher.job_of(made) == Job(
        cluster="local", id="11", where=os.uname().nodename
    )


def test_refused_submission_leaves_nothing(queue: Queue, run: RunDir) -> None:
    def refuse(run: RunDir) -> None:
        raise SlurmftError("sbatch refused the job")

    queue.on_submit = refuse
    with pytest.raises(SlurmftError, match="sbatch refused the job"):
        submit.submit(run.load_config(), "local")
    assert list(run.path.parent.iterdir()) == [run.path]


@pytest.mark.parametrize("moment", ["launcher", "note_job"])
def test_disk_that_is_full_at_the_submission_leaves_nothing(
    queue: Queue, run: RunDir, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """No folder, and no job that nobody knows of."""

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if moment == "launcher":
        queue.on_submit = full
    else:
        monkeypatch.setattr(launcher, "note_job", full)
    with pytest.raises(UsageError, match=r"cannot write the run .*No space") as caught:
        submit.submit(run.load_config(), "local")
    assert "--runs-dir" in str(caught.value.hint)
    assert list(run.path.parent.iterdir()) == [run.path]
    assert queue.cancelled == ["11"] * len(queue.submitted)


def test_job_that_slurm_took_before_the_disk_was_full_is_cancelled(
    queue: Queue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: RunDir) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cancelled: list[str] = []
    queue.on_submit = full
    monkeypatch.setattr(commands, "job_of_script", lambda folder: "17")
    monkeypatch.setattr(commands, "cancel", cancelled.append)
    with pytest.raises(UsageError, match="No space left"):
        submit.submit(run.load_config(), "slurm")
    assert cancelled == ["17"]


def test_names_that_are_not_utf_8_leave_nothing(queue: Queue, run: RunDir) -> None:
    config = run.load_config()
    job = config.job.replaced({"runs_dir": str(run.path.parent / "caf\udce9")})
    config = dataclasses.replace(config, job=job)
    words = r"a text that is not UTF-8: .\"runs_dir\": .*caf.+udce9"
    with pytest.raises(UsageError, match=words):
        submit.submit(config, "local")
    assert queue.submitted == []
    assert list(run.path.parent.iterdir()) == [run.path]


# --- two at once ----------------------------------------------------------------------------------

HOLD = """
import sys
from slurmft.cluster import submit
from slurmft.runs.rundir import RunDir
with submit._alone(RunDir.open(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(run: RunDir) -> subprocess.Popen[str]:
    """A process that is about to submit the run."""
    command = [sys.executable, "-c", HOLD, str(run.path)]
    held = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    )
    assert held.stdout is not None
    assert held.stdout.readline() == "held\n"
    return held


@pytest.mark.processes
def test_second_resume_at_the_same_time_is_refused(queue: Queue, run: RunDir) -> None:
    with holder(run) as other:
        before = files(run)
        with pytest.raises(UsageError) as caught:
            resume(run)
        who = f"process {other.pid} on {os.uname().nodename}"
        assert (
            caught.value.message == f"another slurmft resume of r is under way: {who}"
        )
        assert caught.value.hint == f"wait for it; then: slurmft status {run.path}"
        assert (queue.submitted, files(run)) == ([], before)
        other.kill()  # whatever becomes of it, it does not keep the run for ever
    with (
        holder(run) as third,
        pytest.raises(UsageError, match=f"way: process {third.pid} on"),
    ):
        resume(run)
    assert resume(run) == "11"


def test_second_resume_sees_what_the_first_has_submitted(
    queue: Queue, run: RunDir
) -> None:
    assert resume(run) == "11"
    queue.state = Report(name="PENDING")
    with pytest.raises(UsageError, match="the job 11 of this run is pending"):
        resume(run)
    assert len(queue.submitted) == 1


@pytest.mark.processes
def test_lock_is_held_until_the_job_is_recorded(queue: Queue, run: RunDir) -> None:
    def try_it(run: RunDir) -> None:
        program = HOLD.replace("print", "raise SystemExit(9)  #")
        command = [sys.executable, "-c", program, str(run.path)]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=CHECKOUT, check=False
        )
        assert "another slurmft resume" in done.stderr

    queue.on_submit = try_it
    assert resume(run) == "11"


def test_resume_goes_on_where_the_file_system_has_no_locks(
    queue: Queue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)
    assert resume(run) == "11"


def test_resume_goes_on_where_the_lock_cannot_be_signed(
    queue: Queue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk."""

    def full(path: Path) -> int:
        return os.open("/dev/full", os.O_RDWR)

    monkeypatch.setattr(trusted, "own_lock_file", full)
    assert resume(run) == "11"


def test_resume_refuses_a_link_in_place_of_its_lock(queue: Queue, run: RunDir) -> None:
    (run.path / "resume.lock").symlink_to("precious")
    (run.path / "precious").write_text("text")
    with pytest.raises(trusted.NotOwnError, match="has the name of a lock"):
        resume(run)
    assert (run.path / "precious").read_text() == "text"


def test_end_of_another_job_says_nothing_of_the_run(queue: Queue, run: RunDir) -> None:
    """Who follows a second job, which ends at once, does not end the run of the first."""
    run.set_state("submitted", "resumed")
    launcher.note_job(run, "local", "12", "")
    watch = wait.JobWatch(run)
    launcher.note_job(run, "local", "11", "")  # by the job 12, when it found the job 11
    report = Report(name="FAILED", exit_code=137)
    watch.state = JobState(phase=Phase.FAILED, report=report, is_over=True)
    with pytest.raises(SlurmftError, match="the job 12 ended as FAILED, by SIGKILL"):
        watch.outcome()
    assert run.get_state().state == "submitted"
    launcher.note_job(run, "local", "12", "")
    with pytest.raises(SlurmftError):
        watch.outcome()
    assert run.get_state().state == "failed"


@pytest.mark.parametrize(
    ("recorded", "name", "message"),
    [
        ("failed", "FAILED", "the task of a node was killed by SIGKILL"),
        # Nobody in the job could record what becomes of it.
        ("killed", "TIMEOUT", "the time limit (--time) was reached; there is no"),
        ("running", "FAILED", "Connection closed by peer (rank 0 on n1)"),
        ("running", "TIMEOUT", "the job 7 ended as TIMEOUT"),
    ],
)
def test_error_is_the_reason_in_the_history(
    queue: Queue, tmp_path: Path, recorded: str, name: str, message: str
) -> None:
    """An echo is the error only where the run has recorded no other reason."""
    run = write_run(tmp_path / "r", state="running", cluster="local")
    launcher.note_job(run, "local", "7", "")
    run.add(
        Failure.of(
            "rank 0 on n1", SlurmftError("Connection closed by peer"), secondary=True
        )
    )
    if recorded == "failed":
        run.set_state("failed", "the task of a node was killed by SIGKILL", 137)
    report = Report(name=name)
    if recorded == "killed":
        begun = Attempt(number=1, job="7", hosts=["n1"], time=0.0)
        write_json(run.attempt, begun)
        write_json(run.ended, {"attempt": 1, "code": 137})
        ending.recover(run, combine(run.get_state(), report))
    error = wait.job_error(run, "7", report)
    assert error.message.startswith(message)


@pytest.mark.processes
def test_resume_tells_job_and_checkpoint(
    queue: Queue, run: RunDir, capsys: Any
) -> None:
    from slurmft.cli import resume as command

    (run.checkpoints / "step-00000010").mkdir(parents=True)
    assert command.main([str(run.path), "--json"]) == Exit.OK
    told = json.loads(capsys.readouterr().out)
    assert told == {"run": str(run.path), "job": "11", "checkpoint": "step-00000010"}


def test_a_folder_in_which_a_group_can_rename_is_a_warning(tmp_path: Path) -> None:
    """As all warnings: a Python caller can catch it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    if os.getuid() == 0:  # of a group that is not private
        os.chown(shared, -1, 4000)
    shared.chmod(0o2775)
    with pytest.warns(SlurmftWarning, match="can rename what is in .*shared") as caught:
        submit.warn_of_renaming(shared / "runs" / "run")
    assert "\nhint: to keep it from that: chmod +t " in str(caught[0].message)
