"""What do too little memory, a dead node, and nodes that are not free cost a run?

A real Slurm of four nodes; the built-in training, --shard full, LoRA, and a program that attaches.

    python results/benchmarks/memory_and_nodes.py [--program NAME] [--fault PART OF A NAME]

Takes about 40 minutes, as root; it starts the test cluster itself, and writes after each row.
Losses are compared with those of an undisturbed run on four nodes: fp32, no dropout.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import load, parser, save

from slurmft.runs.rundir import RunDir
from tests.conftest import Following, records, slurmft
from tests.slurm.commands import assert_nodes_are_clean
from tests.support import control_group
from tests.support.cluster import Cluster
from tests.support.faults import hosts_of, steps_lost
from tests.support.models import write_reviews
from tests.support.small_memory import SMALL_MEMORY, write_model_without_dropout
from tests.train.test_own_task import EXAMPLE
from tests.train.test_resume import losses

_LIMIT_S = 900
BATCH = 6
"""Samples of a rank of four at a time."""
ATTACHES = """\
import sys, time
import torch
import slurmft

torch.manual_seed(3)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
total, most_rows = int(sys.argv[1]), int(sys.argv[2])
rows = int(sys.argv[3])
with slurmft.attach() as job:
    first = 1
    if latest := job.latest_checkpoint():
        state = torch.load(latest / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for n in range(first, total + 1):
        time.sleep(0.1)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        loss = 0.0
        for part in x.split(rows):
            if n > 60 and len(part) > most_rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            share = (model(part) - part.sum(1, keepdim=True)).square().sum() / len(x)
            share.backward()
            loss += share.item()
        optimizer.step()
        job.step(n, total=total, loss=loss)
        if job.should_stop() or job.checkpoint_due():
            with job.checkpoint(n) as folder:
                if folder:
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                                "step": n}, folder / "state.pt")
        if job.should_stop():
            break
    else:
        job.result(loss=loss)
"""
PROGRAMS = {
    "built-in": (),
    "--shard full": ("--shard", "full"),
    "LoRA": ("--lora", "4"),
    "attaches": None,
}
"""Name -> flags of the built-in training; None: a program of the user's own."""

Harm = Callable[["Trial", Following], None]


class Trial:
    """Runs of one program on the cluster, and the undisturbed one."""

    def __init__(self, cluster: Cluster, folder: Path, program: str) -> None:
        self.cluster = cluster
        self.program = program
        self.folder = folder / program.replace(" ", "-")
        self.folder.mkdir()
        self.blocker = ""
        (self.folder / "small.py").write_text(EXAMPLE + SMALL_MEMORY)
        (self.folder / "attaches.py").write_text(ATTACHES)
        write_reviews(self.folder / "data", train=720, validation=48)
        write_model_without_dropout(self.folder / "model")
        self.whole = self.start("whole", ("--nodes", "4"))
        self.end(self.whole)

    def start(
        self,
        name: str,
        flags: tuple[str, ...],
        options: tuple[str, ...] = (),
        most_rows: int = 8,
    ) -> Following:
        runs = (
            "--runs-dir",
            str(self.folder / name),
            "--time",
            "30",
            "--cpus-per-task",
            "1",
        )
        job = ("--checkpoint-every-steps", "25", *runs, *flags)
        own = PROGRAMS[self.program]
        environment = self.cluster.env | {"PYTHONPATH": str(self.folder)}
        mark = self.folder / "saved"
        mark.unlink(missing_ok=True)
        if own is None:
            script = (
                str(self.folder / "attaches.py"),
                "240",
                str(most_rows),
                "{halved:8}",
            )
            return _Own(*job, "--snapshot", "none", "--", *script, env=environment)
        sizes: tuple[str, ...] = (
            "--batch-size",
            str(BATCH),
            "--global-batch-size",
            str(4 * BATCH),
        )
        sizes += ("--eval-batch-size", "8")
        data = (
            "--data",
            str(self.folder / "data"),
            "--model",
            str(self.folder / "model"),
        )
        task: tuple[str, ...] = (
            "--task",
            "small:Small",
            *data,
            "--precision",
            "fp32",
            "--epochs",
            "8",
        )
        task += tuple(f"--task-option={option}" for option in options)
        place = os.getcwd()
        os.chdir(self.folder)  # the task is looked for here
        try:
            return Following(
                *task, *sizes, "--learning-rate", "1e-3", "--log-every", "1", *own, *job,
                env=environment,
            )  # fmt: skip
        finally:
            os.chdir(place)

    def end(self, job: Following) -> None:
        code, text = job.end(_LIMIT_S)
        assert code == 0, text
        assert_nodes_are_clean(self.cluster)

    def row(self, fault: Fault) -> dict[str, Any]:
        if fault.nodes_free is not None:
            self.take_a_node()
        with self.memory_of_a_node(fault.node_mib):
            job = self.start(
                fault.name.replace(" ", "-"),
                fault.flags,
                fault.options,
                fault.most_rows,
            )
            if fault.harm is not None:
                job.at_step(60)
                fault.harm(self, job)
            self.end(job)
        if fault.restores:
            self.restore()
        status = slurmft("status", str(job.run.path), "--json", env=self.cluster.env)
        facts = json.loads(status.out)
        # Slurm may requeue a job without a word to slurmft.
        in_allocation = sum(each.in_allocation for each in job.run.history())
        return {
            "fault": fault.name,
            "program": self.program,
            "attempts": job.run.attempt_number(),
            "queue_passages": job.run.attempt_number() - 1 - in_allocation,
            "steps_lost": steps_lost(job.run),
            "longest_pause_s": round(longest_pause_s(job.run), 1),
            "undisturbed_pause_s": round(longest_pause_s(self.whole.run), 1),
            "largest_difference": difference(job.run, self.whole.run),
            "ettr": (facts["time_use"] or {}).get("ettr"),
            "words": words(job.run),
        }

    # --- harm -------------------------------------------------------------------------------------

    def memory_of_a_node(
        self, mib: int | None
    ) -> contextlib.AbstractContextManager[None]:
        """Limits what all processes on the third node have; None: to nothing less."""
        if mib is None:
            return contextlib.nullcontext()
        slurmd = self.cluster.slurmd(self.cluster.hosts[2])
        return control_group.holding(slurmd, mib << 20)

    def kill_a_node(self, job: Following) -> None:
        self.dead_host = hosts_of(self.cluster, job)[2]
        self.cluster.kill_host(self.dead_host)

    def restore(self) -> None:
        self.cluster.wait_state(self.dead_host, "down*")
        self.cluster.start_slurmd(self.dead_host)
        self.cluster.wait_idle()

    def restore_and_wait(self, job: Following) -> None:
        """The node comes back, as the requeued job needs it."""
        self.kill_a_node(job)
        self.restore_node()

    def restore_node(self) -> None:
        self.cluster.wait_state(self.dead_host, "down*")
        self.cluster.start_slurmd(self.dead_host)

    def take_a_node(self) -> None:
        """Another job has one of the four nodes."""
        host = self.cluster.hosts[-1]
        words = ["sbatch", "--parsable", "--exclusive", f"--nodelist={host}"]
        words += ["--output=/dev/null", "--time=10", "--wrap", "sleep 600"]
        self.blocker = self.cluster.run(words).stdout.strip()

    def free_the_node(self, job: Following) -> None:
        self.cluster.run(["scancel", self.blocker])
        self.cluster.run(["scancel", "--signal=USR2", job.job_id])


class _Own(Following):
    command = "run"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row for each program."""

    name: str
    flags: tuple[str, ...] = ("--nodes", "4")
    options: tuple[str, ...] = ()
    most_rows: int = 8
    """Of the program that attaches: how many fit into memory."""
    harm: Harm | None = None
    restores: bool = False
    """A node is to be started again at the end."""
    nodes_free: int | None = None
    node_mib: int | None = None
    """Memory of the third node."""
    for_attaching: bool = True


FAULTS = (
    Fault(
        name="memory too small in training",
        options=("train_rows=3", "after=30"),
        most_rows=2,
    ),
    Fault(
        name="memory too small on one rank of four",
        options=("train_rows=3", "rank=2", "after=30"),
        for_attaching=False,
    ),
    Fault(
        name="memory of a host too small",
        options=("row_mib=80", "rank=2", "after=30"),
        node_mib=1024,
        for_attaching=False,
    ),
    Fault(
        name="memory too small in an evaluation",
        options=("evaluate_rows=3",),
        for_attaching=False,
    ),
    Fault(
        name="memory too small in the final save",
        options=("saves=1",),
        for_attaching=False,
    ),
    Fault(
        name="node down, with a spare one",
        flags=("--nodes", "3", "--spare-nodes", "1"),
        harm=Trial.kill_a_node,
        restores=True,
    ),
    Fault(
        name="node down, --nodes 2-4",
        flags=("--nodes", "2-4"),
        harm=Trial.kill_a_node,
        restores=True,
    ),
    Fault(name="node down, no spare one", harm=Trial.restore_and_wait),
    Fault(
        name="--nodes 2-4: three are free, then four",
        flags=("--nodes", "2-4"),
        harm=Trial.free_the_node,
        nodes_free=3,
    ),
)


def longest_pause_s(run: RunDir) -> float:
    """The longest time from one step to the next; evaluations are in it."""
    times = [float(record["time"]) for record in records(run, "step")]
    return max(later - earlier for earlier, later in pairwise(times))


def difference(run: RunDir, expected: RunDir) -> float:
    """The largest relative difference of a loss."""
    pairs = zip(losses(run), losses(expected), strict=True)
    return max(abs(ours - other) / abs(other) for ours, other in pairs)


def words(run: RunDir) -> list[str]:
    """What the user reads of it: failures, reasons of states, and warnings."""
    reasons = []
    for failure in run.all_failures():
        if not failure.secondary and failure.message not in reasons:
            reasons.append(failure.message)
    for each in run.history():
        # Of "running", the hosts.
        if each.reason and each.state != "running":
            reasons.append(each.reason)
    return reasons + [record["text"] for record in records(run, "warning")]


def main(program: str, part: str) -> None:
    rows = load("memory_and_nodes").get("rows", []) if program or part else []
    with tempfile.TemporaryDirectory() as name, Cluster(nodes=4) as cluster:
        os.environ.pop("SLURMFT_SITE", None)
        for each in PROGRAMS:
            if program not in ("", each):
                continue
            trial = Trial(cluster, Path(name), each)
            for fault in FAULTS:
                if part not in fault.name or (
                    PROGRAMS[each] is None and not fault.for_attaching
                ):
                    continue
                row = trial.row(fault)
                key = (row["fault"], row["program"])
                rows = [old for old in rows if (old["fault"], old["program"]) != key]
                rows.append(row)
                print(json.dumps(row), flush=True)
                save("memory_and_nodes", {"nodes": 4, "rows": rows})


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--program", choices=list(PROGRAMS), default="")
    arguments.add_argument("--fault", default="", metavar="PART OF A NAME")
    chosen = arguments.parse_args()
    main(chosen.program, chosen.fault)
