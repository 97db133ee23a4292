"""How long is it from job start to the first training step, against a bare `srun torchrun` script
that trains the same model (first_step_baseline.py)? A real Slurm of four nodes, interleaved runs.

    python -m tests.support.cluster up 4 && eval "$(python -m tests.support.cluster env)"
    python results/benchmarks/first_step.py EMOTION_DIR [--rounds ROUNDS]

And without Slurm: README's first command, in other source trees (git worktrees) and this one, in
turn. On a busy machine read the processor seconds.

    python results/benchmarks/first_step.py --against TREE [TREE ...] [--rounds ROUNDS]
"""

from __future__ import annotations

import contextlib
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from harness import REPOSITORY, call, encoder, parser, records, save, submit

NODES, BATCH_SIZE = 4, 16
BARE = """\
#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --cpus-per-task=1 --time=5 --output={log}
date +%s.%N > {start}
export OMP_NUM_THREADS=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {python} -m torch.distributed.run --nnodes {nodes} --nproc-per-node 1 \\
  --rdzv-backend c10d --rdzv-endpoint "$head:29411" --rdzv-id "$SLURM_JOB_ID" \\
  {script} {data} {model} {batch_size}
"""


def main(data: Path, rounds: int) -> None:
    seconds: dict[str, list[float]] = {"bare": [], "slurmft": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name, run in (("bare", run_bare), ("slurmft", run_slurmft)):
                found = run(Path(folder) / f"{name}-{number}", data)
                time.sleep(1)  # the nodes end their epilogs
                print(f"round {number} {name:8} {found:6.2f} s", flush=True)
                if number:  # the first round fills the disk cache
                    seconds[name].append(found)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ratios = [
        ours / bare
        for ours, bare in zip(seconds["slurmft"], seconds["bare"], strict=True)
    ]
    print(f"medians {medians}, ratio pair by pair {statistics.median(ratios):.2f}")
    save("first_step", {
        "nodes": NODES, "seconds": seconds, "median_s": medians,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 3),
    })  # fmt: skip


def run_bare(folder: Path, data: Path) -> float:
    folder.mkdir()
    script, log, start = folder / "job.sh", folder / "log", folder / "start"
    script.write_text(
        BARE.format(
            nodes=NODES, log=log, start=start, python=shlex.quote(sys.executable),
            script=Path(__file__).with_name("first_step_baseline.py"), data=data / "train.jsonl",
            model=encoder(), batch_size=BATCH_SIZE,
        )
    )  # fmt: skip
    call("sbatch", "--wait", str(script), timeout_s=300)
    line = next(
        x for x in log.read_text().splitlines() if x.startswith("first step done")
    )
    return float(line.split()[3]) - float(start.read_text())


def run_slurmft(folder: Path, data: Path) -> float:
    folder.mkdir()
    start = folder / "start"
    run = submit(
        folder,
        *("--nodes", str(NODES), "--task", "emotion", "--data", str(data)),
        *(
            "--model",
            str(encoder()),
            "--batch-size",
            str(BATCH_SIZE),
            "--cpus-per-task",
            "1",
        ),
        *("--time", "5", "--precision", "bf16", "--max-steps", "1", "--log-every", "1"),
        *("--setup", f"date +%s.%N > {start}"),
        timeout_s=300,
    )
    return float(records(run, "step")[0]["time"]) - float(start.read_text())


def compare_trees(trees: list[Path], rounds: int) -> None:
    """Seconds from the command to the first step, and the processor seconds of all processes."""
    found: dict[str, list[dict[str, float]]] = {tree.name: [] for tree in trees}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for tree in trees:
                runs = Path(folder) / f"{tree.name}-{number}"
                seconds = run_locally(tree, runs)
                words = "  ".join(f"{k} {v:6.2f}" for k, v in seconds.items())
                print(f"round {number} {tree.name:20} {words}", flush=True)
                if number:  # the first round compiles modules
                    found[tree.name].append(seconds)
    medians = {
        name: {k: round(statistics.median(s[k] for s in rows), 2) for k in rows[0]}
        for name, rows in found.items()
    }
    print(f"medians {medians}")
    save("first_step_local", {"rounds": found, "median": medians})


def run_locally(tree: Path, runs: Path) -> dict[str, float]:
    """One run of two simulated nodes, of two steps, by the code of a tree."""
    runs.mkdir()
    mark = f"FIRST_STEP={uuid.uuid4()}"
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    name, _, value = mark.partition("=")
    command = [
        sys.executable,
        "-m",
        "slurmft.submit",
        "--cluster",
        "local",
        "--nodes",
        "2",
    ]
    command += [
        "--follow",
        "--runs-dir",
        str(runs),
        "--max-steps",
        "2",
        "--log-every",
        "1",
    ]
    began = time.time()
    running = subprocess.Popen(
        command, env=kept | {"PYTHONPATH": str(tree), name: value}, cwd=tree,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    while not (steps := first_steps(runs)):
        assert running.poll() is None, "the run ended before its first step"
        time.sleep(0.02)
    cpu_s = processor_s(mark.encode())
    assert running.wait() == 0
    return {
        "wall_s": round(float(steps[0]["time"]) - began, 2),
        "cpu_s": round(cpu_s, 2),
    }


def first_steps(runs: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        return [step for run in runs.iterdir() for step in records(run, "step")]
    return []


def processor_s(mark: bytes) -> float:
    """User and system seconds of all processes with a mark in their environment, and of those that
    they have waited for."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument(
        "data", type=Path, metavar="EMOTION_DIR", nargs="?", help="with train.jsonl"
    )
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--against", type=Path, nargs="+", metavar="TREE")
    asked = arguments.parse_args()
    if asked.against:
        compare_trees(
            [*(tree.absolute() for tree in asked.against), REPOSITORY], asked.rounds
        )
    else:
        main(asked.data.absolute(), asked.rounds)
