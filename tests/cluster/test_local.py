"""Which process is the job of a run on this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from slurmft.cluster import local
from slurmft.cluster.local import Process
from slurmft.core.files import to_json, write_json
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


def test_file_that_tells_nothing_is_no_process(run: RunDir) -> None:
    os.mkfifo(run.submitit / "pid.json")
    assert state(run) == "FAILED"
