"""`--on`: a laptop, a real sshd, and Slurm behind it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from slurmft.runs.rundir import RunDir
from tests.plugins.remote.conftest import Laptop, laptop, sshd, until
from tests.support.fake_slurm.cluster import FakeSlurm

pytestmark = pytest.mark.processes

__all__ = ["laptop", "sshd"]

RUN = ("run", "--on", "lab", "--nodes", "2", "--", "train.py")


@pytest.mark.extra("remote")
def test_one_job_whatever_is_cut(
    fake_slurm: FakeSlurm, laptop: Laptop, tmp_path: Path
) -> None:
    """The connection is cut before sbatch, and right after it; whoever submits is killed between
    sbatch's answer and the record."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    real = shlex.quote(fake_slurm.run(["which", "sbatch"]).stdout.strip())
    sbatch.write_text(
        f"#!/bin/bash\ncd {tmp_path}\n"
        'waits() { touch "$1"; [ -e "cut-$1" ] || return\n'
        "until [ -e cut ]; do sleep 0.1; done; sleep 3; }\n"
        f'waits asked\n(cd "$OLDPWD" && {real} "$@")\nwaits accepted\n'
        "[ -e kill ] && kill -9 $PPID; exit 0\n"
    )
    sbatch.chmod(0o755)
    exports = [f"export {k}={shlex.quote(v)}" for k, v in fake_slurm.env.items()]
    path = f"export PATH={shlex.quote(str(sbatch.parent))}:$PATH"
    laptop.name(
        "lab",
        setup=[*exports, path],
        site='cluster = "slurm"\ntime = "5"\njob_name = "cut"',
    )

    for number, moment in enumerate(("asked", "accepted", "kill"), start=1):
        for name in ("asked", "accepted", "kill", "cut", "cut-asked", "cut-accepted"):
            (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / ("kill" if moment == "kill" else f"cut-{moment}")).touch()
        first = laptop.start(*RUN)
        until((tmp_path / ("accepted" if moment == "kill" else moment)).exists)
        laptop.sshd.cut()
        assert laptop.end(first).code != 0
        (tmp_path / "cut").touch()
        again = laptop.slurmft(*RUN[:-2], "--follow", *RUN[-2:])
        assert again.code == 0, again.err
        assert "before the connection was cut" in again.out
        assert len(laptop.runs()) == number
        assert len(job_ids(fake_slurm)) == number, moment
    assert {run.get_state().state for run in laptop.runs()} == {"finished"}
    assert {run.job_id() for run in laptop.runs()} <= job_ids(fake_slurm)
    found = json.loads(laptop.slurmft("list", "--on", "lab", "--json").out)["runs"]
    assert [run["state"] for run in found] == ["finished"] * 3
    assert isinstance(laptop.runs()[0], RunDir)


def job_ids(cluster: FakeSlurm) -> set[str]:
    """All jobs of this test's name that Slurm has had in the last minutes (`MinJobAge`): accounting
    learns of a job up to 5 s later, and of a short one after its end."""
    text = cluster.run(["squeue", "--noheader", "--states=all", "--format=%i|%j"])
    rows = (line.split("|") for line in text.stdout.splitlines())
    return {job for job, name in rows if name == "cut"}
