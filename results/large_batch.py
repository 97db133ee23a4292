"""Accuracy on emotion by global batch: five epochs of the recipe mn4-emotion with the 22M-parameter
encoder, in one process. What 16 devices do at once, it does one after another: it accumulates.

    python results/large_batch.py choose DATA_DIR           # learning rates, on a part of train
    python results/large_batch.py accuracy DATA_DIR [SEED]  # all cases, on validation and test
    python results/large_batch.py cost                      # what Muon adds on 16 devices: a model

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
_ONE_RATE = ("--learning-rate", "2e-3")
CASES: dict[str, tuple[str, ...]] = {
    "256": (),
    "4096": _ALL_MICRO_STEPS,
    "2048": ("--gradient-accumulation-steps", "8"),
    "4096, one rate for all": (*_ALL_MICRO_STEPS, *_ONE_RATE),
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


# --- what Muon adds to a step of the published run ------------------------------------------------

LAYERS, HIDDEN, INNER = 6, 768, 3072
DEVICES, ITERATIONS = 16, 5
V100_FP32_FLOP_S = 10e12
"""Muon multiplies in bf16, which a V100 has no fast units for; its fp32 peak is 15.7e12."""
EDR_BYTES_S = 10e9


def cost() -> dict[str, Any]:
    """Time of Muon's work and messages, over the published time of 20 steps on 16 V100."""
    matrices = [(HIDDEN, HIDDEN)] * 4 * LAYERS + [(INNER, HIDDEN)] * 2 * LAYERS
    by_size = sorted((orthogonal_flop(*shape) for shape in matrices), reverse=True)
    slowest = max(sum(by_size[rank::DEVICES]) for rank in range(DEVICES))
    sent = 4 * sum(rows * columns for rows, columns in matrices)
    work_s, send_s = slowest / V100_FP32_FLOP_S, sent / EDR_BYTES_S
    table = json.loads((RESULTS / "published" / "mn4_emotion.json").read_text())
    published_s = next(row[3] for row in table["rows"] if row[:2] == [DEVICES, DEVICE_BATCH])
    return {
        "model": "DistilBERT-base on 16 V100, EDR InfiniBand; modelled, not measured",
        "flop_a_step": {"all": sum(by_size), "of_the_slowest_rank": slowest},
        "bytes_sent_a_step": sent,
        "work_s": work_s,
        "send_s": send_s,
        "published_s": published_s,
        "time_ratio": 1 + STEPS * (work_s + send_s) / published_s,
        "time_ratio_if_every_rank_did_all": 1
        + STEPS * sum(by_size) / V100_FP32_FLOP_S / published_s,
    }


def orthogonal_flop(long: int, short: int) -> float:
    """Of Newton and Schulz's iteration as torch.optim.Muon does it."""
    return ITERATIONS * (2 * 2 * short**2 * long + 2 * short**3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
