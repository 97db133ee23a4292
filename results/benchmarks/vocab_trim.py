"""What does it gain to train only the rows of tokens that the data has (vocabulary trimming)? One
process, all cores, MRPC in batches of 32, bf16, packed; the 22M-parameter encoder (30,522 tokens),
and random weights of XLM-R-base's sizes (250,002 tokens) for the same text.

    python results/benchmarks/vocab_trim.py MRPC_DIR        # 4 minutes, 15 GB of memory

MRPC_DIR holds train.jsonl and validation.jsonl. Speed: both trainings in one process, steps on the
same samples in turn. Memory and losses: each in a process of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Steps, call, encoder, job_environment, parser, peak_memory_mib, save
from throughput_vs_trainer import make_case

ROWS = ("all", "used")
STEPS = {"MiniLM": 80, "XLM-R-base": 16}
WARM_UP = 4


def main(data: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = {"MiniLM": encoder(), "XLM-R-base": make_large(folder / "large")}
        for name, model in models.items():
            alone = {rows: run(folder, data, model, [rows], WARM_UP) for rows in ROWS}
            both = run(folder, data, model, list(ROWS), STEPS[name])
            pairs = zip(both["step_s"]["all"], both["step_s"]["used"], strict=True)
            found[name] = {
                "step_s": both["step_s"],
                "speed": statistics.median(whole / used for whole, used in pairs),
                "peak_memory": alone["used"]["peak_memory_mib"]
                / alone["all"]["peak_memory_mib"],
                "checkpoint": alone["used"]["checkpoint_mib"]
                / alone["all"]["checkpoint_mib"],
                "alone": alone,
            }
            print(
                name,
                {k: found[name][k] for k in ("speed", "peak_memory", "checkpoint")},
            )
    save("vocab_trim", {"used_over_all": found})


def make_large(folder: Path) -> Path:
    """XLM-R-base's sizes, with the encoder's tokenizer."""
    from transformers import AutoTokenizer, XLMRobertaConfig, XLMRobertaModel

    config = XLMRobertaConfig(
        vocab_size=250_002, max_position_embeddings=514, type_vocab_size=1, pad_token_id=0,
        layer_norm_eps=1e-5,
    )  # fmt: skip
    XLMRobertaModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder()).save_pretrained(folder)
    return folder


def run(
    folder: Path, data: Path, model: Path, rows: list[str], steps: int
) -> dict[str, Any]:
    """Trains with all rows, with those in use, or both in turn, in a process of its own."""
    output = folder / "measured.json"
    command = [sys.executable, __file__, "case", str(data), str(model), ",".join(rows)]
    call(
        *(*command, str(steps), str(folder), str(output)),
        timeout_s=900,
        env=os.environ | job_environment(),
    )
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def case(
    data: Path, model: Path, rows: list[str], steps: int, folder: Path, output: Path
) -> None:
    trainings = {each: training_of(data, model, each, folder) for each in rows}
    times: dict[str, list[float]] = {each: [] for each in rows}
    losses: dict[str, list[float]] = {each: [] for each in rows}
    for step in range(WARM_UP + steps):
        for each in rows[:: -1 if step % 2 else 1]:
            began = time.perf_counter()
            losses[each].append(float(trainings[each].step()))
            times[each].append(time.perf_counter() - began)
    found = {
        "step_s": {each: times[each][WARM_UP:] for each in rows},
        "loss": losses[rows[0]],
        "checkpoint_mib": checkpoint_mib(trainings[rows[0]].learner),
        "peak_memory_mib": peak_memory_mib(),
    }
    output.write_text(json.dumps(found))
    os._exit(0)


def training_of(data: Path, model: Path, rows: str, folder: Path) -> Steps:
    """A training of all rows, or of those in use; all of one process share its process group."""
    from slurmft.job import process_group
    from slurmft.train.engine import vocab_trim

    before = vocab_trim._LEAST_SAVED_BYTES
    if rows == "all":
        vocab_trim._LEAST_SAVED_BYTES = 2**60
    steps = Steps(make_case(folder / "runs", "mrpc", data, model, "packed", "bf16"))
    vocab_trim._LEAST_SAVED_BYTES = before
    process_group.init = lambda *_: steps.world
    return steps


def checkpoint_mib(learner: Any) -> float:
    """Of weights and the optimizer's state."""
    state = list(learner.loaded.model.parameters())
    for each in learner.optimizer.state.values():
        state += each.values()
    return float(sum(tensor.nbytes for tensor in state)) / 2**20


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        data, model, rows, steps, folder, output = sys.argv[2:]
        case(
            Path(data),
            Path(model),
            rows.split(","),
            int(steps),
            Path(folder),
            Path(output),
        )
    arguments = parser(__doc__)
    arguments.add_argument("data", type=Path, metavar="MRPC_DIR")
    main(arguments.parse_args().data.absolute())
