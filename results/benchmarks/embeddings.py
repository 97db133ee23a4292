"""How fast is a step of --task embeddings against sentence-transformers' own trainer? One process,
all cores, the 22M-parameter encoder, the same pairs, MultipleNegativesRankingLoss.

    python results/benchmarks/embeddings.py questions DATA_DIR    # SQuAD's, with their contexts
    python results/benchmarks/embeddings.py sentences DATA_DIR    # MRPC's pairs of sentences

DATA_DIR holds train.jsonl, also as .gz, as the data set has it. Every case is a process of its own,
in turn; a round has them all. Of every process, the time of the same steps after the warm-up
counts. Losses are means over these steps; dropout and the order of the rows differ between cases.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Steps, call, encoder, make_run, parser, peak_memory_mib, save

ROUNDS, WARM_UP = 3, 2


@dataclass(frozen=True)
class Work:
    """What is trained."""

    columns: tuple[str, str]
    batch_size: int
    max_length: int
    steps: int
    """That count."""


WORK = {
    "questions": Work(("question", "context"), 16, 256, 5),
    "sentences": Work(("sentence1", "sentence2"), 32, 128, 6),
}
CASES = {
    "sentence-transformers, fp32": ("sentence-transformers", "fp32"),
    "slurmft, fp32": ("slurmft", "fp32"),
    "sentence-transformers, bf16": ("sentence-transformers", "bf16"),
    "slurmft, bf16": ("slurmft", "bf16"),
}
"""Name -> program, precision."""


def main(kind: str, data: Path) -> None:
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder) / "data", kind, data)
        for number in range(ROUNDS):
            for name in list(CASES)[:: -1 if number % 2 else 1]:
                measured[name].append(run(Path(folder), kind, rows, name))
                print(number, name, measured[name][-1]["rows_per_s"], flush=True)
    rates = {
        name: statistics.median(each["rows_per_s"] for each in runs)
        for name, runs in measured.items()
    }
    ratios = {
        precision: rates[f"slurmft, {precision}"]
        / rates[f"sentence-transformers, {precision}"]
        for precision in ("fp32", "bf16")
    }
    print(json.dumps(ratios, indent=1))
    work = WORK[kind]
    save(f"embeddings_{kind}", {
        "batch_size": work.batch_size, "max_length": work.max_length, "steps": work.steps,
        "runs": measured, "median_rows_per_s": rates, "ratios": ratios,
    })  # fmt: skip


def write_rows(folder: Path, kind: str, data: Path) -> Path:
    """Writes as many pairs as are trained, the first of the data; some are validation, too."""
    work = WORK[kind]
    file = next(iter(sorted(data.glob("train*.jsonl*"))))
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    rows = []
    for line in content.splitlines():
        row = json.loads(line)
        anchor, positive = (row[name] for name in work.columns)
        rows.append({"anchor": anchor, "positive": positive})
    # Neighbouring questions have the same context, which would be their negative.
    count = (WARM_UP + work.steps) * work.batch_size
    rows = rows[:: len(rows) // count][:count]
    folder.mkdir()
    for split, part in (("train", rows), ("validation", rows[:16])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{split}.jsonl").write_text(text)
    return folder


def run(folder: Path, kind: str, data: Path, name: str) -> dict[str, Any]:
    """One case in a process of its own."""
    output = folder / "measured.json"
    command = [sys.executable, __file__, "case", kind, str(data), name, str(folder)]
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    call(*command, str(output), timeout_s=900, env=os.environ | threads)
    measured: dict[str, Any] = json.loads(output.read_text())
    return measured


def case(kind: str, data: Path, name: str, folder: Path, output: Path) -> None:
    program, precision = CASES[name]
    work = WORK[kind]
    by = {"slurmft": by_slurmft, "sentence-transformers": by_sentence_transformers}
    times, losses = by[program](work, data, precision, folder)
    seconds = times[-1] - times[WARM_UP - 1]
    measured = {
        "rows_per_s": work.steps * work.batch_size / seconds,
        "loss": statistics.mean(float(loss) for loss in losses[WARM_UP:]),
        "peak_memory_mib": peak_memory_mib(),
    }
    output.write_text(json.dumps(measured))
    os._exit(0)


def by_slurmft(
    work: Work, data: Path, precision: str, folder: Path
) -> tuple[list[float], list[Any]]:
    path = make_run(
        folder / "runs", task="embeddings", data=str(data), model=str(encoder()),
        precision=precision, batch_size=work.batch_size, max_length=work.max_length,
        lr_schedule="constant", warmup_ratio=0.0, learning_rate=2e-5,
    )  # fmt: skip
    steps = Steps(path)
    times, losses = [], []
    for _ in range(WARM_UP + work.steps):
        losses.append(steps.step())
        times.append(time.perf_counter())
    return times, losses


def by_sentence_transformers(
    work: Work, data: Path, precision: str, folder: Path
) -> tuple[list[float], list[Any]]:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import (
        MultipleNegativesRankingLoss,
    )
    from transformers import TrainerCallback

    times: list[float] = []
    losses: list[Any] = []

    class Recorded(SentenceTransformerTrainer):  # type: ignore[misc, unused-ignore]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            losses.append(super().training_step(*args, **kwargs).detach())
            return losses[-1]

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    model = SentenceTransformer(str(encoder()), device="cpu")
    model.max_seq_length = work.max_length
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=work.batch_size,
        max_steps=WARM_UP + work.steps, learning_rate=2e-5, weight_decay=0.01,
        lr_scheduler_type="constant", bf16=precision == "bf16", use_cpu=True,
        optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    Recorded(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_json(str(data / "train.jsonl")),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[Clock()],
    ).train()
    return times, losses


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        kind, data, name, folder, output = sys.argv[2:]
        case(kind, Path(data), name, Path(folder), Path(output))
    arguments = parser(__doc__)
    arguments.add_argument("kind", choices=WORK)
    arguments.add_argument("data", type=Path, metavar="DATA_DIR")
    asked = arguments.parse_args()
    main(asked.kind, asked.data.absolute())
