"""Emotion with a pretrained 22M-parameter encoder on a real Slurm of four nodes.

python -m tests.support.cluster up 4 && eval "$(python -m tests.support.cluster env)"
python results/emotion.py losses EMOTION_DIR     # at 1 rank x 64, 4 x 16: 3 min
python results/emotion.py accuracy EMOTION_DIR   # after two epochs: 17 min
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import encoder, save

STEPS = 20
EXACT = ("--precision", "fp32", "--dropout", "0", "--max-steps", str(STEPS))


def main(part: str, data: Path) -> None:
    model = encoder()
    source = ("--task", "emotion", "--data", str(data), "--model", str(model))
    with tempfile.TemporaryDirectory() as folder:
        {"losses": compare_losses, "accuracy": measure_accuracy}[part](Path(folder), *source)


def compare_losses(folder: Path, *source: str) -> None:
    one = losses(run(folder / "one", *source, *EXACT, "--nodes", "1", "--batch-size", "64"))
    four = losses(run(folder / "four", *source, *EXACT, "--nodes", "4", "--batch-size", "16"))
    largest = max(abs(a - b) for a, b in zip(one, four, strict=True))
    print(f"largest difference of the first {STEPS} losses: {largest:.2e}")
    both = {"losses_1_rank_x_64": one, "losses_4_ranks_x_16": four}
    save("emotion_losses", {"largest_difference": largest} | both)


def measure_accuracy(folder: Path, *source: str) -> None:
    found = run(folder / "whole", *source, "--nodes", "4")
    result = json.loads((found / "result.json").read_text())
    save("emotion_accuracy", {"result": result, "metric_on_every_rank": told(found)})


def run(folder: Path, *arguments: str) -> Path:
    """Trains on the cluster; returns the run directory."""
    command = [sys.executable, "-m", "slurmft.submit", "--follow", "--cpus-per-task", "1"]
    command += ["--time", "50"]
    subprocess.run([*command, "--runs-dir", str(folder), *arguments], check=True, timeout=1800)
    return next(folder.iterdir())


def losses(run: Path) -> list[float]:
    return [r["loss"] for r in records(run) if r["event"] == "step"]


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]


def told(run: Path) -> list[str]:
    """What each rank logged after the last epoch."""
    logs = sorted((run / "logs").glob("rank-*.log"))
    return [[x for x in log.read_text().splitlines() if " done:" in x][-1] for log in logs]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
