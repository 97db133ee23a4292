"""How fast are training and evaluation against a script of one's own, as studies of clusters use
it? The script: Accelerate, bf16, batches padded to their longest text, torch.optim.AdamW as it
comes. One process on all cores, the 22M-parameter encoder, emotion.

    python results/benchmarks/accelerate_script.py EMOTION_DIR [--steps 30] [--batch-size 32]

Rounds of both in turn; the script gets the same OMP_NUM_THREADS. Its first two steps do not count.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import call, encoder, parser, result, save, submit

WARM_UP = 2


def main(data: Path, rounds: int, steps: int, batch_size: int) -> None:
    found: dict[str, list[dict[str, float]]] = {"script": [], "slurmft": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            for who, run in (("script", by_script), ("slurmft", by_slurmft)):
                found[who].append(run(Path(name), data, steps, batch_size))
                print(f"round {number} {who:8} {found[who][-1]}", flush=True)
    ratios = {
        phase: [
            ours[phase] / script[phase]
            for ours, script in zip(found["slurmft"], found["script"], strict=True)
        ]
        for phase in ("train", "evaluate")
    }
    medians = {
        phase: round(statistics.median(each), 2) for phase, each in ratios.items()
    }
    print(f"samples/s, slurmft over script, medians of {rounds} rounds: {medians}")
    save("accelerate_script", {
        "steps": steps, "batch_size": batch_size, "samples_per_s": found, "ratios": ratios,
        "median_ratios": medians,
    })  # fmt: skip


def by_slurmft(
    folder: Path, data: Path, steps: int, batch_size: int
) -> dict[str, float]:
    run = submit(
        folder / "runs",
        *(
            "--cluster",
            "local",
            "--nodes",
            "1",
            "--nproc-per-node",
            "1",
            "--no-requeue",
        ),
        *("--task", "emotion", "--data", str(data), "--model", str(encoder())),
        *("--batch-size", str(batch_size), "--max-steps", str(steps)),
    )
    measured = result(run)
    return {
        phase: measured[f"{phase}_samples_per_s"] for phase in ("train", "evaluate")
    }


def by_script(
    folder: Path, data: Path, steps: int, batch_size: int
) -> dict[str, float]:
    output = folder / "script.json"
    threads = str(len(os.sched_getaffinity(0)))
    call(
        *(
            sys.executable,
            __file__,
            "script",
            str(data),
            str(steps),
            str(batch_size),
            str(output),
        ),
        timeout_s=1200,
        env=os.environ | {"OMP_NUM_THREADS": threads},
    )
    found: dict[str, float] = json.loads(output.read_text())
    return found


def script(data: Path, steps: int, batch_size: int, output: Path) -> None:
    """The script: nothing of slurmft is in it."""
    import torch
    from accelerate import Accelerator
    from datasets import load_dataset
    from torch.utils.data import DataLoader
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        get_scheduler,
        set_seed,
    )

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(encoder())
    files = {name: str(data / f"{name}.jsonl") for name in ("train", "validation")}
    rows = load_dataset(
        "json", data_files=files, cache_dir=str(output.parent / "cache")
    )
    tokenized = rows.map(
        lambda batch: tokenizer(batch["text"], truncation=True), batched=True
    ).remove_columns(["text"])
    collate = DataCollatorWithPadding(tokenizer)
    loaders = [
        DataLoader(
            tokenized[name],
            shuffle=name == "train",
            batch_size=batch_size,
            collate_fn=collate,
        )
        for name in ("train", "validation")
    ]
    model = AutoModelForSequenceClassification.from_pretrained(encoder(), num_labels=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model, optimizer, train, validation = accelerator.prepare(
        model, optimizer, *loaders
    )
    schedule = get_scheduler("linear", optimizer, 0, steps)
    model.train()
    times = []
    for number, batch in enumerate(train):
        if number == steps:
            break
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    train_s = times[-1] - times[WARM_UP - 1]
    model.eval()
    began, right, seen = time.perf_counter(), 0, 0
    for batch in validation:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(-1)
        predictions, labels = accelerator.gather_for_metrics(
            (predictions, batch["labels"])
        )
        right, seen = right + int((predictions == labels).sum()), seen + len(labels)
    evaluate_s = time.perf_counter() - began
    print(f"accuracy {right / seen:.4f}")
    found = {
        "train": (steps - WARM_UP) * batch_size / train_s,
        "evaluate": seen / evaluate_s,
    }
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["script"]:
        script(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
        raise SystemExit
    arguments = parser(__doc__)
    arguments.add_argument("data", type=Path, metavar="EMOTION_DIR")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--batch-size", type=int, default=32)
    main(**vars(arguments.parse_args()))
