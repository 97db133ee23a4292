"""How long is it from job start to the first line of a program of one's own, by `slurmft run`,
against a bare `srun`? A real Slurm of four nodes, interleaved runs, the program prints the time.

    python -m tests.support.cluster up 4 && eval "$(python -m tests.support.cluster env)"
    python results/benchmarks/own_program_start.py [--rounds ROUNDS]

By torchrun: against `srun torchrun`. Once a node: against `srun python`. And on the login node, how
long `slurmft run --dry-run` takes, against an interpreter that does nothing.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import call, parser, save

NODES = 4
HEAD = """\
#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --cpus-per-task=1 --time=5 --output=/dev/null
date +%s.%N > {start}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
"""
TORCHRUN = """\
OMP_NUM_THREADS=1 srun {python} -m torch.distributed.run --nnodes {nodes} --nproc-per-node 1 \\
  --rdzv-backend c10d --rdzv-endpoint "$head:29411" --rdzv-id "$SLURM_JOB_ID" {program}
"""
PLAIN = "srun {python} {program}\n"
PROGRAM = """\
import os, sys, time
name = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
open(os.path.join(os.path.dirname(__file__), "line-" + name), "w").write(repr(time.time()))
"""


def main(rounds: int) -> None:
    seconds: dict[str, list[float]] = {}
    cases = {"torchrun": TORCHRUN, "node": PLAIN}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds + 1):
            for per, text in cases.items():
                for who in ("srun", "slurmft"):
                    folder = Path(name) / f"{number}-{per}-{who}"
                    took = started(folder, per, text if who == "srun" else None)
                    print(f"round {number} {per:8} {who:8} {took:6.2f} s", flush=True)
                    if number:  # the first round fills the disk cache
                        seconds.setdefault(f"{per}, {who}", []).append(took)
        login = [login_s(Path(name)) for _ in range(2 * rounds + 1)]
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ratios = [ours / bare for ours, bare in zip(
        seconds["torchrun, slurmft"], seconds["torchrun, srun"], strict=True)]  # fmt: skip
    more = [ours - bare for ours, bare in zip(
        seconds["node, slurmft"], seconds["node, srun"], strict=True)]  # fmt: skip
    times = statistics.median(ours / bare for ours, bare in login)
    print(f"medians {medians}")
    print(f"by torchrun {statistics.median(ratios):.2f} times")
    print(f"once a node {statistics.median(more):.2f} s more")
    print(f"on the login node as long as {times:.1f} interpreters")
    save("own_program_start", {
        "nodes": NODES, "seconds": seconds, "median_s": medians, "torchrun_ratios": ratios,
        "node_more_s": more, "login_s": login, "login_interpreters": times,
    })  # fmt: skip


def started(folder: Path, per: str, text: str | None) -> float:
    """Seconds from the batch script's first line to the last node's first line."""
    folder.mkdir()
    program, start = folder / "program.py", folder / "start"
    program.write_text(PROGRAM)
    if text is None:
        flags = [
            "--runs-dir",
            str(folder / "runs"),
            "--nodes",
            str(NODES),
            "--time",
            "5",
        ]
        flags += ["--cpus-per-task", "1", "--per", per, "--snapshot", "none"]
        flags += ["--setup", f"date +%s.%N > {shlex.quote(str(start))}"]
        command = [
            sys.executable,
            "-m",
            "slurmft",
            "run",
            "--follow",
            *flags,
            "--",
            str(program),
        ]
        call(*command, timeout_s=300)
    else:
        script = folder / "job.sh"
        script.write_text((HEAD + text).format(
            nodes=NODES, start=start, python=shlex.quote(sys.executable), program=program,
        ))  # fmt: skip
        call("sbatch", "--wait", str(script), timeout_s=300)
    time.sleep(1)  # the nodes end their epilogs
    lines = [float(path.read_text()) for path in folder.glob("line-*")]
    assert len(lines) == NODES, lines
    return max(lines) - float(start.read_text())


def login_s(folder: Path) -> tuple[float, float]:
    """Seconds of a dry run, and of an interpreter."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    found = []
    env = os.environ | {"PYTHONSAFEPATH": "1"}
    ours = [sys.executable, "-m", "slurmft", "run", "--dry-run", "--cluster", "local"]
    for command in (
        [*ours, "--snapshot", "none", "--", str(program)],
        [sys.executable, "-c", ""],
    ):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, timeout=60, env=env)
        found.append(time.perf_counter() - began)
    return found[0], found[1]


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=4)
    main(**vars(arguments.parse_args()))
