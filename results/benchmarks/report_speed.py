"""What does `slurmft report` of 500 runs cost, in time and memory?

    python results/benchmarks/report_speed.py     # 2 minutes

100 cells (5 numbers of nodes, 20 configurations) of 5 repeats, 300 records of steps each; the real
command in a process of its own, for the tables alone and for all files of a report.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from cli_startup import add_steps
from harness import parser, save

STEPS = 300
ROUNDS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs, output = str(Path(folder) / "runs"), str(Path(folder) / "out")
        count = make_runs(Path(runs))
        ways = {"text": [runs], "all_files": [runs, "--output", output]}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, arguments in ways.items():
                found[way].append(measure(["report", *arguments]))
        page_mib = (Path(output) / "report.html").stat().st_size / 2**20
    values: dict[str, Any] = {"runs": count, "steps_per_run": STEPS, "rounds": ROUNDS}
    values |= {way: medians(measured) for way, measured in found.items()}
    save("report_speed", values | {"page_mib": round(page_mib, 2)})


def make_runs(folder: Path) -> int:
    """Writes the run directories; returns how many."""
    from tests.support.made_runs import write_run

    grid = product(
        (1, 2, 4, 8, 16), (16, 32, 64, 128), (1e-5, 2e-5, 5e-5, 1e-4, 5e-4), range(5)
    )
    count = 0
    for nodes, batch_size, learning_rate, seed in grid:
        run = write_run(
            folder / f"run-{count:03d}", nodes=nodes, nproc_per_node=1, batch_size=batch_size,
            learning_rate=learning_rate, seed=seed, step_s=0.1 + 0.001 * seed,
        )  # fmt: skip
        add_steps(run.records, STEPS)
        count += 1
    return count


def measure(arguments: list[str]) -> dict[str, float]:
    """Wall and processor time (s) and peak memory (MiB) of one command."""
    command = [sys.executable, "-m", "slurmft", *arguments]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    assert os.waitstatus_to_exitcode(status) == 0
    return {
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_memory_mib": usage.ru_maxrss / 1024,
    }


def medians(measured: list[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: round(statistics.median(m[key] for m in measured), 2)
        for key in measured[0]
    }
    return found | {"wall_s_all": [round(m["wall_s"], 2) for m in measured]}


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
