"""What do `slurmft list` of 1,000 runs and the start of the commands about runs cost?

Made-up runs, two thirds of which have not finished, with stand-ins for squeue and sacct that answer
at once and count how often they are called; against a bare `python -c pass`, in interleaved runs.

python results/living.py
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from results.provenance import save
from results.report_speed import add_steps
from results.startup import wall_time
from slurmft.core.files import write_json
from tests.support.made_runs import write_run

RUNS = 1000
STEPS = 300
ROUNDS = 15
STATES = ("finished", "finished", "running", "running", "failed", "cancelled")


def make_runs(folder: Path) -> list[str]:
    """Writes the run directories; returns the jobs of those that run."""
    alive = []
    for number in range(RUNS):
        state = STATES[number % len(STATES)]
        clock = f"{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}"
        run = write_run(folder / f"emotion-20261120-{clock}-{number:04x}", nodes=4, state=state)
        add_steps(run.records, STEPS)
        write_json(run.job, {"cluster": "slurm", "id": str(1000 + number)})
        if state == "running":
            alive.append(str(1000 + number))
    return alive


def stand_ins(folder: Path, running: list[str]) -> Path:
    """squeue knows the first half of the jobs, sacct the second; both write down that they ran."""
    half = len(running) // 2
    answers = {
        "squeue": [f"{job}|RUNNING|2026-11-22T10:00:00|None" for job in running[:half]],
        "sacct": [f"{job}|TIMEOUT|0:0" for job in running[half:]],
    }
    folder.mkdir()
    for name, lines in answers.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
        told, calls = (shlex.quote(str(folder / f)) for f in (f"{name}.txt", "calls"))
        (folder / name).write_text(f"#!/bin/sh\necho {name} >> {calls}\nexec cat {told}\n")
        (folder / name).chmod(0o755)
    return folder


def commands(runs: Path) -> dict[str, list[str]]:
    """Name -> what python is to run."""
    place = ["--runs-dir", str(runs)]
    oldest, finished = min(runs.iterdir()), ["-m", "slurmft", "status"]
    return {
        "python -c pass": ["-c", "pass"],
        "import slurmft": ["-c", "import slurmft"],
        "from slurmft import Run": ["-c", "from slurmft import Run"],
        "status --help": ["-m", "slurmft", "status", "--help"],
        "status PATH": [*finished, str(oldest)],
        "status last": [*finished, "last", *place],
        "list": ["-m", "slurmft", "list", *place],
        "list --json": ["-m", "slurmft", "list", "--json", *place],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = stand_ins(folder / "bin", make_runs(folder / "runs"))
        # As installed, with compiled modules: some environments switch those off.
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment = kept | {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": name}
        times: dict[str, list[float]] = {}
        calls: dict[str, int] = {}
        for number in range(ROUNDS + 1):
            for title, arguments in commands(folder / "runs").items():
                (tools / "calls").write_text("")
                seconds = wall_time(arguments, environment)
                calls[title] = len((tools / "calls").read_text().splitlines())
                if number:  # the first round fills the disk cache
                    times.setdefault(title, []).append(seconds)
    report(times, calls)


def report(times: dict[str, list[float]], calls: dict[str, int]) -> None:
    """Prints and saves the medians."""
    rows = {title: statistics.median(values) for title, values in times.items()}
    bare = rows["python -c pass"]
    for title, seconds in rows.items():
        asked = f"{calls[title]} call(s) of Slurm's commands"
        print(f"{title:26} {seconds * 1000:7.1f} ms  {seconds / bare:6.2f} x  {asked}")
    values: dict[str, Any] = {
        "runs": RUNS,
        "records_of_steps_a_run": STEPS,
        "rounds": ROUNDS,
        "median_s": {title: round(seconds, 4) for title, seconds in rows.items()},
        "ratio_to_bare_python": {t: round(seconds / bare, 2) for t, seconds in rows.items()},
        "slurm_calls": calls,
    }
    save("living", values)


if __name__ == "__main__":
    main()
