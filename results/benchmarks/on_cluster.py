"""What does `--on` cost, against the same command typed on the login node?

    python results/benchmarks/on_cluster.py [--rounds N]     # 3 minutes

A real sshd on this machine, without a network's latency; a stand-in for sbatch answers at once.
Interleaved rounds; medians. The folder that `run` sends has 200 files.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import REPOSITORY, parser, save

SUBMIT = ("submit", "--nodes", "2", "--time", "5")
RUN = ("run", "--nodes", "2", "--time", "5", "--", "train.py")
ON = ("--on", "lab")


def main(rounds: int) -> None:
    from tests.support.sshd import Sshd

    with tempfile.TemporaryDirectory() as name, Sshd(Path(name)) as sshd:
        folder = Path(name)
        environment = prepare(folder, sshd.ssh)
        times: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for title, words in commands().items():
                if "first" in title:
                    sshd.cut()
                    time.sleep(0.2)
                seconds = wall_s([*words], folder / "project", environment)
                if number:  # the first round fills the disk cache, and compiles modules
                    times.setdefault(title, []).append(seconds)
    medians = {
        title: round(statistics.median(each), 3) for title, each in times.items()
    }
    for title, seconds in medians.items():
        print(f"{title:<34} {seconds:6.2f} s")
    save("on_cluster", {"rounds": rounds, "median_s": medians, "all_s": times})


def commands() -> dict[str, tuple[str, ...]]:
    return {
        "submit, on the login node": SUBMIT,
        "submit --on, first connection": (*ON, *SUBMIT),
        "submit --on, connection kept": (*ON, *SUBMIT),
        "run, on the login node": RUN,
        "run --on, first connection": (*ON, *RUN),
        "run --on, connection kept": (*ON, *RUN),
    }


def prepare(folder: Path, ssh: str) -> dict[str, str]:
    """A project, clusters.toml, and a stand-in for Slurm; returns the environment."""
    (folder / "project").mkdir()
    (folder / "project" / "train.py").write_text("print('hello')\n")
    for number in range(200):
        (folder / "project" / f"module_{number}.py").write_text(
            f"VALUE = {number}\n" * 100
        )
    (folder / "bin").mkdir()
    for name, answer in {
        "sbatch": "Submitted batch job 7",
        "squeue": "",
        "sinfo": "",
    }.items():
        file = folder / "bin" / name
        file.write_text(f"#!/bin/sh\nprintf %s {shlex.quote(answer)}\n")
        file.chmod(0o755)
    (folder / "bin" / "srun").symlink_to("sbatch")
    path = f"{folder}/bin:{os.environ['PATH']}"
    setup = [
        f"export PATH={shlex.quote(path)} PYTHONPATH={REPOSITORY} SLURM_CLUSTER_NAME=x"
    ]
    (folder / "clusters.toml").write_text(
        f"[lab]\nssh = {json.dumps(ssh)}\nfolder = '{folder}/there'\n"
        f"python = '{sys.executable}'\nsetup = {json.dumps(setup)}\n"
    )
    own = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "SLURM_CLUSTER_NAME": "x"}
    own |= {
        "SLURMFT_CLUSTERS": f"{folder}/clusters.toml",
        "XDG_STATE_HOME": f"{folder}/state",
    }
    return os.environ | own | {"XDG_RUNTIME_DIR": f"{folder}/x", "HOME": str(folder)}


def wall_s(words: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Seconds of a slurmft command."""
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "slurmft", *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=120,
    )
    return time.monotonic() - start


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    main(arguments.parse_args().rounds)
