"""Accuracy on emotion by global batch: five epochs of the recipe mn4-emotion with the 22M-parameter
encoder, in one process. What 16 devices do at once, it does one after another: it accumulates.

    python results/large_batch.py choose DATA_DIR           # learning rates, on a part of train
    python results/large_batch.py accuracy DATA_DIR [SEED]  # all cases, on validation and test
    python results/large_batch.py cost                      # times on 16 devices: a model

`choose` sees the training split alone: 14,000 of its samples to train on, 2,000 to judge by, and as
few steps as a global batch of 4,096 leaves. `accuracy` goes on where it was stopped; no choice was
made by the test split.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import RESULTS, encoder, save

SEEDS = (42, 43, 44)
DEVICE_BATCH, STEPS, HELD_OUT = 256, 20, 2000

_ALL_MICRO_STEPS = ("--gradient-accumulation-steps", "16")
_NO_LIMIT = ("--max-global-batch-size", "4096")
_ONE_RATE = ("--learning-rate", "2e-3")
CASES: dict[str, tuple[str, ...]] = {
    "256": (),
    "2672": (*_ALL_MICRO_STEPS, "--batch-size", "167"),
    "4096": (*_ALL_MICRO_STEPS, *_NO_LIMIT),
    "2048": ("--gradient-accumulation-steps", "8"),
    "4096, one rate for all": (*_ALL_MICRO_STEPS, *_NO_LIMIT, *_ONE_RATE),
    "4096 as published": (*_ALL_MICRO_STEPS, "--as-published"),
}
"""Global batch -> flags. Up to 1,024 the recipe is as published. One rate for all: that of Muon,
for embeddings, norms and biases, too."""

RATES = {"muon": (1e-3, 2e-3, 4e-3, 8e-3), "adamw": (5e-4, 1e-3, 2e-3)}


def main(part: str, arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if part == "cost":
            return save("large_batch_cost", cost())
        data = Path(arguments[0]).absolute()
        if part == "choose":
            choose(Path(folder), data)
        else:
            accuracy(Path(folder), data, [int(seed) for seed in arguments[1:]] or list(SEEDS))


def accuracy(folder: Path, data: Path, seeds: list[int]) -> None:
    """Every case with every seed; each is written down at once."""
    file = RESULTS / "large_batch.json"
    runs: dict[str, dict[str, Any]] = json.loads(file.read_text())["runs"] if file.exists() else {}
    for seed in seeds:
        for name, flags in CASES.items():
            key = f"{name}, seed {seed}"
            if key not in runs:
                runs[key] = run(folder / key.replace(" ", "-"), data, *flags, "--seed", str(seed))
                print(key, runs[key]["accuracy"], flush=True)
                means = {kind: mean(runs, kind) for kind in ("accuracy", "test_accuracy")}
                save("large_batch", {"runs": runs, "means": means})


def mean(runs: dict[str, dict[str, Any]], kind: str) -> dict[str, float]:
    """The mean over the seeds of each case."""
    found: dict[str, list[float]] = {}
    for key, values in runs.items():
        if values[kind] is not None:
            found.setdefault(key.rpartition(", ")[0], []).append(values[kind])
    return {name: statistics.mean(values) for name, values in found.items()}


def choose(folder: Path, data: Path) -> None:
    """Learning rates by what they reach in few steps, on a part of the training data."""
    held_out = hold_out(folder / "data", data)
    found: dict[str, Any] = {}
    for optimizer, rates in RATES.items():
        for rate in rates:
            flags = ("--optimizer", optimizer, "--learning-rate", str(rate), "--lr-rule", "none")
            key = f"{optimizer} {rate}"
            found[key] = run(folder / key, held_out, *flags, "--max-steps", str(STEPS))
            print(key, found[key]["accuracy"], found[key]["loss"], flush=True)
            save("large_batch_choice", {"steps": STEPS, "batch": DEVICE_BATCH, "runs": found})


def hold_out(folder: Path, data: Path) -> Path:
    """The training split in two: what to train on, and what to judge by."""
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    folder.mkdir()
    (folder / "validation.jsonl").write_text("".join(lines[:HELD_OUT]))
    (folder / "train.jsonl").write_text("".join(lines[HELD_OUT:]))
    return folder


def run(folder: Path, data: Path, *flags: str) -> dict[str, Any]:
    """Trains by the real command; returns what counts of its result."""
    command = [sys.executable, "-m", "slurmft.submit", "--follow", "--cluster", "local"]
    command += ["--recipe", "mn4-emotion", "--data", str(data), "--model", str(encoder())]
    command += ["--nproc-per-node", "1", "--precision", "bf16", "--batching", "packed"]
    command += ["--checkpoint-every", "0", "--runs-dir", str(folder), *flags]
    subprocess.run(command, check=True, timeout=7200, stdout=subprocess.DEVNULL)
    (path,) = folder.iterdir()
    result = json.loads((path / "result.json").read_text())
    told = [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]
    by_epoch = [r["metrics"]["accuracy"] for r in told if r["event"] == "epoch"]
    names = ("optimizer", "learning_rate", "global_batch_size", "steps", "loss")
    return {
        "accuracy": by_epoch[-1],
        "test_accuracy": judged(path / "model", data / "test.jsonl"),
        "accuracy_by_epoch": by_epoch,
        "train_s": result["phases_s"]["train"],
    } | {name: result[name] for name in names}


def judged(model: Path, file: Path) -> float | None:
    """Accuracy of a saved model, in fp32; None: there is no such file."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if not file.exists():
        return None
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows.sort(key=lambda row: len(row["text"]))
    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    right = 0
    for start in range(0, len(rows), 100):
        part = rows[start : start + 100]
        texts = [row["text"] for row in part]
        inputs = tokenizer(
            texts, padding=True, truncation=True, max_length=128, return_tensors="pt"
        )
        with torch.inference_mode():
            found = classifier(**inputs).logits.argmax(-1).tolist()
        right += sum(row["label"] == label for row, label in zip(part, found, strict=True))
    return right / len(rows)


# --- what the published run would take, with Muon -------------------------------------------------

LAYERS, HIDDEN, INNER = 6, 768, 3072
DEVICES, ITERATIONS = 16, 5
V100_FP32_FLOP_S = 10e12
"""Muon multiplies in bf16, which a V100 has no fast units for; its fp32 peak is 15.7e12."""
EDR_BYTES_S = 10e9
SENT_BYTES = 2
"""Of each number."""
STEPS_OF = {4096: 20, 2672: 30, 2048: 40}
"""Global batch -> steps in five epochs."""


def cost() -> dict[str, Any]:
    """Times over that of the published 20 steps on 16 V100: steps cost what the published runs of
    20 and 40 steps differ by, and Muon's work and messages besides."""
    import torch

    sys.path.insert(0, str(RESULTS.parent))
    from slurmft.train.optim import split

    shapes = [(HIDDEN, HIDDEN)] * 4 * LAYERS + [(INNER, HIDDEN)] * 2 * LAYERS
    matrices = [torch.empty(shape, device="meta") for shape in shapes]
    parts = [sum(map(orthogonal_flop, part)) for part in split(matrices, DEVICES)]
    work_s = max(parts) / V100_FP32_FLOP_S
    sent = SENT_BYTES * sum(p.numel() for p in matrices)
    table = json.loads((RESULTS / "published" / "mn4_emotion.json").read_text())
    seconds = {row[1] * DEVICES: row[3] for row in table["rows"] if row[0] == DEVICES}
    step_s = (seconds[2048] - seconds[4096]) / (STEPS_OF[2048] - STEPS_OF[4096])
    muon_s = work_s + sent / EDR_BYTES_S
    times = {
        size: seconds[4096] + (steps - STEPS_OF[4096]) * step_s + steps * muon_s
        for size, steps in STEPS_OF.items()
    }
    return {
        "model": "DistilBERT-base on 16 V100, EDR InfiniBand; modelled, not measured",
        "muon_flop_a_step": {"all": sum(parts), "of_the_slowest_rank": max(parts)},
        "muon_bytes_sent_a_step": sent,
        "muon_s_a_step": muon_s,
        "other_s_a_step_more": step_s,
        "published_s": seconds[4096],
        "time_over_published": {size: s / seconds[4096] for size, s in times.items()},
        "time_over_4096_with_muon": {size: s / times[4096] for size, s in times.items()},
    }


def orthogonal_flop(matrix: Any) -> float:
    """Of Newton and Schulz's iteration as torch.optim.Muon does it."""
    short, long = sorted(matrix.shape)
    return float(ITERATIONS * (2 * 2 * short**2 * long + 2 * short**3))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
