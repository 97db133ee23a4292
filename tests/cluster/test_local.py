"""Which process is the job of a run on this machine."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from slurmft.cluster import local
from slurmft.cluster.job_state import combine
from slurmft.cluster.local import LocalNodes, Process
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.files import to_json, write_json
from slurmft.core.program import Program
from slurmft.core.run_files import ATTEMPT
from slurmft.core.text import with_reason
from slurmft.node import signals
from slurmft.plugins.mpirun.launcher import MpiRun
from slurmft.runs import attempts
from slurmft.runs.rundir import RunDir
from tests.support.made_runs import write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = write_run(tmp_path / "run", state="running")
    run.submitit.mkdir()
    return run


def state(run: RunDir) -> str | None:
    report = local.job_state(str(os.getpid()), run)
    if report is None:
        return None
    return report.name


def test_process_with_the_jobs_number_is_not_the_job(run: RunDir) -> None:
    """Of another boot or host, as of a run that was pulled; or one that was started later."""
    assert state(run) == "FAILED"
    own = Process.of(os.getpid())
    assert own is not None
    pid_file = run.submitit / "pid.json"
    others = (
        replace(own, boot="another"),
        replace(own, started="1"),
        replace(own, pid=1),
        replace(own, pid=-1),
        replace(own, pid=2**40),
    )
    texts = [to_json(other) for other in others]
    texts += ["{}", '{"pid": 4194305, "started": null, "boot": null}', "[", ""]
    for text in texts:
        pid_file.write_text(text)
        assert state(run) == "FAILED", text
    write_json(pid_file, own)
    assert state(run) == "RUNNING"


def test_controller_counts_until_the_job_has_begun(run: RunDir) -> None:
    local.note_controller(run, os.getpid())
    assert state(run) == "RUNNING"
    write_json(run.submitit / "pid.json", Process(4194305, "1", "boot"))
    assert state(run) == "FAILED"
    local.forget_processes(run)
    assert list(run.submitit.iterdir()) == []
    local.note_controller(run, 4194305)  # it has ended
    assert state(run) == "FAILED"


def test_ended_run_completes_while_its_own_process_lives(run: RunDir) -> None:
    own = Process.of(os.getpid())
    assert own is not None
    run.set_state("failed", "boom", 1)
    write_json(run.submitit / "pid.json", own)
    assert state(run) == "COMPLETING"
    write_json(run.submitit / "pid.json", replace(own, boot="another"))
    assert state(run) is None


def test_cancelled_job_without_a_record_of_its_end_is_cancelled(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its disk is full. Once more submitted, it is the job of another process."""
    signalled = []
    monkeypatch.setattr(os, "kill", lambda *call: signalled.append(call))
    own = Process.of(os.getpid())
    assert own is not None
    write_json(run.submitit / "pid.json", own)
    local.cancel(str(os.getpid()), run)
    assert signalled == [(os.getpid(), signal.SIGTERM)]
    assert state(run) == "RUNNING"
    write_json(run.submitit / "pid.json", replace(own, boot="another"))
    assert state(run) == "CANCELLED"
    local.forget_processes(run)
    assert state(run) == "FAILED"
    # The job has ended by itself before.
    local.cancel(str(os.getpid()), run)
    assert state(run) == "FAILED"


def test_file_that_tells_nothing_is_no_process(run: RunDir) -> None:
    os.mkfifo(run.submitit / "pid.json")
    assert state(run) == "FAILED"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("launcher", "place"),
    [(LocalNodes, "on this machine"), (MpiRun, "on the same hosts")],
)
def test_attempt_in_the_place_of_the_one_before_is_no_requeue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: type[LocalNodes],
    place: str,
) -> None:
    config = JobConfig(runs_dir=str(tmp_path))
    program = Program(kind="script", name="plain", module="plain")
    run = RunDir.create(RunConfig(program=program, job=config))
    run.submitit.mkdir(exist_ok=True)
    codes = [Exit.STOPPED, Exit.OK]

    def attempt(self: LocalNodes, run: RunDir) -> int:
        attempts.begin(run, ["here"], str(os.getpid()))
        return codes.pop(0)

    monkeypatch.setenv(ATTEMPT, "0")  # `attempts.begin` sets it
    monkeypatch.setattr(launcher, "_attempt", attempt)
    # This process goes on with its signals.
    monkeypatch.setattr(signals, "block", lambda: None)
    monkeypatch.setattr(signals, "listen", lambda on_signal: None)
    assert launcher(run)() == Exit.OK
    state = run.get_state()
    assert [each.word for each in state.history] == [
        *("submitted", "running", "restarting", "running", "finished"),
    ]
    assert state.history[2].reason.endswith(f"; it starts again {place}")
    assert len(state.starts_since_submission()) == 1


@pytest.mark.parametrize(
    ("stop", "code", "seen"),
    [
        (signal.SIGTERM, 143, "cancelled"),
        (signal.SIGUSR2, 143, "failed: timeout"),
        (signal.SIGTERM, 0, "vanished: its process ended without recording why"),
        (0, 1, "vanished: its process ended without recording why"),
    ],
)
def test_signal_that_stops_a_job_is_noted_where_its_end_finds_no_room(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, stop: int, code: int, seen: str
) -> None:
    def attempt(self: LocalNodes, run: RunDir) -> int:
        self.stopped_by = stop
        return code

    def end(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalNodes, "_attempt", attempt)
    monkeypatch.setattr(attempts, "end", end)
    monkeypatch.setattr(signals, "block", lambda: None)
    monkeypatch.setattr(signals, "listen", lambda on_signal: None)
    monkeypatch.setattr(RunDir, "join", RunDir.load_config)
    monkeypatch.setattr(attempts, "check_turn", lambda *_: None)
    monkeypatch.setattr(os, "getpid", lambda: 4194304)  # whose process has ended
    with pytest.raises(OSError, match="No space left"):
        LocalNodes(run)()
    report = local.job_state("4194304", run)
    job = combine(run.get_state(), report, is_process=True)
    assert with_reason(job.phase, job.reason) == seen


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "x", "/tmp/a"), "'/tmp/a' cannot be written"),
        (SlurmftError("no sessions"), "no sessions"),
    ],
)
def test_what_keeps_an_attempt_from_its_start_is_recorded(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def attempt(self: LocalNodes, run: RunDir) -> int:
        raise error

    monkeypatch.setattr(LocalNodes, "_attempt", attempt)
    monkeypatch.setattr(signals, "block", lambda: None)
    monkeypatch.setattr(signals, "listen", lambda on_signal: None)
    monkeypatch.setattr(RunDir, "join", RunDir.load_config)
    monkeypatch.setattr(attempts, "check_turn", lambda *_: None)
    with pytest.raises(type(error)):
        LocalNodes(run)()
    state = run.get_state()
    assert (state.state, words in state.reason) == ("failed", True)
    failure = run.root_failure()
    assert failure is not None
    assert words in failure.message
