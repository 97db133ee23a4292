"""How fast is a step against transformers' Trainer, by how batches are padded? One process, all
cores, the 22M-parameter encoder, the same samples in the same order.

    python results/benchmarks/throughput_vs_trainer.py mrpc DATA_DIR     # 6 minutes
    python results/benchmarks/throughput_vs_trainer.py emotion DATA_DIR
    python results/benchmarks/throughput_vs_trainer.py squad DATA_DIR
    python results/benchmarks/throughput_vs_trainer.py lora DATA_DIR     # of emotion, with PEFT
    python results/benchmarks/throughput_vs_trainer.py token-classification made

DATA_DIR holds train.jsonl and validation.jsonl; for `made`, 20,000 sentences with entities are
written. Every case is a process of its own, in turn; a round has them all. Of every process, the
time of the same steps after the warm-up counts. Losses are means over these steps; dropout draws
other numbers in every case. With LoRA there is none, and losses are compared step by step. F1 of
entities is that after the last step.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    Steps,
    call,
    encoder,
    job_environment,
    make_run,
    parser,
    peak_memory_mib,
    save,
    train_by_trainer,
)

ROUNDS, WARM_UP = 2, 2
LORA = {"lora": 16, "dropout": 0.0, "learning_rate": 5e-4}


@dataclass(frozen=True)
class Work:
    """What is trained."""

    batch_size: int
    max_length: int
    steps: int
    """That count."""
    skip: tuple[str, ...] = ()
    """Cases that are not run: words in their names."""


WORK = {
    "mrpc": Work(32, 128, 12, skip=("LoRA",)),
    "emotion": Work(256, 128, 8, skip=("padded", "grouped", "LoRA")),
    "squad": Work(16, 384, 6, skip=("fp32", "dynamic", "grouped", "LoRA")),
    "lora": Work(16, 128, 50),
    "token-classification": Work(32, 128, 120, skip=("padded", "LoRA")),
}

CASES = {
    "Trainer, padded, fp32": ("trainer", "padded", "fp32"),
    "Trainer, padded, bf16": ("trainer", "padded", "bf16"),
    "Trainer, dynamic, bf16": ("trainer", "dynamic", "bf16"),
    "slurmft, padded, bf16": ("slurmft", "padded", "bf16"),
    "slurmft, dynamic, bf16": ("slurmft", "dynamic", "bf16"),
    "slurmft, packed, bf16": ("slurmft", "packed", "bf16"),
    "slurmft, grouped, bf16": ("slurmft", "grouped", "bf16"),
    "slurmft as submitted": ("slurmft", "packed", "bf16"),
    "Trainer and PEFT, LoRA, fp32": ("trainer", "dynamic", "fp32"),
    "slurmft, LoRA, fp32": ("slurmft", "packed", "fp32"),
    "Trainer and PEFT, LoRA, bf16": ("trainer", "dynamic", "bf16"),
    "slurmft, LoRA, bf16": ("slurmft", "packed", "bf16"),
}
"""Name -> program, batching, precision. Length bucketing (grouped) makes other batches. As
submitted: with the environment that a job's processes get on this machine."""

Trained = tuple[list[float], list[Any], Callable[[], float]]
"""Clock times after every step, losses, and what gives F1 of entities, in percent."""

RATIOS = [
    ("slurmft, packed, bf16", "Trainer, padded, bf16"),
    ("slurmft, packed, bf16", "Trainer, dynamic, bf16"),
    ("slurmft, grouped, bf16", "Trainer, padded, bf16"),
    ("slurmft as submitted", "Trainer, padded, fp32"),
    ("slurmft, padded, bf16", "Trainer, padded, bf16"),
    ("slurmft, dynamic, bf16", "Trainer, dynamic, bf16"),
    ("slurmft, LoRA, fp32", "Trainer and PEFT, LoRA, fp32"),
    ("slurmft, LoRA, bf16", "Trainer and PEFT, LoRA, bf16"),
]


def main(task: str, data: Path) -> None:
    cases = [
        name for name in CASES if not any(word in name for word in WORK[task].skip)
    ]
    cases = [name for name in cases if task != "lora" or "LoRA" in name]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        if data.name == "made":
            data = make_sentences(Path(folder) / "data")
        for number in range(ROUNDS):
            names = cases[:: -1 if number % 2 else 1]
            for name in names:
                found[name].append(run(Path(folder), task, data, name))
                print(number, name, found[name][-1]["samples_per_s"], flush=True)
    report(task, found)


def report(task: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Writes and prints medians, and ratios of them."""
    rates = {
        name: statistics.median(each["samples_per_s"] for each in all_of)
        for name, all_of in found.items()
    }
    ratios = {
        f"{ours} / {theirs}": rates[ours] / rates[theirs]
        for ours, theirs in RATIOS
        if ours in rates and theirs in rates
    }
    print(json.dumps(ratios, indent=1))
    difference = None
    if task == "lora":
        ours, theirs = (found[name][0]["losses"] for name in RATIOS[-2])
        difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        print(f"largest difference of two losses in fp32: {difference:.2g}")
    work = WORK[task]
    save(f"throughput_vs_trainer_{task}", {
        "batch_size": work.batch_size, "max_length": work.max_length, "steps": work.steps,
        "runs": found, "median_samples_per_s": rates, "ratios": ratios,
        **({"largest_loss_difference_fp32": difference} if difference is not None else {}),
    })  # fmt: skip


def run(folder: Path, task: str, data: Path, name: str) -> dict[str, Any]:
    """One case in a process of its own."""
    output = folder / "measured.json"
    command = [
        sys.executable,
        __file__,
        "case",
        task,
        str(data),
        name,
        str(folder),
        str(output),
    ]
    environment = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    if name == "slurmft as submitted":
        environment |= job_environment()
    call(*command, timeout_s=900, env=os.environ | environment)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def case(task: str, data: Path, name: str, folder: Path, output: Path) -> None:
    program, batching, precision = CASES[name]
    path = make_case(folder / "runs", task, data, encoder(), batching, precision)
    times, given, f1 = {"slurmft": by_slurmft, "trainer": by_trainer}[program](
        path, task
    )
    work, losses = WORK[task], [float(loss) for loss in given]
    seconds = times[-1] - times[WARM_UP - 1]
    found: dict[str, Any] = {
        "samples_per_s": work.steps * work.batch_size / seconds,
        "loss": statistics.mean(losses[WARM_UP:]),
        "peak_memory_mib": peak_memory_mib(),
    }
    if task == "lora":
        found["losses"] = losses
    if task == "token-classification":
        found["entity_f1_percent"] = f1()
    output.write_text(json.dumps(found))
    os._exit(0)


def make_case(
    runs_dir: Path, task: str, data: Path, model: Path, batching: str, precision: str
) -> Path:
    """A run directory of what both programs train, at a constant learning rate."""
    work, settings = WORK[task], {"learning_rate": 5e-5}
    if task == "lora":
        task, settings = "emotion", LORA
    return make_run(
        runs_dir, task=task, data=str(data), model=str(model), batching=batching,
        precision=precision, batch_size=work.batch_size, max_length=work.max_length,
        lr_schedule="constant", warmup_ratio=0.0, **settings,
    )  # fmt: skip


def by_slurmft(path: Path, task: str) -> Trained:
    steps = Steps(path)
    times, losses = [], []
    for _ in range(WARM_UP + WORK[task].steps):
        losses.append(steps.step())
        times.append(time.perf_counter())
    model = steps.learner.loaded.model
    return times, losses, partial(f1_of, steps.setup.task, model, steps.setup.data)


def by_trainer(path: Path, task: str) -> Trained:
    """The same by transformers' Trainer, on the same samples in the same order."""
    from transformers import (
        AutoTokenizer,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
    )

    from slurmft.runs.rundir import RunDir
    from slurmft.train import tasks
    from slurmft.train.config import TrainConfig
    from slurmft.train.data.stream import epoch_order

    run, work = RunDir.open(path), WORK[task]
    config = TrainConfig.of(run.load_config().program)
    maker = tasks.get(config)
    data = maker.prepare()
    order = epoch_order(len(data.train), config.seed, 0)
    rows = [
        sample(data.train, i) for i in order[: (WARM_UP + work.steps) * work.batch_size]
    ]
    is_padded = config.batching == "padded"
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    fill: dict[str, Any] = {"padding": "longest"}
    if is_padded:
        fill = {"padding": "max_length", "max_length": work.max_length}
    of_words = data.train.token_labels is not None
    collator = (
        DataCollatorForTokenClassification if of_words else DataCollatorWithPadding
    )
    model = make_model(maker, data, config)
    times, losses = train_by_trainer(
        model, rows, collator(tokenizer, **fill), path / "trainer",
        per_device_train_batch_size=work.batch_size, max_steps=WARM_UP + work.steps,
        learning_rate=config.learning_rate or 0.0, weight_decay=config.weight_decay,
        bf16=config.precision == "bf16",
    )  # fmt: skip
    return times, losses, partial(f1_of, maker, model, data)


def f1_of(maker: Any, model: Any, data: Any) -> float:
    """Of the entities of all validation samples."""
    import torch

    parts = np.array_split(np.arange(len(data.validation)), 64)
    batches = [data.validation.batch(part, data.pad_id) for part in parts]
    model.eval()
    with torch.no_grad():
        found = [maker.evaluate(model, batch, data).numpy() for batch in batches]
    return 100 * float(maker.compute(np.concatenate(found), data)["entity_f1"])


def make_model(maker: Any, data: Any, config: Any) -> Any:
    """The task's model; with LoRA, as PEFT's users make it."""
    from accelerate.utils import set_seed

    set_seed(config.seed)
    model = maker.model(data)
    if not config.lora:
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=config.lora,
        lora_alpha=2 * config.lora,
        target_modules="all-linear",
        task_type="SEQ_CLS",
    )
    return get_peft_model(model, adapters)


def make_sentences(folder: Path) -> Path:
    """Sentences of English words with the lengths of news (mean 14 words), of which some name a
    person, place or organization, by words of one type or by a word before them."""
    rng = random.Random(0)
    common = [
        "the",
        "a",
        "of",
        "to",
        "in",
        "and",
        "he",
        "she",
        "it",
        "was",
        "said",
        "on",
        "for",
    ]
    kinds = ("PER", "LOC", "ORG")
    names = {kind: [f"{kind.lower()}{chr(97 + i)}{chr(97 + k)}" for i in range(20) for k in
             range(20)] for kind in kinds}  # fmt: skip

    def row() -> dict[str, list[str]]:
        words = rng.choices(common, k=max(2, min(round(rng.gammavariate(1.6, 9)), 80)))
        tags = ["O"] * len(words)
        for at in range(0, len(words) - 2, 6):
            kind = rng.choice(kinds)
            words[at : at + 2] = rng.choices(names[kind], k=2)
            tags[at : at + 2] = f"B-{kind}", f"I-{kind}"
        return {"tokens": words, "tags": tags}

    folder.mkdir()
    for split, count in (("train", 20_000), ("validation", 2_000)):
        lines = (json.dumps(row()) + "\n" for _ in range(count))
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def sample(table: Any, i: int) -> dict[str, Any]:
    """A sample as the Trainer's users have it: lists."""
    start, end = table.offsets[i], table.offsets[i + 1]
    found: dict[str, Any] = {"input_ids": table.tokens[start:end].tolist()}
    found["attention_mask"] = [1] * int(end - start)
    if table.types is not None:
        found["token_type_ids"] = table.types[start:end].tolist()
    if table.token_labels is not None:
        return found | {"labels": table.token_labels[start:end].tolist()}
    label = table.labels[i]
    if label.ndim:
        names = ("start_positions", "end_positions")
        return found | dict(zip(names, label.tolist(), strict=True))
    return found | {"labels": label.item()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        case(
            sys.argv[2],
            Path(sys.argv[3]),
            sys.argv[4],
            Path(sys.argv[5]),
            Path(sys.argv[6]),
        )
    arguments = parser(__doc__)
    arguments.add_argument("task", choices=WORK)
    arguments.add_argument("data", type=Path, metavar="DATA_DIR")
    asked = arguments.parse_args()
    main(asked.task, asked.data.absolute())
