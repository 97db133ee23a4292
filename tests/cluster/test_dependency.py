"""Runs that wait for others: which jobs they wait for, and what is refused; without a Slurm."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from slurmft import submit
from slurmft.cluster import dependency, local, status
from slurmft.cluster.slurm.sbatch_options import all_options
from slurmft.core.config import RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.files import write_json
from slurmft.runs import resolve
from slurmft.runs.rundir import RunDir
from tests.cluster.test_status import slurm
from tests.conftest import slurmft
from tests.support.made_runs import write_run

__all__ = ["slurm"]


def other(top: Path, name: str, state: str, job: str, cluster: str = "slurm") -> RunDir:
    run = write_run(top / name, state=state)
    write_json(run.job, {"cluster": cluster, "id": job})
    return run


def settled(top: Path, cluster: str = "slurm", **fields: Any) -> RunConfig:
    """The configuration of a new run with these fields of its job."""
    config = write_run(top.parent / f"{top.name}-new", state="submitted").load_config()
    return dependency.settled(
        dataclasses.replace(config, job=dataclasses.replace(config.job, **fields)),
        cluster,
        str(top),
    )


def test_jobs_that_have_not_ended_are_waited_for(
    tmp_path: Path, slurm: dict[str, Any]
) -> None:
    """By path, beginning of the name, and job id; a job of a resume is the newest one's."""
    one, two = (
        other(tmp_path, "one", "running", "11"),
        other(tmp_path, "two", "running", "7"),
    )
    write_json(two.job, {"cluster": "slurm", "id": "12"})
    done = other(tmp_path, "done", "finished", "3")
    config = settled(
        tmp_path, after=("one", "done"), after_any=("12",), sbatch=("nice=5",)
    )
    assert config.submission.dependency == "afterok:11,afterany:12"
    assert config.job.after == (str(one.path), str(done.path))
    assert config.job.after_any == (str(two.path),)
    options = dict(all_options(config, RunDir(tmp_path / "x")))
    assert options["dependency"] == "afterok:11,afterany:12"
    assert options["kill-on-invalid-dep"] == "yes"
    assert options["nice"] == "5"


def test_beside_a_dependency_of_the_users_own(
    tmp_path: Path, slurm: dict[str, Any]
) -> None:
    other(tmp_path, "one", "running", "11")
    config = settled(tmp_path, after=("one",), sbatch=("dependency=singleton",))
    assert (
        dict(all_options(config, RunDir(tmp_path)))["dependency"]
        == "singleton,afterok:11"
    )


@pytest.mark.parametrize("state", ["finished", "failed", "cancelled"])
def test_what_has_ended_is_not_waited_for(
    state: str, tmp_path: Path, slurm: dict[str, Any]
) -> None:
    other(tmp_path, "one", state, "3")
    config = settled(tmp_path, after_any=("last", "one"))
    assert config.submission.dependency == ""
    assert "dependency" not in dict(all_options(config, RunDir(tmp_path)))


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_after_what_has_failed(
    state: str, tmp_path: Path, slurm: dict[str, Any]
) -> None:
    run = other(tmp_path, "one", "running", "3")
    run.set_state(state, "boom", 1)
    with pytest.raises(
        UsageError, match=f"--after one: that run is {state}: boom"
    ) as caught:
        settled(tmp_path, after=("one",))
    assert "slurmft resume" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("cluster", "of_other"), [("local", "slurm"), ("slurm", "mpirun")]
)
def test_only_slurm_waits(
    cluster: str, of_other: str, tmp_path: Path, slurm: dict[str, Any]
) -> None:
    run = other(tmp_path, "one", "running", "11", of_other)
    if of_other != "slurm":
        run.submitit.mkdir()
        write_json(run.submitit / "pid.json", local.Process.of(os.getpid()))
    with pytest.raises(
        UsageError, match=r"--after-any one: that run is running.*wait for each"
    ):
        settled(tmp_path, cluster, after_any=("one",))


@pytest.mark.processes
def test_from_python(
    tmp_path: Path, slurm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths may stand for names."""
    monkeypatch.chdir(tmp_path)
    run = other(tmp_path, "one", "cancelled", "3")
    with pytest.raises(UsageError, match="--after one: that run is cancelled"):
        submit(task="synthetic", cluster="local", after=[run.path])
    assert not (tmp_path / "runs").exists()


def test_no_such_run(tmp_path: Path, slurm: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="called 'nobody'"):
        settled(tmp_path, after=("nobody",))


def test_what_waits_says_for_what(tmp_path: Path, slurm: dict[str, Any]) -> None:
    run = other(tmp_path, "b", "submitted", "12")
    config = run.load_config()
    job = dataclasses.replace(config.job, after=("/x/one",), after_any=("/x/two",))
    run.config.write_text(dataclasses.replace(config, job=job).to_json())
    slurm["squeue"] = "12|PENDING|N/A|Dependency\n"
    found = status.run_statuses(resolve.read_all(tmp_path)[0])[0]
    run.attempt.unlink(missing_ok=True)
    assert (found.state, found.reason) == ("pending", "waits for one, two")


@pytest.mark.processes
def test_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a run that has finished, a run on this machine starts; after a failed one it does not,
    and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    run = ("run", "--cluster", "local", "--per", "node", "--follow")
    first = slurmft(*run, "--", "true")
    assert first.code == 0, first.err
    second = slurmft(*run, "--after", "last", "--", "true")
    assert second.code == 0, second.err
    assert slurmft(*run, "--", "false").code != 0
    third = slurmft(*run, "--after", "last", "--", "true")
    assert third.code == 2
    assert third.err.startswith("error: --after false-")
    assert len(third.err.splitlines()) == 2
    assert len(list((tmp_path / "runs").iterdir())) == 3
