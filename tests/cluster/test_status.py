"""`list` and `status` where Slurm does not answer, or files have something else in them."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from slurmft.cli import list as list_command
from slurmft.cli import status as status_command
from slurmft.cluster import status
from slurmft.cluster.slurm import commands
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import write_json
from slurmft.core.run_files import RESULT_KEYS, Failure
from slurmft.runs import resolve
from slurmft.runs.rundir import RunDir
from tests.support.made_runs import write_run


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What squeue and sacct print; a text that is None is a failure of the command."""
    answers: dict[str, Any] = {
        "squeue": "11|RUNNING|N/A|None\n12|RUNNING|N/A|None\n",
        "sacct": "",
    }

    def call(*command: str) -> str:
        given = answers.get(command[0])
        jobs = next((a for a in command if a.startswith("--jobs=")), "--jobs=1")[7:]
        assert all(job.isdigit() for job in jobs.split(","))
        if given is None:
            raise SlurmftError(f"{command[0]} failed (exit 1): Connection refused")
        return str(given)

    monkeypatch.setattr(commands, "call", call)
    return answers


def made_run(path: Path, state: str, job: str) -> RunDir:
    run = write_run(path, state=state)
    write_json(run.job, {"cluster": "slurm", "id": job})
    write_json(run.attempt, {"number": 1, "job": job, "hosts": ["n1"], "time": 1000.0})
    run.add(Failure.of("rank 0 on n1", SlurmftError("boom", "look"), attempt=1))
    next(run.failures.glob("*.json")).rename(run.failures / "one.json")
    return run


def listed(top: Path) -> dict[str, str]:
    found = status.run_statuses(resolve.read_all(top)[0])
    return {each.run.name: each.state for each in found}


def test_what_takes_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    """Of a run without a job, too: it is not one that is to be submitted."""
    for name in ("state.json", "result.json", "config.json"):
        path = write_run(tmp_path / f"of-{name}", state="finished").path / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    runs, problems = resolve.read_all(tmp_path)
    (found,) = status.run_statuses(runs)
    assert found.state == "unknown"
    assert "not a regular file" in found.reason
    assert any("not the result of a run: it is a FIFO" in each for each in problems)
    with pytest.raises(UsageError, match=r"its config\.json is a FIFO"):
        RunDir.open(tmp_path / "of-config.json")


def test_end_that_nobody_recorded_is_by_the_next_look(
    tmp_path: Path, slurm: dict[str, Any]
) -> None:
    """The one of a job that was cancelled while it waited, and the one of a job whose script was
    killed when model and result were there."""
    waiting = made_run(tmp_path / "waiting", "running", "11")
    waiting.attempt.unlink()
    waiting.state.unlink()
    waiting.set_state("submitted")
    finished = made_run(tmp_path / "finished", "running", "12")
    write_json(finished.result, dict.fromkeys(RESULT_KEYS, 0))
    write_json(finished.ended, {"attempt": 1, "code": 0})
    assert listed(tmp_path) == {"waiting": "running", "finished": "running"}
    slurm["squeue"] = "11|CANCELLED|N/A|None\n12|FAILED|N/A|NonZeroExitCode\n"
    # The job on record is the one before a resume that is under way.
    assert listed(tmp_path) == {"waiting": "cancelled", "finished": "finished"}
    assert waiting.get_state().state == "submitted"
    write_json(waiting.job, {"cluster": "slurm", "id": "11"})
    assert listed(tmp_path) == {"waiting": "cancelled", "finished": "finished"}
    assert waiting.get_state().reason == "the job 11 was cancelled"
    assert finished.get_state().state == "finished"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "state.json",
            '{"state": "running", "history": null, "time": "now", "reason": [1]}',
        ),
        ("state.json", '{"state": "running", "history": [null, 5, {"state": null}]}'),
        ("job.json", '{"cluster": "slurm", "id": "12", "where": null}'),
        ("attempt.json", "[]"),
        ("attempt.json", '{"number": "x", "job": null}'),
        ("environment.json", '{"ranks": {"host": 5}}'),
        (
            "records.jsonl",
            '{"time": null, "event": "step", "total_steps": {}, "epoch": "x"}\n',
        ),
        ("failures/one.json", '{"attempt": null, "time": "x"}'),
    ],
)
def test_a_value_of_another_kind_is_left_out(
    tmp_path: Path, slurm: dict[str, Any], name: str, text: str
) -> None:
    run = made_run(tmp_path / "r", "running", "12")
    (run.path / name).write_text(text)
    assert listed(tmp_path) == {"r": "running"}
    assert list_command.main(["--runs-dir", str(tmp_path)]) == 0
    assert status_command.main([str(run.path)]) == 0


@pytest.mark.parametrize(
    "job", ["--help", "12; rm", "x", None, 12, ["12"], "12,13", ""]
)
def test_an_id_that_is_none_does_not_reach_slurm(
    tmp_path: Path, slurm: dict[str, Any], job: Any
) -> None:
    """One of them would make squeue fail for all runs: "Invalid job id: x"."""
    made_run(tmp_path / "good", "running", "11")
    bad = made_run(tmp_path / "bad", "running", "12")
    bad.attempt.unlink()
    write_json(bad.job, {"cluster": "slurm", "id": job})
    found = listed(tmp_path)
    assert found["good"] == "running"
    assert found["bad"] in ("vanished", "pending")  # or never submitted


@pytest.mark.parametrize(
    ("squeue", "sacct", "state"),
    [
        (None, "", "unknown"),
        ("", None, "unknown"),
        ("", "", "vanished"),
        ("", "12|TIMEOUT|0:0", "failed"),
    ],
)
def test_no_answer_is_not_the_end(
    tmp_path: Path,
    slurm: dict[str, Any],
    squeue: str | None,
    sacct: str | None,
    state: str,
) -> None:
    run = made_run(tmp_path / "r", "running", "12")
    slurm.update(squeue=squeue, sacct=sacct)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        list_command.main(["--runs-dir", str(tmp_path)])
        status_command.main([str(run.path)])
    assert state in out.getvalue().splitlines()[1].split()
    assert ("does not answer" in out.getvalue()) == (state == "unknown")
