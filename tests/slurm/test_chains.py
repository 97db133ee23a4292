"""Runs that wait for others, and arrays of own programs, on the fake Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmft.runs.rundir import RunDir
from tests.conftest import Done
from tests.plugins.studies.test_programs import FILE, FIT
from tests.slurm.commands import slurmft
from tests.slurm.test_studies import await_state, await_totals, runs_of, status, study
from tests.support.fake_slurm.cluster import FakeSlurm

pytestmark = pytest.mark.processes

WAITS = """\
#!/bin/sh
until [ -s "$1" ]; do sleep 0.2; done
exit "$(cat "$1")"
"""
"""Ends when a file is there, with the exit code that it holds."""


def submit(cluster: FakeSlurm, folder: Path, file: str, *flags: str) -> Done:
    """A run that ends when a file is there."""
    program = folder / "waits.sh"
    # Once: while it is written, no job that has been submitted before can start it.
    if not program.exists():
        program.write_text(WAITS)
        program.chmod(0o755)
    place = ("--runs-dir", str(folder / "runs"), "--time", "5", *flags)
    return slurmft(cluster, "run", *place, "--", str(program), str(folder / file))


def run_of(done: Done) -> RunDir:
    assert done.code == 0, done.err
    line = next(
        line for line in done.out.splitlines() if line.startswith("run directory")
    )
    return RunDir(Path(line.partition(": ")[2]))


def listed(cluster: FakeSlurm, folder: Path) -> dict[str, str]:
    """Name -> state and reason."""
    done = slurmft(cluster, "list", "--json", "--runs-dir", str(folder / "runs"))
    runs = json.loads(done.out)["runs"]
    return {run["name"]: f"{run['state']}: {run['reason']}" for run in runs}


def test_a_chain(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """After a run that is requeued, and after one that fails; in whatever way it ends."""
    (tmp_path / "now").write_text("0")
    good, bad = (run_of(submit(fake_slurm, tmp_path, name)) for name in ("good", "bad"))
    on_good = run_of(submit(fake_slurm, tmp_path, "now", "--after", str(good.path)))
    job = json.loads(bad.job.read_text())["id"]
    on_bad = run_of(submit(fake_slurm, tmp_path, "now", "--after", job))
    on_both = run_of(
        submit(
            fake_slurm, tmp_path, "now", "--after", good.path.name, "--after-any", job
        )
    )
    await_state(good, "running")
    await_state(bad, "running")
    found = listed(fake_slurm, tmp_path)
    assert found[on_good.path.name] == f"pending: waits for {good.path.name}"
    assert (
        found[on_both.path.name]
        == f"pending: waits for {good.path.name}, {bad.path.name}"
    )
    fake_slurm.run(["scancel", "--signal=USR2", json.loads(good.job.read_text())["id"]])
    await_state(good, "requeued")
    assert listed(fake_slurm, tmp_path)[on_good.path.name].startswith("pending")
    (tmp_path / "bad").write_text("3")
    await_state(bad, "failed")
    refused = submit(fake_slurm, tmp_path, "now", "--after", job)
    assert refused.code == 2
    assert f"--after {bad.path.name}: that run is failed: " in refused.err
    assert "(rank 0 on" in refused.err
    (tmp_path / "good").write_text("0")
    await_state(good, "finished")
    await_state(on_good, "finished")
    await_state(on_both, "finished")
    assert on_good.history()[1].time >= good.history()[-1].time
    words = f"cancelled: Slurm found that it can never start after {bad.path.name}"
    assert listed(fake_slurm, tmp_path)[on_bad.path.name] == words
    shown = slurmft(fake_slurm, "status", str(on_bad.path))
    assert (shown.code, words in shown.out) == (0, True)
    (tmp_path / "bad").unlink()
    for each in (bad, on_bad):
        done = slurmft(fake_slurm, "resume", str(each.path))
        assert done.code == 0, done.err
    assert listed(fake_slurm, tmp_path)[on_bad.path.name].endswith(
        f"for {bad.path.name}"
    )
    (tmp_path / "bad").write_text("0")
    await_state(on_bad, "finished")
    assert bad.get_state().state == "finished"


def test_an_array_of_programs(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(FIT)
    text = FILE.replace("fit.py", f"{tmp_path}/fit.py").replace(
        "out/", f"{tmp_path}/out/"
    )
    (tmp_path / "s.toml").write_text(text.replace("repeats = 2", "repeats = 1"))
    done = study(fake_slurm, tmp_path, "run", "--time", "5")
    assert done.code == 0, done.err
    await_totals(fake_slurm, tmp_path, lambda t: t["finished"] == 2)
    jobs = {
        json.loads(run.job.read_text())["id"] for run in runs_of(fake_slurm, tmp_path)
    }
    assert {job.partition("_")[2] for job in jobs} == {"0", "1"}
    metrics = [r["metrics"]["error"] for r in status(fake_slurm, tmp_path)["repeats"]]
    assert metrics == [0.0001, 1e-05]
