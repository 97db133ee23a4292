"""How long does `slurmft report` take for 500 runs, and how much memory does it need?

100 cells (5 numbers of nodes, 20 configurations) of 5 repeats, 300 records of steps each; the real
command in a process of its own, for tables alone and for all files of a report.
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

sys.path.insert(0, str(Path(__file__).parent.parent))

from results.provenance import save
from tests.support.made_runs import write_run

STEPS = 300
ROUNDS = 5


def make_runs(folder: Path) -> int:
    """Writes the run directories; returns how many."""
    made = 0
    for nodes in (1, 2, 4, 8, 16):
        for batch in (16, 32, 64, 128):
            for rate in (1e-5, 2e-5, 5e-5, 1e-4, 5e-4):
                for seed in range(5):
                    cell: dict[str, Any] = {"nodes": nodes, "batch_size": batch}
                    run = write_run(
                        folder / f"run-{made:03d}", nproc_per_node=1, seed=seed,
                        step_s=0.1 + 0.001 * seed, learning_rate=rate, **cell,
                    )  # fmt: skip
                    add_steps(run.records, STEPS)
                    made += 1
    return made


def add_steps(records: Path, steps: int) -> None:
    """Goes on with a run's records up to a step."""
    lines = [
        {"time": 1000.0, "event": "step", "step": n, "epoch": n / 100, "learning_rate": 1e-4}
        | {"loss": 2.0 / n, "samples_per_s": 320.0, "left_s": 1.0, "total_steps": steps}
        for n in range(21, steps + 1)
    ]
    with open(records, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def measure(arguments: list[str]) -> dict[str, float]:
    """Wall and processor time (s) and peak memory (MiB) of one command."""
    command = [sys.executable, "-m", "slurmft", "report", *arguments]
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
        key: round(statistics.median(m[key] for m in measured), 2) for key in measured[0]
    }
    return found | {"wall_s_all": [round(m["wall_s"], 2) for m in measured]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        count = make_runs(Path(folder) / "runs")
        runs, output = str(Path(folder) / "runs"), str(Path(folder) / "out")
        ways = {"text": [runs], "all_files": [runs, "--output", output]}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, arguments in ways.items():
                found[way].append(measure(arguments))
        page_mib = (Path(output) / "report.html").stat().st_size / 2**20
    values: dict[str, Any] = {
        "runs": count, "records_of_steps_a_run": STEPS, "rounds": ROUNDS,
        "note": "other work ran on the machine: processor time says more than wall time",
    }  # fmt: skip
    values |= {way: medians(measured) for way, measured in found.items()}
    save("report_speed", values | {"page_mib": round(page_mib, 2)})


if __name__ == "__main__":
    main()
