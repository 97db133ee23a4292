"""Steps on one node of CPUs: bf16 against fp32, bound to cores against not, short texts and long.

    python results/cpu_step.py          # about ten minutes

The 22M-parameter encoder; medians of the steps of each run, runs in turn. Two processes of a core
each, batch 16 a process, texts of a dozen tokens; and one process of two cores, batch 32, every
text padded to 64 tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import RESULTS, encoder, save

sys.path.insert(0, str(RESULTS.parent))

ROUNDS, STEPS, WARM_UP = 3, 14, 4


@dataclass(frozen=True)
class Case:
    """One way to run a step."""

    name: str
    precision: str
    bound: bool = True
    processes: int = 2
    padded: int = 0
    """Tokens that every text is padded to; 0: as training does."""


CASES = [
    Case("fp32, bound", "fp32"),
    Case("fp32, not bound", "fp32", bound=False),
    Case("bf16, bound", "bf16"),
    Case("bf16, not bound", "bf16", bound=False),
    Case("fp32, 64 tokens", "fp32", processes=1, padded=64),
    Case("bf16, 64 tokens", "bf16", processes=1, padded=64),
]
CORES, GLOBAL_BATCH = 2, 32


def main() -> None:
    steps: dict[str, list[float]] = {case.name: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            for case in CASES[:: 1 if number % 2 else -1]:
                seconds = run(Path(folder) / f"{number}-{case.name}", case)
                steps[case.name].append(seconds)
                print(f"{number} {case.name} {1000 * seconds:.0f} ms", flush=True)
    medians = {name: statistics.median(times) for name, times in steps.items()}
    save(
        "cpu_step",
        {
            "steps_s": steps,
            "median_s": medians,
            "bf16_over_fp32": medians["fp32, bound"] / medians["bf16, bound"],
            "bf16_over_fp32_64_tokens": medians["fp32, 64 tokens"] / medians["bf16, 64 tokens"],
            "bound_over_not_fp32": medians["fp32, not bound"] / medians["fp32, bound"],
            "bound_over_not_bf16": medians["bf16, not bound"] / medians["bf16, bound"],
        },
    )


def run(folder: Path, case: Case) -> float:
    """Seconds of a step: the median, of the slower rank."""
    from slurmft.core.config import JobConfig, RunConfig
    from slurmft.runs.rundir import RunDir
    from slurmft.train.config import TrainConfig
    from tests.support.models import write_emotion

    folder.mkdir()
    data = write_emotion(folder / "data", train=2000, validation=16)
    train: dict[str, Any] = {"task": "emotion", "model": str(encoder()), "data": str(data)}
    train |= {"precision": case.precision, "checkpoint_every": "0"}
    train["batch_size"] = GLOBAL_BATCH // case.processes
    config = RunConfig(
        train=TrainConfig.resolve(**train), job=JobConfig(runs_dir=str(folder / "runs"))
    )
    path = RunDir.create(config).path
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": str(CORES // case.processes)}
    if case.bound:
        environment |= {"SLURMFT_CORES": "0;1" if case.processes == 2 else "0-1"}
    quiet = subprocess.DEVNULL
    command = [*torchrun, f"--nproc-per-node={case.processes}", __file__]
    command += ["rank", str(path), str(case.padded)]
    subprocess.run(command, env=environment, check=True, timeout=300, stdout=quiet, stderr=quiet)
    seconds: float = json.loads((path.parent / "step.json").read_text())
    return seconds


def rank(path: Path, padded: int) -> None:
    from overhead import Bench

    from slurmft.node.profiles import bind
    from slurmft.train.step_plan import Plan

    bind(os.environ)
    if padded:
        Plan.pad_multiple = padded  # type: ignore[assignment, method-assign]
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
        rank(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
