"""What accuracy does emotion keep as the global batch grows? Five epochs of the recipe mn4-emotion
with the 22M-parameter encoder, in one process, which accumulates what 16 devices would do at once.

    python results/benchmarks/large_batch.py accuracy DATA_DIR [--seeds SEED ...]
    python results/benchmarks/large_batch.py cost      # times on 16 devices: a model

`accuracy` runs all cases, on validation and test; it resumes where it was stopped. No choice was
made by the test split.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from harness import PUBLISHED, encoder, load, parser, records, result, save, submit

SEEDS = (42, 43, 44)
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


def accuracy(folder: Path, data: Path, seeds: list[int]) -> None:
    """Every case with every seed; each is written at once."""
    runs: dict[str, dict[str, Any]] = load("large_batch").get("runs", {})
    for seed in seeds:
        for name, flags in CASES.items():
            key = f"{name}, seed {seed}"
            if key not in runs:
                runs[key] = run(
                    folder / key.replace(" ", "-"), data, *flags, "--seed", str(seed)
                )
                print(key, runs[key]["accuracy"], flush=True)
                means = {
                    kind: mean(runs, kind) for kind in ("accuracy", "test_accuracy")
                }
                save("large_batch", {"runs": runs, "means": means})


def mean(runs: dict[str, dict[str, Any]], kind: str) -> dict[str, float]:
    """The mean over the seeds of each case."""
    found: dict[str, list[float]] = {}
    for key, values in runs.items():
        if values[kind] is not None:
            found.setdefault(key.rpartition(", ")[0], []).append(values[kind])
    return {name: statistics.mean(values) for name, values in found.items()}


def run(folder: Path, data: Path, *flags: str) -> dict[str, Any]:
    """Trains by the real command; returns what counts of its result."""
    path = submit(
        folder,
        *("--cluster", "local", "--recipe", "mn4-emotion", "--data", str(data)),
        *("--model", str(encoder()), "--nproc-per-node", "1", "--precision", "bf16"),
        *("--batching", "packed", "--checkpoint-every", "0", "--save", "last"),
        *flags,
    )
    values = result(path)
    by_epoch = [record["metrics"]["accuracy"] for record in records(path, "epoch")]
    names = ("optimizer", "learning_rate", "global_batch_size", "steps", "loss")
    return {
        "accuracy": by_epoch[-1],
        "test_accuracy": test_accuracy(path / "model", data / "test.jsonl"),
        "accuracy_by_epoch": by_epoch,
        "train_s": values["phases_s"]["train"],
    } | {name: values[name] for name in names}


def test_accuracy(model: Path, file: Path) -> float | None:
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
        right += sum(
            row["label"] == label for row, label in zip(part, found, strict=True)
        )
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

    from slurmft.train.parallel.muon import split

    shapes = [(HIDDEN, HIDDEN)] * 4 * LAYERS + [(INNER, HIDDEN)] * 2 * LAYERS
    matrices = [torch.empty(shape, device="meta") for shape in shapes]
    parts = [sum(map(orthogonal_flop, part)) for part in split(matrices, DEVICES)]
    work_s = max(parts) / V100_FP32_FLOP_S
    sent = SENT_BYTES * sum(p.numel() for p in matrices)
    table = json.loads((PUBLISHED / "mn4_emotion.json").read_text())
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
        "time_over_4096_with_muon": {
            size: s / times[4096] for size, s in times.items()
        },
    }


def orthogonal_flop(matrix: Any) -> float:
    """Of Newton and Schulz's iteration as torch.optim.Muon does it."""
    short, long = sorted(matrix.shape)
    return float(ITERATIONS * (2 * 2 * short**2 * long + 2 * short**3))


if __name__ == "__main__":
    arguments = parser(__doc__)
    parts = arguments.add_subparsers(dest="part", required=True)
    parts.add_parser("cost")
    with_data = parts.add_parser("accuracy")
    with_data.add_argument("data", type=Path, metavar="DATA_DIR")
    with_data.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    asked = arguments.parse_args()
    if asked.part == "cost":
        save("large_batch_cost", cost())
    else:
        with tempfile.TemporaryDirectory() as name:
            accuracy(Path(name), asked.data.absolute(), asked.seeds)
