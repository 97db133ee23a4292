"""Start-up of a run on this machine, in two states of the code: in interleaved runs, the later one
with an empty and with a filled cache of tokens.

    git worktree add /tmp/before COMMIT
    python results/run_startup.py /tmp/before emotion EMOTION_DIR [ROUNDS]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from provenance import RESULTS, encoder, save


def main() -> None:
    before, task, data = sys.argv[1:4]
    rounds = int((sys.argv[4:] or ["5"])[0])
    after = str(RESULTS.parent)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            # The second run of the later state takes the tokens of its first.
            shutil.rmtree(Path(folder) / "hf", ignore_errors=True)
            for name, code in (("before", before), ("after", after), ("after, again", after)):
                took = one_run(Path(folder), code, task, data)
                print(f"round {number} {name:12} {took}", flush=True)
                if number:  # the first round fills the disk cache, and compiles modules
                    found.setdefault(name, []).append(took)
    medians = {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        for name, runs in found.items()
    }
    for name, values in medians.items():
        print(f"{name:12} {values}")
    save(f"run_startup_{task}", {"rounds": rounds, "runs": found, "medians": medians})


def one_run(folder: Path, code: str, task: str, data: str) -> dict[str, float]:
    """Seconds from the job's start to the first step, and to the end of the run."""
    runs = folder / "runs"
    command = [sys.executable, "-m", "slurmft.submit", "--cluster", "local", "--follow"]
    command += ["--nodes", "1", "--nproc-per-node", "2", "--task", task, "--data", data]
    command += ["--model", str(encoder()), "--max-steps", "1", "--max-length", "32"]
    command += ["--batch-size", "8", "--runs-dir", str(runs), "--no-requeue"]
    # As installed, with compiled modules: some environments switch those off.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": code, "HF_HOME": str(folder / "hf")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
    result = json.loads(next(runs.glob("*/result.json")).read_text())
    shutil.rmtree(runs)
    waited = result["wall_s"] - sum(result["phases_s"].values())  # start-up, imports of metrics
    return {"to_first_step_s": result["startup_s"], "without_phases_s": waited}


if __name__ == "__main__":
    main()
