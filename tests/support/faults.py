"""What clusters do to runs: each fault of the fault table, as a function that does the harm.

Used by the tests, and by results/benchmarks/faults.py, which measures what each costs.
"""

from __future__ import annotations

import collections
import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmft.node import heartbeat
from slurmft.runs.rundir import RunDir
from tests.conftest import Following, records
from tests.support import PATIENCE_S, until
from tests.support.cluster import Cluster
from tests.support.small_disk import fill
from tests.train.test_resume import held, pids, rank_pids

Harm = Callable[[Cluster, Following], None]

BASE = (
    *(
        "--precision",
        "fp32",
        "--log-every",
        "1",
        "--learning-rate",
        "1e-3",
        "--batch-size",
        "2",
    ),
    *("--eval-batch-size", "8", "--cpus-per-task", "1", "--nodes", "2", "--time", "10"),
)
"""Dropout stays on: the random generators must come back, too."""
EVERY = 25
"""Steps between checkpoints."""
CHECKPOINTS = ("--checkpoint-every-steps", str(EVERY))
SHORT_STOP = (*CHECKPOINTS, "--stop-lead-s", "6")
"""A stop's save is not tried for long."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One line of the fault table."""

    name: str
    harm: Harm
    flags: tuple[str, ...] = ()
    signalled: bool = False
    """The ranks are told before: no step may be lost."""
    attempts: int = 2
    """Starts of the job that it takes; 1: the job itself survives."""
    after: str = "step 60/"
    """The line of progress after which the harm is done."""
    check: Callable[[RunDir], None] | None = None
    """What else must be there at the end."""
    needs_slurm: bool = True
    """Else any job suffers it, and the harm does not look at the cluster."""
    slow: bool = False
    """Takes more than a minute: left to results/benchmarks/faults.py."""


def hosts_of(cluster: Cluster, job: Following) -> list[str]:
    """The hosts of a running job, its head first."""
    names = cluster.run(["squeue", "-hj", job.job_id, "-o", "%N"]).stdout.strip()
    return cluster.run(["scontrol", "show", "hostnames", names]).stdout.split()


def processes(cluster: Cluster, host: str, module: str) -> list[int]:
    """Processes on a host that run this module of slurmft."""
    found = cluster.processes(host)
    return [
        pid for pid, line in found if f"-m {module} " in line.split("--module")[0] + " "
    ]


def of_last_host(cluster: Cluster, job: Following, module: str) -> int:
    return processes(cluster, hosts_of(cluster, job)[-1], module)[0]


def preempt(cluster: Cluster, job: Following) -> None:
    """A job of a higher partition takes all nodes, for two seconds."""
    command = [
        "sbatch",
        "--partition=urgent",
        f"--nodes={len(cluster.hosts)}",
        "--exclusive",
    ]
    cluster.run([*command, "--time=1", "--output=/dev/null", "--wrap", "sleep 2"])


def scancel_signal(cluster: Cluster, job: Following) -> None:
    cluster.run(["scancel", "--signal=TERM", job.job_id])


def admin_requeue(cluster: Cluster, job: Following) -> None:
    cluster.run(["scontrol", "requeue", job.job_id])


def kill_rank(cluster: object, job: Following) -> None:
    os.kill(rank_pids(job.run)[-1], signal.SIGKILL)


def kill_torchrun(cluster: Cluster, job: Following) -> None:
    os.kill(of_last_host(cluster, job, "slurmft.node.torchrun"), signal.SIGKILL)


def stop_rank(cluster: object, job: Following) -> None:
    os.kill(rank_pids(job.run)[-1], signal.SIGSTOP)


def kill_slurmd(cluster: Cluster, job: Following) -> None:
    """slurmd of the last node dies; it comes back when the job has been requeued.

    The ranks are held meanwhile: these runs are shorter than it takes Slurm to notice. Those on the
    last node go on as in life, in a job that Slurm has given up.
    """
    host = hosts_of(cluster, job)[-1]
    with held(rank_pids(job.run)):
        cluster.kill_slurmd(host)
        cluster.wait_state(host, "down*")
    cluster.start_slurmd(host)


def cut_network(cluster: Cluster, job: Following) -> None:
    """The last node's cable is pulled, and plugged in again when Slurm has called it down."""
    host = hosts_of(cluster, job)[-1]
    cluster.link(host, up=False)
    try:
        cluster.wait_state(host, "down*")
    finally:
        cluster.link(host, up=True)


def kill_host(cluster: Cluster, job: Following) -> None:
    """The last node loses its power."""
    host = hosts_of(cluster, job)[-1]
    cluster.kill_host(host)
    cluster.wait_state(host, "down*")
    cluster.start_slurmd(host)


def restart_slurmctld(cluster: Cluster, job: Following) -> None:
    cluster.restart_slurmctld()


def flip_byte(cluster: object, job: Following) -> None:
    """A byte of the newest checkpoint changes on the disk, and a rank dies."""
    _damage(job.run, flip=True)
    kill_rank(cluster, job)


def truncate(cluster: object, job: Following) -> None:
    """The newest checkpoint loses its end, and a rank dies."""
    _damage(job.run, flip=False)
    kill_rank(cluster, job)


def _damage(run: RunDir, flip: bool) -> None:
    """Stops the ranks meanwhile, so that no newer checkpoint comes in between."""
    with held(rank_pids(run)):
        file = run.checkpoints / run.checkpoint_names()[-1] / "optimizer.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data if flip else data[: len(data) // 2])


def kill_during_save(cluster: object, job: Following) -> None:
    """The main rank dies while a checkpoint is half written."""
    ranks = rank_pids(job.run)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if list(job.run.checkpoints.glob(".step-*/model.safetensors")):
            with held(ranks):
                if list(job.run.checkpoints.glob(".step-*")):
                    for pid in ranks:
                        os.kill(pid, signal.SIGKILL)
                    return
        time.sleep(0.0005)
    raise AssertionError("no save was caught half way")


def fill_disk(cluster: object, job: Following) -> None:
    """The file system of the run is full while two checkpoints are due, then has room again."""
    ballast = fill(job.run.path.parent)
    goal = furthest_step(job.run) + 2 * EVERY
    # they cannot tell it otherwise
    until(lambda: furthest_step(job.run) >= goal, every_s=0.05)
    ballast.unlink()


def stop_on_full_disk(cluster: Cluster, job: Following) -> None:
    """The job is to stop while the disk takes nothing: neither a checkpoint nor a word."""
    ballast = fill(job.run.path.parent)
    # A save that was under way fails, and gives its room back: enough for a word.
    until(lambda: not list(job.run.checkpoints.glob(".step-*")), every_s=0.05)
    fill(job.run.path.parent)
    try:
        scancel_signal(cluster, job)
        _await_queued(cluster, job)
        recorded = job.run.get_state()
        assert recorded.state == "running", recorded  # nothing could be recorded
    finally:
        ballast.unlink()


def _await_queued(cluster: Cluster, job: Following) -> None:
    command = ["squeue", "-hj", job.job_id, "-o", "%T"]
    until(lambda: "PENDING" in cluster.run(command).stdout)


def hang_up(cluster: Cluster, job: Following) -> None:
    """SIGHUP to the batch script."""
    cluster.run(["scancel", "--batch", "--signal=HUP", job.job_id])


def furthest_step(run: RunDir) -> int:
    """The optimizer step that the ranks of a run have reached, by the heartbeats on their nodes."""
    paths = [path for pid in pids(run, "slurmft.node.task") for path in heartbeats(pid)]
    beats = map(heartbeat.read, paths)
    return max((beat.step for beat in beats if beat), default=0)


def heartbeats(task: int) -> list[Path]:
    """The heartbeat files of a node's task, which may have a /dev/shm and process ids of its own;
    none if it has ended."""
    try:
        status = Path(f"/proc/{task}/status").read_text()
    except OSError:
        return []
    (own_pid,) = (
        line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")
    )
    return list(
        Path(f"/proc/{task}/root/dev/shm").glob(f"slurmft-*-{own_pid}-*/beat-*")
    )


def shows_where_it_hung(run: RunDir) -> None:
    """The stacks of all ranks, and which one was stopped."""
    stacks = [run.stacks(rank).read_text() for rank in (0, 1)]
    assert any("state T" in text and "the kernel reports" in text for text in stacks)
    assert any("Thread" in text and "trainer.py" in text for text in stacks)
    words = [f.message for f in run.all_failures() if not f.secondary]
    assert any("hangs: no step for" in text and "SIGSTOP" in text for text in words)
    assert any(
        "has waited" in text and text.endswith("is stopped") for text in words
    ), words


FAULTS = [
    Fault(name="preemption by a higher partition", harm=preempt, signalled=True),
    Fault(name="scancel --signal=TERM", harm=scancel_signal, signalled=True),
    Fault(
        name="scontrol requeue by an administrator",
        harm=admin_requeue,
        flags=CHECKPOINTS,
    ),
    Fault(
        name="SIGKILL of a rank",
        harm=kill_rank,
        needs_slurm=False,
        flags=CHECKPOINTS,
        attempts=1,
    ),
    Fault(
        name="SIGKILL of torchrun on one node", harm=kill_torchrun, flags=CHECKPOINTS
    ),
    Fault(
        name="SIGSTOP of a rank",
        harm=stop_rank,
        needs_slurm=False,
        flags=(*CHECKPOINTS, "--hang-timeout-s", "4"),
        check=shows_where_it_hung,
    ),
    Fault(
        name="slurmd killed (node DOWN)", harm=kill_slurmd, flags=CHECKPOINTS, slow=True
    ),
    Fault(
        name="network of a node cut and restored",
        harm=cut_network,
        flags=CHECKPOINTS,
        slow=True,
    ),
    Fault(name="power of a node cut", harm=kill_host, flags=CHECKPOINTS),
    Fault(name="slurmctld restarted", harm=restart_slurmctld, attempts=1),
    Fault(
        name="byte of the newest checkpoint flipped",
        harm=flip_byte,
        needs_slurm=False,
        flags=CHECKPOINTS,
        attempts=1,
    ),
    Fault(
        name="newest checkpoint truncated",
        harm=truncate,
        needs_slurm=False,
        flags=CHECKPOINTS,
        attempts=1,
    ),
    Fault(
        name="SIGKILL during a save",
        harm=kill_during_save,
        needs_slurm=False,
        flags=("--checkpoint-every-steps", "5"),
        attempts=1,
    ),
    Fault(
        name="disk full during a save",
        harm=fill_disk,
        needs_slurm=False,
        flags=CHECKPOINTS,
        attempts=1,
    ),
    Fault(
        name="disk full when the stop comes", harm=stop_on_full_disk, flags=SHORT_STOP
    ),
    Fault(
        name="SIGHUP to the batch script", harm=hang_up, flags=CHECKPOINTS, attempts=1
    ),
]


def steps_lost(run: RunDir) -> int:
    """Steps that were done again."""
    steps = [r["step"] for r in records(run, "step")]
    return len(steps) - len(set(steps))


def furthest_again(run: RunDir) -> int:
    """The furthest step that was done twice, or 0."""
    times = collections.Counter(r["step"] for r in records(run, "step"))
    return max((step for step, n in times.items() if n > 1), default=0)


def recovery_s(run: RunDir, since: float) -> float:
    """The longest time without a step after a moment (Unix): from the harm, or from the stop that
    followed it, until training went on."""
    times = [r["time"] for r in records(run, "step")]
    later = [max(t for t in times if t <= since), *(t for t in times if t > since)]
    return max(float(b - a) for a, b in itertools.pairwise(later))
