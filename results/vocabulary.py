"""What it gains to train only the rows of tokens that the data has: one process, all cores, MRPC in
batches of 32, bf16, packed; the 22M-parameter encoder (30,522 tokens), and random weights of
XLM-R-base's sizes (250,002 tokens) for the same text.

    python results/vocabulary.py MRPC_DIR        # 6 minutes, 12 GB; its train.jsonl, validation

Every case is a process of its own, in turn. Of every process, the same steps after the warm-up.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from batching import job_environment, make_run, peak_mib
from provenance import RESULTS, encoder, save

sys.path.insert(0, str(RESULTS.parent))

ROUNDS, WARM_UP, STEPS = 2, 3, {"MiniLM": 16, "XLM-R-base": 6}
CASES = [(model, rows) for model in STEPS for rows in ("all", "used")]


def main(data: Path) -> None:
    found: dict[str, list[dict[str, Any]]] = {f"{m}, {rows} rows": [] for m, rows in CASES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"MiniLM": encoder(), "XLM-R-base": make_large(folder / "large")}
        for number in range(ROUNDS):
            for model, rows in CASES[:: -1 if number % 2 else 1]:
                result = run(folder, data, models[model], rows, STEPS[model])
                found[f"{model}, {rows} rows"].append(result)
                print(number, model, rows, result, flush=True)
    medians = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    ratios = {
        model: {
            key: medians[f"{model}, used rows"][key] / medians[f"{model}, all rows"][key]
            for key in ("samples_per_s", "peak_memory_mib", "checkpoint_mib")
        }
        for model in STEPS
    }
    print(json.dumps(ratios, indent=1))
    save("vocabulary", {"used_over_all": ratios, "medians": medians, "runs": found})


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


def run(folder: Path, data: Path, model: Path, rows: str, steps: int) -> dict[str, Any]:
    output = folder / "measured.json"
    command = [sys.executable, __file__, "case", str(data), str(model), rows, str(steps)]
    subprocess.run(
        [*command, str(folder), str(output)],
        check=True, timeout=900, env=os.environ | job_environment(), capture_output=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def case(data: Path, model: Path, rows: str, steps: int, folder: Path, output: Path) -> None:
    from overhead import Bench

    from slurmft import vocabulary

    if rows == "all":
        vocabulary._SAVED_BYTES = 2**60
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"})
    bench = Bench(make_run("mrpc", data, folder, "packed", "bf16", model))
    training, times, losses = bench.training, [], []
    for _ in range(WARM_UP + steps):
        losses.append(training._step(bench.samples()))
        times.append(time.perf_counter())
    seconds = times[-1] - times[WARM_UP - 1]
    optimizer = training.bare_optimizer.state.values()
    state = list(training.bare_model.parameters())
    state += [value for each in optimizer for value in each.values()]
    found = {
        "samples_per_s": steps * training.plan.global_batch_size / seconds,
        "loss": statistics.mean(float(loss) for loss in losses[WARM_UP:]),
        "peak_memory_mib": peak_mib(),
        "checkpoint_mib": sum(tensor.nbytes for tensor in state) / 2**20,
    }
    output.write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "case":
        case(
            *(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])),
            *(Path(sys.argv[6]), Path(sys.argv[7])),
        )
    else:
        main(Path(sys.argv[1]).absolute())
