"""Jobs of many nodes on the test cluster: `python -m tests.lab.nodes 4 16 64`.

The batch script, the tasks, their connections and the door are slurmft's; the program imports no
torch, and no torchrun starts it (`roll_call.py`), so that 64 nodes fit on one machine. Times count
from the batch script's beginning.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.cluster.slurm.batch_script import inside_text
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.files import read_json
from slurmft.core.program import Program
from slurmft.core.run_files import FINAL_STATES
from slurmft.runs import log_times
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from tests.support import CHECKOUT
from tests.support.cluster import Cluster

HEAD = "nodes  connected: first, median, last   met: first, median, last       ended"


@dataclass(frozen=True)
class Times:
    """Seconds after the job's begin."""

    connected_s: list[float]
    """Each node's task, with the head's."""
    met_s: list[float]
    """Each rank's line that all have come."""
    ended_s: float

    def row(self) -> str:
        parts = [f"{len(self.met_s):>5}"]
        for values in (self.connected_s, self.met_s):
            parts.append(
                f"{min(values):8.1f} {statistics.median(values):8.1f} {max(values):8.1f}"
            )
        return "  ".join([*parts, f"{self.ended_s:8.1f}"])


def start(cluster: Cluster, nodes: int, runs_dir: Path, **settings: Any) -> RunDir:
    """Submits a roll call of so many nodes."""
    program = Program(
        kind="lab", name="roll-call", module="tests.lab.roll_call", settings=settings
    )
    job = JobConfig(
        nodes=nodes, cpus_per_task=1, requeue=False, rdzv_timeout_s=300, profile="cpu",
        runs_dir=str(runs_dir),
    )  # fmt: skip
    run = RunDir.create(RunConfig(program=program, job=job))
    text = inside_text(run.load_config(), run)
    script = run.submitit / "job.sh"
    script.write_text(text.replace("slurmft.node.task", "tests.lab.roll_call --task"))
    options = [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--time=15",
    ]
    options += [f"--output={run.submitit}/script.log"]
    environment = {"PYTHONPATH": str(CHECKOUT)}
    cluster.run(["sbatch", *options, str(script)], env=environment)
    return run


def await_end(run: RunDir, limit_s: float = 500) -> str:
    """The final state."""
    deadline = time.monotonic() + limit_s
    while (state := str(run.get_state().state)) not in FINAL_STATES:
        assert time.monotonic() < deadline, run.get_state()
        time.sleep(0.2)
    return state


def times(run: RunDir) -> Times:
    began = float((read_json(run.attempt) or {})["time"])

    def after(pattern: str, text: str) -> list[float]:
        """When the processes that write these logs said so."""
        lines = [
            x
            for p in sorted(run.logs.glob(pattern))
            for x in p.read_text().splitlines()
        ]
        return [
            (log_times.split(x)[0] or 0.0) - began for x in lines if re.search(text, x)
        ]

    ended_s = float(run.get_state().time) - began
    return Times(
        after("node-*.log", "^.*node .* on"), after("rank-*.log", "has met"), ended_s
    )


def main() -> None:
    counts, rows = [int(word) for word in sys.argv[1:]], [HEAD]
    folder = Path(tempfile.mkdtemp(prefix="slurmft-nodes-"))
    with Cluster(nodes=max(counts), cpus_per_node=1) as cluster:
        for nodes in counts:
            run = start(cluster, nodes, folder)
            state = await_end(run)
            assert state == "finished", (run.path, run.get_state())
            rows.append(times(run).row())
            rows += [
                f"       preflight: {each['text']}"
                for each in RecordReader(run.records).read_values("preflight")
            ]
            cluster.wait_idle(120)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
