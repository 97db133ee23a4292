"""How do start-up and training speed differ between two states of the code? Interleaved runs on
this machine; the later state also with the tokens that its run before has cached.

    git worktree add /tmp/before COMMIT
    python results/benchmarks/compare_commits.py /tmp/before emotion EMOTION_DIR --steps 100
    python results/benchmarks/compare_commits.py /tmp/before mrpc MRPC_DIR --steps 40 \
        --nproc-per-node 1 --batch-size 32 --max-length 128
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from pathlib import Path

from harness import REPOSITORY, encoder, parser, result, save, submit


def main(before: Path, task: str, data: str, rounds: int, **train: int) -> None:
    after = REPOSITORY
    states = {"before": before, "after": after, "after, cached tokens": after}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in states}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(rounds + 1):
            shutil.rmtree(folder / "after", ignore_errors=True)  # its cache
            for state, code in states.items():
                cache = folder / state.partition(",")[0]
                took = one_run(folder / "runs", code, cache, task, data, **train)
                print(f"round {number} {state:21} {took}", flush=True)
                if number:  # the first round fills the disk cache, and compiles modules
                    found[state].append(took)
            shutil.rmtree(folder / "before")
    medians = {
        state: {
            key: round(statistics.median(run[key] for run in runs), 2)
            for key in runs[0]
        }
        for state, runs in found.items()
    }
    for state, values in medians.items():
        print(f"{state:21} {values}")
    save(
        f"compare_commits_{task}",
        {"rounds": rounds} | train | {"runs": found, "medians": medians},
    )


def one_run(
    runs: Path,
    code: Path,
    cache: Path,
    task: str,
    data: str,
    *,
    steps: int,
    nproc_per_node: int,
    batch_size: int,
    max_length: int,
) -> dict[str, float]:
    """Seconds to the first step, and those that no phase counts; training throughput."""
    # As installed, with compiled modules: some environments switch those off.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    run = submit(
        runs,
        *("--cluster", "local", "--nodes", "1", "--no-requeue"),
        *("--nproc-per-node", str(nproc_per_node), "--batch-size", str(batch_size)),
        *("--task", task, "--data", data, "--model", str(encoder())),
        *("--max-length", str(max_length), "--max-steps", str(steps)),
        env=env | {"PYTHONPATH": str(code), "HF_HOME": str(cache)},
        cwd=code,
    )
    found = result(run)
    shutil.rmtree(runs)
    return {
        "to_first_step_s": found["startup_s"],
        "without_phases_s": found["wall_s"] - sum(found["phases_s"].values()),
        "train_samples_per_s": found["train_samples_per_s"],
    }


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument(
        "before", type=Path, metavar="WORKTREE", help="the earlier state of the code"
    )
    arguments.add_argument("task")
    arguments.add_argument("data", metavar="DATA_DIR")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=1)
    arguments.add_argument("--nproc-per-node", type=int, default=2)
    arguments.add_argument("--batch-size", type=int, default=8, help="of one process")
    arguments.add_argument("--max-length", type=int, default=32)
    asked = vars(arguments.parse_args())
    asked["before"], asked["data"] = (
        asked["before"].absolute(),
        str(Path(asked["data"]).absolute()),
    )
    main(**asked)
