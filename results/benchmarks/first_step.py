"""How long is it from job start to the first training step, against a bare `srun torchrun` script
that trains the same model (first_step_baseline.py)? A real Slurm of four nodes, interleaved runs.

    python -m tests.support.cluster up 4 && eval "$(python -m tests.support.cluster env)"
    python results/benchmarks/first_step.py EMOTION_DIR [ROUNDS]
"""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import call, encoder, parser, records, save, submit

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
    ratios = [ours / bare for ours, bare in zip(seconds["slurmft"], seconds["bare"], strict=True)]
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
    line = next(x for x in log.read_text().splitlines() if x.startswith("first step done"))
    return float(line.split()[3]) - float(start.read_text())


def run_slurmft(folder: Path, data: Path) -> float:
    folder.mkdir()
    start = folder / "start"
    run = submit(
        folder,
        *("--nodes", str(NODES), "--task", "emotion", "--data", str(data)),
        *("--model", str(encoder()), "--batch-size", str(BATCH_SIZE), "--cpus-per-task", "1"),
        *("--time", "5", "--precision", "bf16", "--max-steps", "1", "--log-every", "1"),
        *("--setup", f"date +%s.%N > {start}"),
        timeout_s=300,
    )
    return float(records(run, "step")[0]["time"]) - float(start.read_text())


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("data", type=Path, metavar="EMOTION_DIR", help="with train.jsonl")
    arguments.add_argument("rounds", type=int, nargs="?", default=5)
    asked = arguments.parse_args()
    main(asked.data.absolute(), asked.rounds)
