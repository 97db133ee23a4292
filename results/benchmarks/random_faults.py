"""What is left of runs that suffer random faults, one a minute, on a real Slurm of four nodes?

    python results/benchmarks/random_faults.py [--minutes 60] [--every-s 60] [--seed 0] [--runs 1]
        [-- FLAGS]

Takes the minutes, and about half of them for the undisturbed run before, as root; it starts the
test cluster itself. Losses, metrics and weights must be those of the undisturbed run, bit by bit.
Several runs share the nodes, and have fewer steps. A run that has failed is resumed, as its user
would do. FLAGS are those of `slurmft submit` in place of `--nodes 3 --spare-nodes 1`.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import parser, save

from slurmft.core.errors import Exit
from tests.conftest import Following, records, slurmft
from tests.slurm.commands import assert_nodes_are_clean
from tests.support.cluster import Cluster
from tests.support.faults import hosts_of, steps_lost
from tests.support.models import write_emotion, write_model
from tests.support.small_disk import SmallDisk, fill
from tests.train.test_resume import assert_same, pids, rank_pids

FLAGS = ["--nodes", "3", "--spare-nodes", "1"]
RUN = (
    *("--precision", "fp32", "--learning-rate", "1e-4", "--batch-size", "4"),
    *("--eval-batch-size", "64", "--cpus-per-task", "1", "--log-every", "10"),
    *("--checkpoint-every-steps", "200", "--hang-timeout-s", "30", "--time", "60"),
)
TRIAL_EPOCHS = 20
"""Of the runs that say how many epochs take the minutes."""
SHARE = 0.5
"""Of the minutes that the same steps take without faults."""
AWAY_S = 20
"""How long a network, a disk, a controller or a daemon is away."""
PIPE_BYTES = 1 << 20
"""Nobody reads what the followers print before the end; it must not keep them from looking."""

Harm = Callable[[Cluster, Following, random.Random], None]


def kill_rank(cluster: Cluster, job: Following, draw: random.Random) -> None:
    os.kill(draw.choice(rank_pids(job.run)), signal.SIGKILL)


def stop_rank(cluster: Cluster, job: Following, draw: random.Random) -> None:
    os.kill(draw.choice(rank_pids(job.run)), signal.SIGSTOP)


def kill_torchrun(cluster: Cluster, job: Following, draw: random.Random) -> None:
    os.kill(draw.choice(pids(job.run, "slurmft.node.torchrun")), signal.SIGKILL)


def kill_task(cluster: Cluster, job: Following, draw: random.Random) -> None:
    os.kill(draw.choice(pids(job.run, "slurmft.node.task")), signal.SIGKILL)


def kill_batch_script(cluster: Cluster, job: Following, draw: random.Random) -> None:
    """Its step alone: srun and the tasks do not belong to it."""
    script = f"/job{int(job.job_id):05}/slurm_script"
    found = []
    for host in hosts_of(cluster, job):
        found += [pid for pid, line in cluster.processes(host) if script in line]
    os.kill(draw.choice(found), signal.SIGKILL)


def cut_network(cluster: Cluster, job: Following, draw: random.Random) -> None:
    host = draw.choice(cluster.hosts)
    cluster.link(host, up=False)
    time.sleep(AWAY_S)
    cluster.link(host, up=True)


def cut_power(cluster: Cluster, job: Following, draw: random.Random) -> None:
    host = draw.choice(cluster.hosts)
    cluster.kill_host(host)
    time.sleep(AWAY_S)
    cluster.start_slurmd(host)


def kill_slurmd(cluster: Cluster, job: Following, draw: random.Random) -> None:
    host = draw.choice(cluster.hosts)
    cluster.kill_slurmd(host)
    time.sleep(AWAY_S)
    cluster.start_slurmd(host)


def fill_disk(cluster: Cluster, job: Following, draw: random.Random) -> None:
    ballast = fill(job.run.path.parent)
    time.sleep(AWAY_S)
    ballast.unlink()


def restart_controller(cluster: Cluster, job: Following, draw: random.Random) -> None:
    cluster.restart_slurmctld(away_s=AWAY_S)


def preempt(cluster: Cluster, job: Following, draw: random.Random) -> None:
    command = ["sbatch", "--partition=urgent", f"--nodes={len(cluster.hosts)}"]
    command += ["--exclusive", "--time=1", "--output=/dev/null", "--wrap", "sleep 5"]
    cluster.run(command)


HARMS: dict[str, Harm] = {
    "SIGKILL of a rank": kill_rank,
    "SIGSTOP of a rank": stop_rank,
    "SIGKILL of a torchrun": kill_torchrun,
    "SIGKILL of a node's task": kill_task,
    "SIGKILL of the batch script": kill_batch_script,
    f"network of a node cut for {AWAY_S} s": cut_network,
    f"power of a node cut for {AWAY_S} s": cut_power,
    f"slurmd away for {AWAY_S} s": kill_slurmd,
    f"disk full for {AWAY_S} s": fill_disk,
    f"slurmctld away for {AWAY_S} s": restart_controller,
    "preemption": preempt,
}


def last_step(job: Following) -> int:
    return max((r["step"] for r in records(job.run, "step")), default=0)


def _widen_pipe(job: Following) -> None:
    assert job.process.stdout is not None
    fcntl.fcntl(job.process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


class _Resumed(Following):
    command = "resume"


class Disturbed:
    """Runs that suffer faults at the same time."""

    def __init__(self, jobs: list[Following]) -> None:
        self.jobs = jobs
        """The last job of each run."""
        self.faults: list[dict[str, Any]] = []
        self.resumed: list[dict[str, Any]] = []

    def living(self) -> list[int]:
        """Returns the numbers of the runs that have not finished."""
        numbers = range(len(self.jobs))
        return [n for n in numbers if not self.jobs[n].run.result.exists()]

    def resume_failed(self, cluster: Cluster) -> None:
        """Resumes each run whose job has ended without a result, as its user would."""
        for number in self.living():
            job = self.jobs[number]
            if job.process.poll() is None or job.run.result.exists():
                continue
            code, text = job.end()
            state = job.run.get_state()
            entry = {"run": number, "code": code, "reason": state.reason}
            self.resumed.append(entry)
            print(f"{'':11}resumed: {entry}", flush=True)
            assert code != Exit.OK, text
            self.jobs[number] = _Resumed(str(job.run.path), env=cluster.env)
            _widen_pipe(self.jobs[number])


class Trial:
    """The undisturbed run and the disturbed ones, on one cluster."""

    def __init__(self, cluster: Cluster, folder: Path, flags: list[str]) -> None:
        self.cluster = cluster
        self.folder = folder
        model = write_model(folder / "model")
        data = write_emotion(folder / "data", train=400, validation=67)
        source = ("--task", "emotion", "--data", str(data), "--model", str(model))
        self.flags = (*RUN, *source, *flags)

    def start(self, runs: Path, epochs: int) -> Following:
        flags = ("--epochs", str(epochs), "--runs-dir", str(runs))
        return Following(*self.flags, *flags, env=self.cluster.env)

    def undisturbed(self, epochs: int, count: int = 1) -> tuple[Following, float]:
        """Runs several runs at once; returns the first, and the seconds from its first step to its
        end."""
        folder = self.folder / f"undisturbed-{epochs}"
        jobs = [self.start(folder / str(number), epochs) for number in range(count)]
        for job in jobs:
            code, text = job.end(7200)
            assert code == Exit.OK, text
        run = jobs[0].run
        (first, *_), result = records(run, "step"), run.result
        return jobs[0], result.stat().st_mtime - float(first["time"])

    def disturbed(
        self, runs: Path, epochs: int, every_s: float, seed: int, count: int
    ) -> Disturbed:
        """Runs several runs at once, one of which suffers a fault at a time, until all have
        finished."""
        draw = random.Random(seed)
        folders = [runs / str(number) for number in range(count)]
        found = Disturbed([self.start(folder, epochs) for folder in folders])
        for job in found.jobs:
            _widen_pipe(job)
        began = time.monotonic()
        next_at = began
        while True:
            # At a random moment, on average once in this time.
            next_at += draw.uniform(0.2, 1.8) * every_s
            while time.monotonic() < next_at and found.living():
                found.resume_failed(self.cluster)
                time.sleep(1)
            living = found.living()
            if not living:
                return found
            number = draw.choice(living)
            job = found.jobs[number]
            name = draw.choice(list(HARMS))
            step = last_step(job)
            is_done = self.harm(name, job, draw)
            found.faults.append(
                {"fault": name, "run": number, "step": step, "is_done": is_done}
            )
            minutes = (time.monotonic() - began) / 60
            nobody = "" if is_done else "  nobody there"
            print(
                f"{minutes:6.1f} min  run {number}  step {step:6}  {name}{nobody}",
                flush=True,
            )

    def harm(self, name: str, job: Following, draw: random.Random) -> bool:
        """Does a fault; False: the run has no process that could suffer it, as between two
        attempts."""
        try:
            HARMS[name](self.cluster, job, draw)
        except (IndexError, ProcessLookupError):
            return False
        return True


def main(
    minutes: float, every_s: float, seed: int, count: int, flags: list[str]
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(nodes=4) as cluster,
        SmallDisk(Path(folder, "disk"), 48 * count) as disk,
    ):
        os.environ.pop("SLURMFT_SITE", None)
        trial = Trial(cluster, Path(folder), flags)
        _, trial_s = trial.undisturbed(TRIAL_EPOCHS, count)
        epochs = round(TRIAL_EPOCHS * SHARE * minutes * 60 / trial_s)
        expected, undisturbed_s = trial.undisturbed(epochs)
        print(
            f"undisturbed: {last_step(expected)} steps, {undisturbed_s:.0f} s",
            flush=True,
        )
        began = time.monotonic()
        disturbed = trial.disturbed(disk, epochs, every_s, seed, count)
        for job in disturbed.jobs:
            code, text = job.end()
            assert code == Exit.OK, text
        disturbed_s = time.monotonic() - began
        assert_nodes_are_clean(cluster)
        faults = disturbed.faults
        runs = []
        for job in disturbed.jobs:
            assert_same(job.run, expected.run)
            status = slurmft("status", str(job.run.path), "--json", env=cluster.env)
            runs.append(
                {
                    "records_lost": steps_lost(job.run),
                    "attempts": job.run.attempt_number(),
                    "time_use": json.loads(status.out)["time_use"],
                }
            )
        values = {
            "flags": flags,
            "seed": seed,
            "every_s": every_s,
            "steps": last_step(expected),
            "undisturbed_s": round(undisturbed_s),
            "disturbed_s": round(disturbed_s),
            "runs": runs,
            "resumed": disturbed.resumed,
            "counts": Counter(each["fault"] for each in faults if each["is_done"]),
            "faults": faults,
            "equal_to_undisturbed": True,
        }
        print(json.dumps(values | {"faults": len(faults)}, indent=1))
        name = "random_faults"
        if count > 1:
            name += "_at_once"
        save(name, values)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=60)
    arguments.add_argument("--every-s", type=float, default=60)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--runs", type=int, default=1, help="at once")
    arguments.add_argument("flags", nargs="*", default=FLAGS, metavar="FLAGS")
    chosen = arguments.parse_args()
    main(chosen.minutes, chosen.every_s, chosen.seed, chosen.runs, chosen.flags)
