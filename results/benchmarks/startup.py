"""Start-up of the login-node commands against a bare `python -c pass`, in interleaved runs.

python results/startup.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from provenance import save

RUNS = 15
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "submit --help": ["-m", "slurmft.submit", "--help"],
    "submit --dry-run": ["-m", "slurmft.submit", "--nodes", "4", "--dry-run"],
    "submit --dry-run --cluster slurm": ["-m", "slurmft.submit", "--cluster", "slurm", "--dry-run"],
    "submit --nods": ["-m", "slurmft.submit", "--nods"],
}


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        environment = with_sbatch(Path(folder))
        for run in range(RUNS + 1):
            for name, arguments in COMMANDS.items():
                seconds = wall_time(arguments, environment)
                if run:  # the first round fills the disk cache
                    times[name].append(seconds)
    bare = statistics.median(times["python -c pass"])
    rows = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in rows.items():
        print(f"{name:34} {seconds * 1000:6.1f} ms  {seconds / bare:5.2f} x")
    ratios = {name: round(seconds / bare, 2) for name, seconds in rows.items()}
    save("startup", {"runs": RUNS, "median_s": rows, "ratio_to_bare_python": ratios})


def with_sbatch(folder: Path) -> dict[str, str]:
    """An environment in which --cluster slurm can be planned: an sbatch that is never called."""
    (folder / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (folder / "sbatch").chmod(0o755)
    # As installed, with compiled modules: some environments switch those off.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}


def wall_time(arguments: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=False)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
