"""What does each fault of a cluster cost a run, on a real Slurm of four nodes?

    python results/benchmarks/faults.py [PART OF A NAME]

Takes about 20 minutes, as root; it starts the test cluster itself. Every run must end with the
losses, metrics and weights of an undisturbed one, bit by bit.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import parser, save

from tests.conftest import Following
from tests.slurm.commands import assert_nodes_are_clean
from tests.support.cluster import Cluster
from tests.support.faults import BASE, FAULTS, Fault, recovery_s, steps_lost
from tests.support.models import write_emotion, write_model
from tests.support.small_disk import SmallDisk
from tests.train.test_resume import assert_same

SITES: dict[str, dict[str, Any]] = {
    "preemption with GraceTime=0": {"grace_time_s": 0},
    "preemption with preempt_send_user_signal": {
        "extra_conf": ["SlurmctldParameters=preempt_send_user_signal"]
    },
}
"""Sites that preempt in other ways than the test cluster does."""

SHORT, LONG = ("--epochs", "12"), ("--epochs", "120")

_LIMIT_S = 1200
"""For one run: of a minute's time limit, a busy machine may leave a start few steps."""


class Table:
    """Runs on one cluster, and what they showed."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.rows: list[dict[str, Any]] = []
        model = write_model(folder / "model")
        data = write_emotion(folder / "data", train=203, validation=67)
        source = ("--task", "emotion", "--data", str(data), "--model", str(model))
        self.flags = (*BASE, *source)

    def start(self, runs: Path, *flags: str) -> Following:
        return Following(
            "--runs-dir", str(runs), *self.flags, *flags, env=self.cluster.env
        )

    def end(self, job: Following) -> Following:
        code, text = job.end(_LIMIT_S)
        assert code == 0, text
        assert_nodes_are_clean(self.cluster)
        return job

    def fault(self, fault: Fault, undisturbed: Following) -> None:
        with SmallDisk(self.folder / fault.name.replace(" ", "-"), 24) as disk:
            job = self.start(disk, *SHORT, *fault.flags)
            job.until(fault.after)
            began = time.time()
            fault.harm(self.cluster, job)
            self.end(job)
            assert_same(job.run, undisturbed.run)
            self.add(fault.name, job, recovery_s(job.run, began), interval(fault))

    def add(
        self, name: str, job: Following, seconds: float | None, every: int | None
    ) -> None:
        row = {
            "fault": name,
            "attempts": job.run.attempt_number(),
            "steps_lost": steps_lost(job.run),
            "steps_between_checkpoints": every,
            "recovery_s": seconds and round(seconds, 1),
            "equal_to_undisturbed": True,
        }
        self.rows.append(row)
        print(describe(row), flush=True)

    def time_limit(self) -> None:
        expected = self.end(self.start(self.folder / "long", *LONG))
        began = time.time()
        job = self.end(self.start(self.folder / "limit", *LONG, "--time", "1"))
        assert_same(job.run, expected.run)
        assert job.run.attempt_number() >= 3
        self.add("time limit reached twice", job, recovery_s(job.run, began + 60), None)

    def two_jobs(self, undisturbed: Following) -> None:
        jobs = [self.start(self.folder / f"two-{i}", *SHORT) for i in range(2)]
        for job in jobs:
            self.end(job)
            assert_same(job.run, undisturbed.run)
        self.add("two jobs on the same nodes", jobs[0], None, None)


def interval(fault: Fault) -> int | None:
    """Steps between the checkpoints of a fault's run."""
    name = "--checkpoint-every-steps"
    return (
        int(fault.flags[fault.flags.index(name) + 1]) if name in fault.flags else None
    )


def describe(row: dict[str, Any]) -> str:
    seconds = "" if row["recovery_s"] is None else f"{row['recovery_s']:.1f} s"
    return f"{row['fault']:42} {row['attempts']:3} {row['steps_lost']:6} {seconds:>9}  equal"


def main(part: str) -> None:
    with tempfile.TemporaryDirectory() as name, Cluster(nodes=4) as cluster:
        os.environ.pop("SLURMFT_SITE", None)
        table = Table(cluster, Path(name))
        undisturbed = table.end(table.start(table.folder / "undisturbed", *SHORT))
        print(f"{'fault':42} starts  lost  recovery", flush=True)
        for fault in FAULTS:
            if part in fault.name:
                table.fault(fault, undisturbed)
        if part in "time limit reached twice":
            table.time_limit()
        if part in "two jobs on the same nodes":
            table.two_jobs(undisturbed)
    if not part:
        save("faults", {"steps": 612, "nodes": 2, "rows": table.rows})
    rows = [row for site in SITES if part in site for row in preemption(site)]
    if rows:
        save("faults_preemption", {"steps": 612, "nodes": 2, "rows": rows})


def preemption(site: str) -> list[dict[str, Any]]:
    """The first fault, at another kind of site."""
    fault = replace(FAULTS[0], name=site)
    with (
        tempfile.TemporaryDirectory() as name,
        Cluster(nodes=4, **SITES[site]) as cluster,
    ):
        table = Table(cluster, Path(name))
        undisturbed = table.end(table.start(table.folder / "undisturbed", *SHORT))
        table.fault(fault, undisturbed)
    return table.rows


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("part", nargs="?", default="", metavar="PART OF A NAME")
    main(arguments.parse_args().part)
