"""MRPC and SQuAD with a pretrained 22M-parameter encoder, on two simulated nodes of this machine.

python results/glue_squad.py mrpc DATA_DIR     # 3 epochs of MRPC
python results/glue_squad.py squad DATA_DIR    # 1 epoch of a part of SQuAD's training rows

DATA_DIR holds mrpc/{train,validation}.jsonl and squad/{train_first11877,validation}.jsonl.gz.
"""

from __future__ import annotations

import gzip
import json
import re
import string
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import encoder, save

TRAIN_QUESTIONS, VALIDATION_QUESTIONS = 2000, 1000
MAX_LENGTH, DOC_STRIDE = 256, 64
COMMON = ("--nodes", "2", "--cluster", "local", "--precision", "bf16", "--follow")


def main(part: str, data: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        {"mrpc": mrpc, "squad": squad}[part](Path(folder), data)


def mrpc(folder: Path, data: Path) -> None:
    flags = ("--batch-size", "16", "--learning-rate", "1e-4", "--epochs", "3")
    found = run(folder, "mrpc", data / "mrpc", *flags)
    save("mrpc", {"result": result(found), "epochs": epochs(found)})


def squad(folder: Path, data: Path) -> None:
    part = folder / "data"
    part.mkdir()
    train = head(data / "squad" / "train_first11877.jsonl.gz", TRAIN_QUESTIONS)
    # Every tenth: of all articles.
    rows = head(data / "squad" / "validation.jsonl.gz", 10 * VALIDATION_QUESTIONS)[::10]
    (part / "train.jsonl").write_text("".join(train))
    (part / "validation.jsonl").write_text("".join(rows))
    flags = ("--batch-size", "8", "--learning-rate", "3e-4", "--epochs", "1")
    flags += ("--max-length", str(MAX_LENGTH), "--doc-stride", str(DOC_STRIDE))
    found = run(folder, "squad", part, *flags)
    # In fp32: in bf16 a window's logits depend on the padding of its batch.
    ours = slurmft_answers(found)
    own = independent_answers(found / "model", [json.loads(row) for row in rows])
    print("fp32:", ours, "independent:", own)
    save("squad", {
        "train_questions": len(train), "validation_questions": len(rows),
        "result": result(found), "fp32": ours, "fp32_independent": own,
    })  # fmt: skip


def run(folder: Path, task: str, data: Path, *flags: str) -> Path:
    """Trains; returns the run directory."""
    command = [sys.executable, "-m", "slurmft.submit", *COMMON, "--task", task]
    command += ["--data", str(data), "--model", str(encoder()), "--runs-dir", str(folder / "runs")]
    subprocess.run([*command, *flags], check=True, timeout=3000)
    return next((folder / "runs").iterdir())


def head(path: Path, lines: int) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [line for line, _ in zip(file, range(lines), strict=False)]


def result(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found | {"model": Path(found["model"]).name}


def epochs(run: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return [record["metrics"] for record in records if record["event"] == "epoch"]


def slurmft_answers(run: Path) -> dict[str, float]:
    """Exact match and F1 of the saved model, by slurmft's own batches, answers and scores."""
    import numpy as np
    import torch
    from transformers import AutoModelForQuestionAnswering

    from slurmft import tasks
    from slurmft.data import TARGETS, TokenData
    from slurmft.rundir import RunDir

    run_dir = RunDir.open(str(run))
    task, data = tasks.get(run_dir.load_config().train), TokenData.load(run_dir.tokens)
    loaded = AutoModelForQuestionAnswering.from_pretrained(run_dir.model, dtype=torch.float32)
    parts, windows = [], np.arange(len(data.validation))
    for samples in np.split(windows, windows[16::16]):
        batch = data.validation.batch(samples, data.pad_id).inputs
        with torch.inference_mode():
            output = loaded.eval()(**{k: v for k, v in batch.items() if k not in TARGETS})
            parts.append(task.predict(output, samples, data).numpy())
    return task.compute(np.concatenate(parts), data)


# --- SQuAD again, without anything of slurmft -----------------------------------------------------


def independent_answers(model: Path, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Exact match and F1 of the saved model, one question after another, in plain Python."""
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForQuestionAnswering.from_pretrained(model, dtype=torch.float32).eval()
    exact = f1 = 0.0
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
            for i in sorted(range(len(start)), key=lambda i: -start[i])[:20]:
                for j in sorted(range(len(end)), key=lambda j: -end[j])[:20]:
                    if of_context[i] and of_context[j] and i <= j < i + 30:
                        text = row["context"][offsets[i][0] : offsets[j][1]]
                        candidates.append((start[i] + end[j], text))
        answer = max(candidates, key=lambda c: c[0])[1] if candidates else ""
        golds = row["answers"]["text"]
        exact += max(normal(answer) == normal(gold) for gold in golds)
        f1 += max(word_f1(answer, gold) for gold in golds)
    return {"squad_f1": 100 * f1 / len(rows), "squad_exact_match": 100 * exact / len(rows)}


def normal(text: str) -> str:
    """As the official script compares texts."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def word_f1(answer: str, gold: str) -> float:
    said, right = normal(answer).split(), normal(gold).split()
    same = sum((Counter(said) & Counter(right)).values())
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(right)
    return 2 * precision * recall / (precision + recall)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
