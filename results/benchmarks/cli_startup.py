"""How much processor time do the commands of a login node take, against a bare `python -c pass`?

    python results/benchmarks/cli_startup.py [--runs N] [--rounds N]     # 2 minutes

Seconds are user and system time of the process and of those that it has waited for: the time on the
clock would measure the queue of a busy machine as well. Interleaved rounds; medians. The run
directories are made up, two thirds of them of runs that have not finished. Stand-ins for squeue and
sacct answer at once, and count how often they are called.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import parser, save

STEPS = 300
STATES = ("finished", "finished", "running", "running", "failed", "cancelled")


def main(runs: int, rounds: int) -> None:
    times: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stand_ins(folder / "bin", make_runs(folder / "runs", runs))
        environment = installed(folder)
        for number in range(rounds + 1):
            for title, arguments in commands(folder / "runs").items():
                (folder / "bin" / "calls").write_text("")
                seconds = cpu_s(arguments, environment)
                calls[title] = len((folder / "bin" / "calls").read_text().splitlines())
                if number:  # the first round fills the disk cache, and compiles modules
                    times.setdefault(title, []).append(seconds)
    report(times, calls, {"runs": runs, "steps_per_run": STEPS, "rounds": rounds})


def commands(runs: Path) -> dict[str, list[str]]:
    """Title -> what python is to run."""
    slurmft, place = ["-m", "slurmft"], ["--runs-dir", str(runs)]
    return {
        "python -c pass": ["-c", "pass"],
        "import slurmft": ["-c", "import slurmft"],
        "from slurmft import Run": ["-c", "from slurmft import Run"],
        "--help": [*slurmft, "--help"],
        "submit --help": [*slurmft, "submit", "--help"],
        "submit --dry-run": [*slurmft, "submit", "--nodes", "4", "--dry-run"],
        "submit --cluster slurm --dry-run": [
            *slurmft,
            "submit",
            "--cluster",
            "slurm",
            "--dry-run",
        ],
        "submit, unknown option": [*slurmft, "submit", "--nods"],
        "status --help": [*slurmft, "status", "--help"],
        "status PATH": [*slurmft, "status", str(min(runs.iterdir()))],
        "status last": [*slurmft, "status", "last", *place],
        "list": [*slurmft, "list", *place],
        "list --json": [*slurmft, "list", "--json", *place],
    }


def make_runs(folder: Path, runs: int) -> list[str]:
    """Writes the run directories; returns the jobs of those that run."""
    from slurmft.core.files import write_json
    from tests.support.made_runs import write_run

    alive = []
    for number in range(runs):
        state = STATES[number % len(STATES)]
        clock = f"{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}"
        run = write_run(
            folder / f"emotion-20261120-{clock}-{number:04x}", nodes=4, state=state
        )
        add_steps(run.records, STEPS)
        write_json(run.job, {"cluster": "slurm", "id": str(1000 + number)})
        if state == "running":
            alive.append(str(1000 + number))
    return alive


def add_steps(records: Path, steps: int) -> None:
    """Continues a run's records up to a step."""
    lines = [
        {
            "time": 1000.0,
            "event": "step",
            "step": n,
            "epoch": n / 100,
            "learning_rate": 1e-4,
        }
        | {"loss": 2.0 / n, "samples_per_s": 320.0, "left_s": 1.0, "total_steps": steps}
        for n in range(21, steps + 1)
    ]
    with open(records, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def stand_ins(folder: Path, running: list[str]) -> None:
    """squeue knows the first half of the jobs, sacct the second; both log their calls. sbatch is
    there, so that a job can be planned, and is never called."""
    half = len(running) // 2
    answers = {
        "squeue": [f"{job}|RUNNING|2026-11-22T10:00:00|None" for job in running[:half]],
        "sacct": [f"{job}|TIMEOUT|0:0" for job in running[half:]],
        "sbatch": [],
    }
    folder.mkdir()
    for name, lines in answers.items():
        (folder / f"{name}.txt").write_text("".join(line + "\n" for line in lines))
        answer, calls = (shlex.quote(str(folder / f)) for f in (f"{name}.txt", "calls"))
        (folder / name).write_text(
            f"#!/bin/sh\necho {name} >> {calls}\nexec cat {answer}\n"
        )
        (folder / name).chmod(0o755)


def installed(folder: Path) -> dict[str, str]:
    """As installed, with compiled modules: some environments switch those off."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
    }


def cpu_s(arguments: list[str], environment: dict[str, str]) -> float:
    """Seconds of user and system time of one call of python."""
    before = children_s()
    subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, check=False
    )
    return children_s() - before


def children_s() -> float:
    """Seconds of user and system time of all children so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(
    times: dict[str, list[float]], calls: dict[str, int], setup: dict[str, int]
) -> None:
    """Prints and saves the medians."""
    medians = {title: statistics.median(values) for title, values in times.items()}
    ratios = {title: s / medians["python -c pass"] for title, s in medians.items()}
    for title, seconds in medians.items():
        print(
            f"{title:34} {seconds * 1000:7.1f} ms  {ratios[title]:6.2f} x  {calls[title]} calls"
        )
    values = {
        "median_cpu_s": {
            title: round(seconds, 4) for title, seconds in medians.items()
        },
        "ratio_to_bare_python": {
            title: round(ratio, 2) for title, ratio in ratios.items()
        },
        "slurm_calls": calls,
    }
    save("cli_startup", setup | values)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=1000, help="run directories")
    arguments.add_argument("--rounds", type=int, default=15)
    main(**vars(arguments.parse_args()))
