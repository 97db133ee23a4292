"""Launchers answer for themselves: slurmft's own, and those of other packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.cli import list as list_command
from slurmft.cli import status as status_command
from slurmft.cluster import launcher, status
from slurmft.cluster.job_state import Phase
from slurmft.core import plugins
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.launchers import starts_ranks
from slurmft.plugins.examine import hooks as examine
from slurmft.runs import resolve
from slurmft.runs.rundir import RunDir
from tests.support.made_runs import write_run

FLUX = '''"""Jobs by Flux."""

from slurmft.cluster.job_state import Report

DESTINATION = "to Flux: {} node(s)"
LOCATION_KIND = "cluster"
STARTS_RANKS = True
asked = []


def location():
    return "corona"


def plan(config, run):
    return "# flux"


def submit(config, run):
    return "77"


def job_state(job_id, run):
    asked.append(job_id)
    if job_id == "79":
        return Report(name="FAILED", reason="of its node", exit_code=1)
    return Report(name="SUSPENDED")


def cancel(job_id, run):
    pass
'''


@pytest.fixture
def flux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A folder of runs; a package with the launcher "flux" is installed as pip does it."""
    site = tmp_path / "site"
    metadata = site / "flux_tools-1.0.dist-info"
    metadata.mkdir(parents=True)
    name = f"flux_launcher_{os.getpid()}"
    entries = f"[slurmft.launchers]\nflux = {name}\n"
    (metadata / "entry_points.txt").write_text(entries)
    (site / f"{name}.py").write_text(getattr(request, "param", FLUX))
    monkeypatch.syspath_prepend(site)
    plugins._installed.cache_clear()
    yield tmp_path / "runs"
    plugins._installed.cache_clear()
    # Another test installs another module by this name.
    sys.modules.pop(name, None)


def a_run(runs: Path, name: str, where: str = "corona", job: str = "77") -> RunDir:
    run = write_run(runs / name, state="running", cluster="flux")
    launcher.note_job(run, "flux", job, where)
    return run


def statuses(runs: Path) -> dict[str, status.RunStatus]:
    return {
        each.run.name: each for each in status.run_statuses(resolve.read_all(runs)[0])
    }


@pytest.mark.parametrize("name", sorted(plugins.entries(plugins.LAUNCHERS)))
def test_every_launcher_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # the cluster of this machine is not asked
    each = launcher.get(name)
    assert each.DESTINATION.format(4).count("4") == 1
    assert each.LOCATION_KIND in ("cluster", "host")
    assert isinstance(each.STARTS_RANKS, bool)
    assert isinstance(each.location(), str)
    for function in (each.plan, each.submit, each.job_state, each.cancel):
        assert callable(function)


def test_jobs_of_another_packages_launcher_are_asked_for(
    flux: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(flux, "here")
    a_run(flux, "there", where="tioga", job="78")
    found = statuses(flux)
    assert (found["here"].state, found["here"].is_sure) == (Phase.RUNNING, True)
    assert found["here"].reason == "suspended"  # its scheduler's word
    assert not found["there"].is_sure
    assert found["there"].elsewhere == "on the cluster tioga; seen from corona"
    asked: list[str] = launcher.get("flux").asked  # type: ignore[attr-defined]
    assert asked == ["77"]
    assert status_command.main([str(run.path)]) == 0
    assert list_command.main(["--runs-dir", str(flux)]) == 0
    assert asked == ["77"] * 3
    assert "suspended" in capsys.readouterr().out


def test_what_another_packages_scheduler_says_of_an_end_is_believed(flux: Path) -> None:
    a_run(flux, "run", job="79")
    (run,) = statuses(flux).values()
    assert (run.state, run.reason) == (Phase.FAILED, "failed of its node")


@pytest.mark.usefixtures("flux")
def test_launcher_of_another_package_decides_what_starts_the_ranks() -> None:
    assert starts_ranks("flux")
    assert not starts_ranks("auto")
    with pytest.raises(
        UsageError, match="--preflight on cannot be used with --cluster flux"
    ):
        examine.Examine().check(JobConfig(plugins={"preflight": "on"}), "flux")


@pytest.mark.parametrize("flux", ["1 / 0\n"], indirect=True)
def test_launcher_that_fails_at_import(flux: Path) -> None:
    """It costs its own jobs, which have their records; all others are listed."""
    a_run(flux, "damaged")
    write_run(flux / "other")
    found = statuses(flux)
    assert (found["damaged"].state, found["damaged"].is_sure) == (Phase.RUNNING, False)
    assert found["other"].state is Phase.FINISHED
    assert list_command.main(["--runs-dir", str(flux)]) == 0
    with pytest.raises(
        SlurmftError, match="'flux' of the package flux-tools cannot be imported"
    ):
        launcher.get("flux")


@pytest.mark.parametrize(
    ("cluster", "words"),
    [("slurm", "2 + 1 spare node(s)"), ("local", "2 "), ("mpirun", ": 2 node(s)")],
)
def test_spare_nodes_are_slurms_alone(cluster: str, words: str) -> None:
    where = launcher.destination(cluster, JobConfig(nodes=2, spare_nodes=1))
    assert words in where
    assert ("spare" in where) == (cluster == "slurm")
