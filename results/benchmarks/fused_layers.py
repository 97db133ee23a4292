"""What do fused encoder layers save on a CPU, and do models become as good? One process, the
22M-parameter encoder; fused layers against those of transformers, on the same packed batches.

    python results/benchmarks/fused_layers.py speed emotion DATA_DIR --batch-size 128
    python results/benchmarks/fused_layers.py speed mrpc DATA_DIR --batch-size 32 --precision fp32
    python results/benchmarks/fused_layers.py accuracy emotion DATA_DIR --steps 120    # 15 minutes

DATA_DIR holds train.jsonl and validation.jsonl. speed: steps in turn, each in CPU seconds of the
process, and the rate of matrix products of these sizes; so on a busy machine ratios hold, too.
accuracy: both ways from each of several seeds, with dropout, bf16.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Steps, encoder, make_run, parser, save

WARM_UP = 3


def made(folder: Path, task: str, data: Path, fused: bool, **train: Any) -> Steps:
    """A training, one step at a time."""
    path = make_run(
        folder, task=task, data=str(data), model=str(encoder()), batching="packed",
        lr_schedule="constant", warmup_ratio=0.0, **train,
    )  # fmt: skip
    steps = Steps(path)
    packing = steps.learner.loaded.packing
    assert packing is not None
    if not fused:
        packing.layers = []
    return steps


def products(steps: Steps, tokens: int) -> float:
    """CPU seconds of the matrix products in the layers' forward and backward passes."""
    import torch

    assert steps.learner.loaded.packing is not None
    layers = steps.learner.loaded.packing.encoder.layer
    dtype = torch.bfloat16 if steps.setup.precision == "bf16" else torch.float32
    seconds = 0.0
    for module in (
        each for each in layers[0].modules() if isinstance(each, torch.nn.Linear)
    ):
        weight = module.weight.detach().to(dtype)
        x, gradient = (
            torch.randn(tokens, size, dtype=dtype) for size in weight.t().shape
        )
        for left, right in (
            (x, weight.t()),
            (gradient, weight),
            (gradient.t().contiguous(), x),
        ):
            times = []
            for _ in range(7):
                began = time.process_time()
                torch.mm(left, right)
                times.append(time.process_time() - began)
            seconds += min(times)
    return len(layers) * seconds


def speed(folder: Path, task: str, data: Path, asked: Any) -> None:
    options = {"batch_size": asked.batch_size, "max_length": asked.max_length}
    both = {
        name: made(
            folder / name, task, data, fused, precision=asked.precision, **options
        )
        for name, fused in (("layers of transformers", False), ("fused", True))
    }
    cpu: dict[str, list[float]] = {name: [] for name in both}
    wall: dict[str, list[float]] = {name: [] for name in both}
    tokens = 0
    for number in range(WARM_UP + asked.steps):
        for name in list(both)[:: -1 if number % 2 else 1]:
            began = time.process_time(), time.perf_counter()
            both[name].step()
            if number >= WARM_UP:
                cpu[name].append(time.process_time() - began[0])
                wall[name].append(time.perf_counter() - began[1])
        tokens = both["fused"].tokens // (number + 1)
    medians = {name: statistics.median(seconds) for name, seconds in cpu.items()}
    theirs, ours = medians.values()
    ideal = products(both["fused"], tokens)
    print(
        f"{task}, batch {asked.batch_size}, {tokens} tokens, {asked.precision}: CPU seconds of a"
    )
    print(f"step {medians}, products alone {ideal:.3f}; ratio {theirs / ours:.2f}")
    print(
        f"wall { ({name: round(statistics.median(s), 3) for name, s in wall.items()}) }"
    )
    save(f"fused_layers_{task}_{asked.precision}", {
        "threads": asked.threads, "tokens": tokens, **options, "cpu_s": cpu, "wall_s": wall,
        "median_cpu_s": medians, "products_cpu_s": ideal, "ratio": theirs / ours,
    })  # fmt: skip


def accuracy(folder: Path, task: str, data: Path, asked: Any) -> None:
    import numpy as np

    found: dict[str, list[float]] = {"layers of transformers": [], "fused": []}
    for seed in range(asked.seeds):
        for name in found:
            steps = made(
                folder / f"{name}-{seed}", task, data, name == "fused", seed=seed,
                precision="bf16", batch_size=asked.batch_size, max_length=asked.max_length,
                learning_rate=asked.learning_rate,
            )  # fmt: skip
            for _ in range(asked.steps):
                steps.step()
            tokens = steps.setup.data
            count = len(tokens.validation)
            predictions = steps.trainer.evaluator.predict_part(
                tokens, np.arange(count), count, lambda: None
            )
            metrics = steps.setup.task.compute(predictions, tokens)
            found[name].append(100 * metrics["accuracy"])
            print(seed, name, metrics, flush=True)
    theirs, ours = found.values()
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    spread = statistics.stdev(differences) / len(differences) ** 0.5
    print(
        f"fused: {statistics.mean(differences):+.2f} points, standard error {spread:.2f}"
    )
    save(f"fused_layers_accuracy_{task}", {
        "steps": asked.steps, "batch_size": asked.batch_size, "accuracy": found,
        "mean_difference": statistics.mean(differences), "standard_error": spread,
    })  # fmt: skip


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("part", choices=("speed", "accuracy"))
    arguments.add_argument("task", choices=("emotion", "mrpc"))
    arguments.add_argument("data", type=Path, metavar="DATA_DIR")
    arguments.add_argument("--batch-size", type=int, default=32)
    arguments.add_argument("--max-length", type=int, default=128)
    arguments.add_argument("--learning-rate", type=float, default=1e-4)
    arguments.add_argument("--precision", default="bf16")
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=12, help="that count")
    arguments.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    with tempfile.TemporaryDirectory() as name:
        part = {"speed": speed, "accuracy": accuracy}[given.part]
        part(Path(name), given.task, given.data.absolute(), given)
