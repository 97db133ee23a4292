"""Two processes on one node of CPUs: bf16 against fp32, bound to cores against not.

    python results/cpu_step.py          # about six minutes

The 22M-parameter encoder, batch 16 a process; medians of the steps of each run, runs in turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from provenance import RESULTS, encoder, save

sys.path.insert(0, str(RESULTS.parent))

ROUNDS, STEPS, WARM_UP = 3, 14, 4
CASES = [("fp32", True), ("fp32", False), ("bf16", True), ("bf16", False)]


def main() -> None:
    found: dict[tuple[str, bool], list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            for case in CASES[:: 1 if number % 2 else -1]:
                found[case].append(run(Path(folder) / f"{number}-{case}", *case))
                print(number, *case, f"{1000 * found[case][-1]:.0f} ms", flush=True)
    steps = {f"{p}, {'bound' if b else 'not bound'}": found[p, b] for p, b in CASES}
    medians = {name: statistics.median(times) for name, times in steps.items()}
    save(
        "cpu_step",
        {
            "steps_s": steps,
            "median_s": medians,
            "bf16_over_fp32": medians["fp32, bound"] / medians["bf16, bound"],
            "bound_over_not_fp32": medians["fp32, not bound"] / medians["fp32, bound"],
            "bound_over_not_bf16": medians["bf16, not bound"] / medians["bf16, bound"],
        },
    )


def run(folder: Path, precision: str, bound: bool) -> float:
    """Seconds of a step: the median, of the slower rank."""
    from slurmft.config import JobConfig, RunConfig, TrainConfig
    from slurmft.rundir import RunDir
    from tests.models import write_emotion

    folder.mkdir()
    data = write_emotion(folder / "data", train=2000, validation=16)
    train: dict[str, Any] = {"task": "emotion", "model": str(encoder()), "data": str(data)}
    train |= {"precision": precision, "batch_size": 16, "checkpoint_every": "0"}
    config = RunConfig(
        train=TrainConfig.resolve(**train), job=JobConfig(runs_dir=str(folder / "runs"))
    )
    path = RunDir.create(config).path
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if bound:
        environment |= {"SLURMFT_CORES": "0;1"}
    quiet = subprocess.DEVNULL
    command = [*torchrun, "--nproc-per-node=2", __file__, "rank", str(path)]
    subprocess.run(command, env=environment, check=True, timeout=300, stdout=quiet, stderr=quiet)
    seconds: float = json.loads((path.parent / "step.json").read_text())
    return seconds


def rank(path: Path) -> None:
    from overhead import Bench

    from slurmft.rank import bind

    bind(os.environ)
    bench = Bench(path)
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        bench.steps(1, False, "checkpoint")
        times.append(time.perf_counter() - began)
    median = max(bench.training.world.all_values(statistics.median(times[WARM_UP:])))
    if bench.training.world.is_main:
        (path.parent / "step.json").write_text(json.dumps(median))
    bench.dist.leave()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(Path(sys.argv[2]))
    else:
        main()
