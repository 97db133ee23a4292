"""MRPC and SQuAD with a pretrained 22M-parameter encoder, on two nodes of a real Slurm.

    python -m tests.support.cluster up 2 && eval "$(python -m tests.support.cluster env)"
    python results/glue_squad.py mrpc DATA_DIR                  # 3 epochs of MRPC
    python results/glue_squad.py squad DATA_DIR OFFICIAL        # 1 epoch of a part of SQuAD

DATA_DIR holds mrpc/{train,validation}.jsonl and squad/{train_first11877,validation}.jsonl.gz;
OFFICIAL is the evaluation script of SQuAD v1.1, evaluate-v1.1.py.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import encoder, save

VALIDATION_QUESTIONS = 1000
MAX_LENGTH, DOC_STRIDE = 384, 128
COMMON = ("--nodes", "2", "--cluster", "slurm", "--cpus-per-task", "1", "--time", "60")
COMMON += ("--precision", "bf16", "--follow")


def main(part: str, *paths: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        {"mrpc": mrpc, "squad": squad}[part](Path(folder), *paths)


def mrpc(folder: Path, data: Path) -> None:
    flags = ("--batch-size", "16", "--learning-rate", "1e-4", "--epochs", "3")
    found = run(folder, "mrpc", data / "mrpc", *flags)
    save("mrpc", {"result": result(found), "epochs": epochs(found)})


def squad(folder: Path, data: Path, official: Path) -> None:
    part = folder / "data"
    part.mkdir()
    train = lines(data / "squad" / "train_first11877.jsonl.gz")
    # Every tenth: of all articles.
    rows = lines(data / "squad" / "validation.jsonl.gz")[::10][:VALIDATION_QUESTIONS]
    (part / "train.jsonl").write_text("".join(train))
    (part / "validation.jsonl").write_text("".join(rows))
    flags = ("--batch-size", "8", "--learning-rate", "3e-4", "--epochs", "1")
    flags += ("--max-length", str(MAX_LENGTH), "--doc-stride", str(DOC_STRIDE))
    found = run(folder, "squad", part, *flags)
    # In fp32: in bf16 a window's logits depend on the padding of its batch.
    ours = slurmft_answers(found)
    own = independent_scores(found / "model", [json.loads(row) for row in rows], official)
    print("fp32:", ours, "independent, official script:", own)
    save("squad", {
        "train_questions": len(train), "validation_questions": len(rows),
        "result": result(found), "fp32": ours, "fp32_official": own,
    })  # fmt: skip


def run(folder: Path, task: str, data: Path, *flags: str) -> Path:
    """Trains; returns the run directory."""
    command = [sys.executable, "-m", "slurmft.submit", *COMMON, "--task", task]
    command += ["--data", str(data), "--model", str(encoder()), "--runs-dir", str(folder / "runs")]
    subprocess.run([*command, *flags], check=True, timeout=7000)
    return next((folder / "runs").iterdir())


def lines(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return list(file)


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

    from slurmft.runs.rundir import RunDir
    from slurmft.train import tasks
    from slurmft.train.data import TARGETS, TokenData

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


def independent_scores(
    model: Path, rows: Sequence[dict[str, Any]], official: Path
) -> dict[str, float]:
    """Exact match and F1 of the saved model by the official script; answers in plain Python."""
    questions = [
        {"id": row["id"], "answers": [{"text": text} for text in row["answers"]["text"]]}
        for row in rows
    ]
    dataset = {"data": [{"paragraphs": [{"qas": questions}]}]}
    with tempfile.TemporaryDirectory() as name:
        files = Path(name, "dataset.json"), Path(name, "predictions.json")
        for file, content in zip(files, (dataset, independent_answers(model, rows)), strict=True):
            file.write_text(json.dumps(content))
        command = [sys.executable, str(official), *map(str, files)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def independent_answers(model: Path, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The saved model's answer to each question, one after another."""
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForQuestionAnswering.from_pretrained(model, dtype=torch.float32).eval()
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
            firsts, lasts = (sorted(range(len(x)), key=lambda i: -x[i])[:20] for x in (start, end))
            for i in firsts:
                for j in lasts:
                    if of_context[i] and of_context[j] and i <= j < i + 30:
                        text = row["context"][offsets[i][0] : offsets[j][1]]
                        candidates.append((start[i] + end[j], text))
        answers[row["id"]] = max(candidates, key=lambda c: c[0])[1] if candidates else ""
    return answers


if __name__ == "__main__":
    main(sys.argv[1], *(Path(path).absolute() for path in sys.argv[2:]))
