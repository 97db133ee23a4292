"""What do the tasks reach with the 22M-parameter encoder on a real Slurm? Are losses the same for
any number of ranks, and are SQuAD's scores those of the official script?

    python -m tests.support.cluster up 4 && eval "$(python -m tests.support.cluster env)"
    python results/benchmarks/accuracy.py losses DATA_DIR     # emotion, 1 rank x 64, 4 x 16: 3 min
    python results/benchmarks/accuracy.py emotion DATA_DIR    # 2 epochs, four nodes: 17 min
    python results/benchmarks/accuracy.py mrpc DATA_DIR       # 3 epochs, two nodes: 6 min
    python results/benchmarks/accuracy.py squad DATA_DIR OFFICIAL     # a part, 1 epoch, two nodes

DATA_DIR holds {emotion,mrpc}/{train,validation}.jsonl and
squad/{train_first11877,validation}.jsonl.gz; OFFICIAL is evaluate-v1.1.py of SQuAD v1.1.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import encoder, parser, records, result, save, submit

STEPS = 20
VALIDATION_QUESTIONS = 1000
MAX_LENGTH, DOC_STRIDE = 384, 128


def train(folder: Path, task: str, data: Path, nodes: int, *flags: str) -> Path:
    """Trains on the cluster; returns the run directory."""
    return submit(
        folder,
        *(
            "--cluster",
            "slurm",
            "--nodes",
            str(nodes),
            "--cpus-per-task",
            "1",
            "--time",
            "60",
        ),
        *("--task", task, "--data", str(data), "--model", str(encoder())),
        *flags,
    )


def losses(folder: Path, data: Path) -> None:
    exact = ("--precision", "fp32", "--dropout", "0", "--max-steps", str(STEPS))
    found = []
    for nodes in (1, 4):
        flags = (*exact, "--batch-size", str(64 // nodes))
        run = train(folder / str(nodes), "emotion", data / "emotion", nodes, *flags)
        found.append([record["loss"] for record in records(run, "step")])
    one, four = found
    largest = max(abs(a - b) for a, b in zip(one, four, strict=True))
    print(f"largest difference of the first {STEPS} losses: {largest:.2e}")
    both = {"losses_1_rank_x_64": one, "losses_4_ranks_x_16": four}
    save("accuracy_losses", {"largest_difference": largest} | both)


def emotion(folder: Path, data: Path) -> None:
    run = train(folder, "emotion", data / "emotion", 4)
    logs = sorted((run / "logs").glob("rank-*.log"))
    last = [
        [x for x in log.read_text().splitlines() if " done:" in x][-1] for log in logs
    ]
    save("accuracy_emotion", {"result": result(run), "metric_on_every_rank": last})


def mrpc(folder: Path, data: Path) -> None:
    flags = ("--batch-size", "16", "--learning-rate", "1e-4", "--epochs", "3")
    run = train(folder, "mrpc", data / "mrpc", 2, "--precision", "bf16", *flags)
    epochs = [record["metrics"] for record in records(run, "epoch")]
    save("accuracy_mrpc", {"result": result(run), "epochs": epochs})


def squad(folder: Path, data: Path, official: Path) -> None:
    part = folder / "data"
    part.mkdir()
    training = lines(data / "squad" / "train_first11877.jsonl.gz")
    # Every tenth: of all articles.
    rows = lines(data / "squad" / "validation.jsonl.gz")[::10][:VALIDATION_QUESTIONS]
    (part / "train.jsonl").write_text("".join(training))
    (part / "validation.jsonl").write_text("".join(rows))
    run = train(
        *(folder / "runs", "squad", part, 2),
        *(
            "--precision",
            "bf16",
            "--batch-size",
            "8",
            "--learning-rate",
            "3e-4",
            "--epochs",
            "1",
        ),
        *("--max-length", str(MAX_LENGTH), "--doc-stride", str(DOC_STRIDE)),
    )
    # In fp32: in bf16 a window's logits depend on the padding of its batch.
    ours = slurmft_scores(run)
    theirs = official_scores(run / "model", [json.loads(row) for row in rows], official)
    print("fp32:", ours, "official script:", theirs)
    save("accuracy_squad", {
        "train_questions": len(training), "validation_questions": len(rows),
        "result": result(run), "fp32": ours, "fp32_official": theirs,
    })  # fmt: skip


def lines(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return list(file)


def slurmft_scores(run: Path) -> dict[str, float]:
    """Exact match and F1 of the saved model, by slurmft's own batches, answers and scores."""
    import numpy as np
    import torch
    from transformers import AutoModelForQuestionAnswering

    from slurmft.runs.rundir import RunDir
    from slurmft.train import tasks
    from slurmft.train.config import TrainConfig
    from slurmft.train.data.token_data import TokenData

    run_dir = RunDir.open(str(run))
    task = tasks.get(TrainConfig.of(run_dir.load_config().program))
    data = TokenData.load(run_dir.tokens)
    loaded = AutoModelForQuestionAnswering.from_pretrained(
        run_dir.model, dtype=torch.float32
    )
    parts, windows = [], np.arange(len(data.validation))
    for samples in np.split(windows, windows[16::16]):
        batch = data.validation.batch(samples, data.pad_id)
        with torch.inference_mode():
            parts.append(task.evaluate(loaded.eval(), batch, data).predictions.numpy())
    return task.compute(np.concatenate(parts), data)


# --- SQuAD again, without anything of slurmft -----------------------------------------------------


def official_scores(
    model: Path, rows: Sequence[dict[str, Any]], official: Path
) -> dict[str, float]:
    """Exact match and F1 of the saved model by the official script; answers in plain Python."""
    questions = [
        {
            "id": row["id"],
            "answers": [{"text": text} for text in row["answers"]["text"]],
        }
        for row in rows
    ]
    dataset = {"data": [{"paragraphs": [{"qas": questions}]}]}
    with tempfile.TemporaryDirectory() as name:
        files = Path(name, "dataset.json"), Path(name, "predictions.json")
        for file, content in zip(
            files, (dataset, plain_answers(model, rows)), strict=True
        ):
            file.write_text(json.dumps(content))
        command = [sys.executable, str(official), *map(str, files)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def plain_answers(model: Path, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The saved model's answer to each question, one after another."""
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForQuestionAnswering.from_pretrained(
        model, dtype=torch.float32
    ).eval()
    answers = {}
    for row in rows:
        encoded = tokenizer(
            row["question"], row["context"], truncation="only_second", max_length=MAX_LENGTH,
            stride=DOC_STRIDE, return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        candidates = []
        for window in range(len(encoded["input_ids"])):
            names = ("input_ids", "token_type_ids", "attention_mask")
            inputs = {name: torch.tensor([encoded[name][window]]) for name in names}
            with torch.inference_mode():
                output = loaded(**inputs)
            start, end = output.start_logits[0].tolist(), output.end_logits[0].tolist()
            of_context = [text == 1 for text in encoded.sequence_ids(window)]
            offsets = encoded["offset_mapping"][window]
            firsts, lasts = (
                sorted(range(len(x)), key=lambda i: -x[i])[:20] for x in (start, end)
            )
            for i in firsts:
                for j in lasts:
                    if of_context[i] and of_context[j] and i <= j < i + 30:
                        text = row["context"][offsets[i][0] : offsets[j][1]]
                        candidates.append((start[i] + end[j], text))
        answers[row["id"]] = (
            max(candidates, key=lambda c: c[0])[1] if candidates else ""
        )
    return answers


PARTS: dict[str, Callable[..., None]] = {
    "losses": losses,
    "emotion": emotion,
    "mrpc": mrpc,
    "squad": squad,
}


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("part", choices=PARTS)
    arguments.add_argument("data", type=Path, metavar="DATA_DIR")
    arguments.add_argument(
        "official", type=Path, nargs="?", help="squad: the official script"
    )
    asked = arguments.parse_args()
    if (asked.part == "squad") != bool(asked.official):
        arguments.error("squad, and squad alone, needs OFFICIAL")
    paths = [path.absolute() for path in (asked.data, asked.official) if path]
    with tempfile.TemporaryDirectory() as name:
        PARTS[asked.part](Path(name), *paths)
